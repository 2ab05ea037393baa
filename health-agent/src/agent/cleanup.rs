//! Removing everything that an agent made on this machine.

use std::path::Path;
use std::{fs, io};

use anyhow::Context as _;
use health_datapath::loader;
use health_endpoint::{enforcement, health, workload};
use health_model::settings::Location;
use health_registry::identity;
use nix::unistd::Uid;

use super::own;
use crate::pidfile::PidFile;

/// Removes pins, programs, the endpoints' devices, routes, settings and files of an instance and its
/// node's record in etcd, and tells what it removed. What is not there is no failure; a running agent is.
pub async fn cleanup(location: &Location) -> anyhow::Result<Vec<String>> {
    anyhow::ensure!(
        Uid::effective().is_root(),
        "cleanup needs root; run it as root or with sudo"
    );
    let pid_file = match location.runtime_dir.exists() {
        true => Some(PidFile::acquire(&location.pid_file())?),
        false => None,
    };
    loader::require_unused(location)?;
    let mut removed = Vec::new();
    let mut failed = Vec::new();

    match loader::remove(location) {
        Ok(parts) => removed.extend(parts),
        Err(error) => failed.push(error.to_string()),
    }
    let (workloads, not_removed) = workload::cleanup(&location.instance, &location.state_dir).await;
    removed.extend(workloads);
    failed.extend(not_removed);
    let endpoint = health::cleanup(&location.instance, &location.state_dir).await;
    removed.extend(endpoint.removed.iter().map(ToString::to_string));
    failed.extend(endpoint.failed.iter().map(ToString::to_string));

    drop(pid_file);
    match own::forget(&location.state_dir).await {
        Ok(record) => removed.extend(record),
        Err(error) => failed.push(format!("{error:#}")),
    }
    let kept = [
        health_mesh::LEARNED_FILE.to_owned(),
        health_registry::nodes::CACHE_FILE.to_owned(),
        enforcement::FILE.to_owned(),
        identity::CIDR_FILE.to_owned(),
        identity::FILE.to_owned(),
        format!("{}{}", identity::FILE, identity::LOCK_SUFFIX),
    ];
    let kept = kept.map(|file| location.state_dir.join(file));
    for file in std::iter::once(location.socket()).chain(kept) {
        if remove(fs::remove_file(&file), &file)? {
            removed.push(format!("file {}", file.display()));
        }
    }
    // Others may keep something there.
    for folder in [&location.state_dir, &location.runtime_dir] {
        if fs::remove_dir(folder).is_ok() {
            removed.push(format!("folder {}", folder.display()));
        }
    }
    anyhow::ensure!(
        failed.is_empty(),
        "cleanup is not complete: {}",
        failed.join("; ")
    );
    Ok(removed)
}

fn remove(result: io::Result<()>, path: &Path) -> anyhow::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}
