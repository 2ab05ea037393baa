//! Removes the endpoints of all workloads, but never their namespaces.

use std::fs;
use std::path::Path;

use health_net::netlink;

use super::{Devices as _, HostDevices, SavedEndpoint, StateDir, WorkloadError};

/// Removes the devices of an instance's workloads, and their saved state. Returns what was removed and what could not
/// be removed.
pub async fn cleanup(instance: &str, state_dir: &Path) -> (Vec<String>, Vec<String>) {
    let (mut removed, mut failed) = (Vec::new(), Vec::new());
    let states = StateDir::of(state_dir);
    match netlink::open() {
        Ok(host) => {
            let devices = HostDevices::new(host, instance);
            remove_devices(&devices, &mut removed, &mut failed).await;
            remove_unmarked(&states, &devices, &mut removed, &mut failed).await;
        }
        Err(error) => failed.push(error.to_string()),
    }
    let folder = states.path();
    if folder.exists() {
        match fs::remove_dir_all(folder) {
            Ok(()) => removed.push(format!("folder {}", folder.display())),
            Err(error) => failed.push(format!("cannot remove {}: {error}", folder.display())),
        }
    }
    (removed, failed)
}

async fn remove_devices(
    devices: &HostDevices,
    removed: &mut Vec<String>,
    failed: &mut Vec<String>,
) {
    let found = match devices.list().await {
        Ok(found) => found,
        Err(error) => return failed.push(error.to_string()),
    };
    for one in found {
        match devices.remove(&one.device).await {
            Ok(true) => removed.push(format!(
                "device {} of endpoint {}",
                one.device, one.endpoint
            )),
            Ok(false) => {}
            Err(error) => failed.push(error.to_string()),
        }
    }
}

/// Removes devices that were being created when the agent was killed, and that only state files record.
async fn remove_unmarked(
    states: &StateDir,
    devices: &HostDevices,
    removed: &mut Vec<String>,
    failed: &mut Vec<String>,
) {
    let saved = match states.load() {
        Ok((saved, _)) => saved,
        Err(error) => return failed.push(error.to_string()),
    };
    for SavedEndpoint { id, device, .. } in saved {
        match devices.remove(&device).await {
            Ok(true) => removed.push(format!("device {device} of endpoint {id}")),
            Ok(false) | Err(WorkloadError::ForeignDevice { .. }) => {}
            Err(error) => failed.push(error.to_string()),
        }
    }
}
