//! Removes everything that an agent created on this machine.

use std::path::Path;
use std::{fs, io};

use anyhow::Context as _;
use health_datapath::services::{ServiceMaps, ServiceTables};
use health_datapath::{Datapath, pin_folder};
use health_endpoint::{enforcement, health, workload};
use health_model::settings::Location;
use health_net::{clock, netlink};
use health_registry::identity;
use health_service::provider::ipvs::{self, IpvsError};
use health_settings::ServiceProxyMode;
use nix::unistd::Uid;

use super::containers;
use super::folders::NewFolders;
use super::registration;
use super::services::kept_checks;
use crate::pidfile::PidFile;

/// Removes an instance's pins, programs, endpoint devices, routes, settings and files, its node's record in etcd, and the
/// slices of its endpoints in Kubernetes. Returns a list of everything removed. Missing objects are not an error; a running agent is.
pub async fn cleanup(location: &Location) -> anyhow::Result<Vec<String>> {
    let runtime_dir = &location.runtime_dir;
    let was_there = runtime_dir.exists();
    let mut removed = without_agent(location, remove_all).await?;
    // Other programs may keep files there.
    if was_there && fs::remove_dir(runtime_dir).is_ok() {
        removed.push(folder(runtime_dir));
    }
    Ok(removed)
}

/// Like [`cleanup`], but removes only the service state of these proxy modes.
pub async fn cleanup_services(
    location: &Location,
    modes: &[ServiceProxyMode],
) -> anyhow::Result<Vec<String>> {
    without_agent(location, async |location| {
        let mut removed = Vec::new();
        for mode in modes {
            removed.extend(match mode {
                ServiceProxyMode::Ebpf => remove_frontends(location)?,
                ServiceProxyMode::Ipvs => remove_ipvs().await?,
            });
        }
        let file = location.state_dir.join(kept_checks::FILE);
        if remove(fs::remove_file(&file), &file)? {
            removed.push(format!("file {}", file.display()));
        }
        Ok(removed)
    })
    .await
}

/// Runs a removal. Keeps agents from starting until all steps are done: they would lose whatever they had just created.
async fn without_agent(
    location: &Location,
    remove: impl AsyncFnOnce(&Location) -> anyhow::Result<Vec<String>>,
) -> anyhow::Result<Vec<String>> {
    anyhow::ensure!(
        Uid::effective().is_root(),
        "cleanup needs root; run it as root or with sudo"
    );
    let mut new_folders = NewFolders::default();
    let removed = async {
        new_folders.make(&location.runtime_dir)?;
        let _pid_file = PidFile::acquire(&location.pid_file())?;
        pin_folder::require_unused(location)?;
        remove(location).await
    };
    let removed = removed.await;
    new_folders.remove();
    removed
}

/// Removes all service ports from the pinned maps.
fn remove_frontends(location: &Location) -> anyhow::Result<Vec<String>> {
    let pins = location.pins();
    if !pins.exists() {
        return Ok(Vec::new());
    }
    let written =
        ServiceTables::open(ServiceMaps::from_pins(&pins)?)?.remove_all(clock::now_ns())?;
    let counts = [
        (written.frontends_removed, "frontends"),
        (written.backends_removed, "backends"),
        (written.source_ranges, "source ranges"),
    ];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    Ok(counts
        .map(|(count, what)| format!("{what} of services ({count})"))
        .collect())
}

/// Removes the services that IPVS serves in the calling thread's network namespace.
async fn remove_ipvs() -> Result<Vec<String>, IpvsError> {
    let handle = netlink::open()?;
    ipvs::cleanup(&handle).await
}

/// Removes everything except the runtime folder.
async fn remove_all(location: &Location) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    let mut failed = Vec::new();

    match Datapath::remove(location) {
        Ok(parts) => removed.extend(parts),
        Err(error) => failed.push(error.to_string()),
    }
    match remove_ipvs().await {
        Ok(parts) => removed.extend(parts),
        // The IPVS services belong to another instance.
        Err(IpvsError::InUse) => {}
        Err(error) => failed.push(error.to_string()),
    }
    let (workloads, not_removed) = workload::cleanup(&location.instance, &location.state_dir).await;
    removed.extend(workloads);
    failed.extend(not_removed);
    let endpoint = health::cleanup(&location.instance, &location.state_dir).await;
    removed.extend(endpoint.removed.iter().map(ToString::to_string));
    failed.extend(endpoint.failed.iter().map(ToString::to_string));

    match registration::forget(&location.state_dir).await {
        Ok(record) => removed.extend(record),
        Err(error) => failed.push(format!("{error:#}")),
    }
    let kept = [
        health_mesh::LEARNED_FILE.to_owned(),
        health_registry::nodes::CACHE_FILE.to_owned(),
        containers::STATE_FILE.to_owned(),
        kept_checks::FILE.to_owned(),
        enforcement::FILE.to_owned(),
        enforcement::CLUSTER_FILE.to_owned(),
        enforcement::DAMAGED_CLUSTER_FILE.to_owned(),
        enforcement::MODE_FILE.to_owned(),
        identity::LOCAL_FILE.to_owned(),
        health_settings::IDENTITIES_FILE.to_owned(),
        format!(
            "{}{}",
            health_settings::IDENTITIES_FILE,
            identity::LOCK_SUFFIX
        ),
    ];
    let kept = kept.map(|file| location.state_dir.join(file));
    for file in std::iter::once(location.socket()).chain(kept) {
        if remove(fs::remove_file(&file), &file)? {
            removed.push(format!("file {}", file.display()));
        }
    }
    let deletions = location.deletions();
    if remove(fs::remove_dir_all(&deletions), &deletions)? {
        removed.push(folder(&deletions));
    }
    // Other programs may keep files there.
    if fs::remove_dir(&location.state_dir).is_ok() {
        removed.push(folder(&location.state_dir));
    }
    anyhow::ensure!(
        failed.is_empty(),
        "cleanup is not complete: {}",
        failed.join("; ")
    );
    Ok(removed)
}

fn folder(path: &Path) -> String {
    format!("folder {}", path.display())
}

fn remove(result: io::Result<()>, path: &Path) -> anyhow::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}
