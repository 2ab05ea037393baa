//! Removing everything that an agent made on this machine.

use std::path::Path;
use std::{fs, io};

use anyhow::Context as _;
use health_datapath::loader;
use health_endpoint::{enforcement, health, workload};
use health_model::settings::Location;
use health_registry::identity;
use nix::unistd::Uid;

use super::folders::NewFolders;
use super::own;
use crate::pidfile::PidFile;

/// Removes pins, programs, the endpoints' devices, routes, settings and files of an instance and its
/// node's record in etcd, and tells what it removed. What is not there is no failure; a running agent is.
pub async fn cleanup(location: &Location) -> anyhow::Result<Vec<String>> {
    anyhow::ensure!(
        Uid::effective().is_root(),
        "cleanup needs root; run it as root or with sudo"
    );
    let runtime_dir = &location.runtime_dir;
    let was_there = runtime_dir.exists();
    let mut new_folders = NewFolders::default();
    let removed = match new_folders.make(runtime_dir) {
        Ok(()) => remove_all(location).await,
        Err(error) => Err(error),
    };
    new_folders.remove();
    let mut removed = removed?;
    // Others may keep something there.
    if was_there && fs::remove_dir(runtime_dir).is_ok() {
        removed.push(folder(runtime_dir));
    }
    Ok(removed)
}

/// Removes all but the runtime folder. From the first step to the last no agent can start, which would lose what it
/// has just made.
async fn remove_all(location: &Location) -> anyhow::Result<Vec<String>> {
    let _pid_file = PidFile::acquire(&location.pid_file())?;
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
