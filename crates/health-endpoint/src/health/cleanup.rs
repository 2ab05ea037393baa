//! Removes the health endpoint and everything that belongs to it.

use std::fmt;
use std::path::{Path, PathBuf};

use health_net::netlink::{self, Handle};
use health_net::netns;
use health_net::route::{self, Route};
use health_net::sysctl::{Originals, Setting};

use super::forwarding::OriginalsFile;
use super::pair::{self, ALIAS_PREFIX};
use super::state::StateFile;
use super::{DEVICE, HealthError};

/// Something that was removed or restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovedResource {
    /// The veth pair.
    Device,
    /// A network namespace.
    Netns(PathBuf),
    /// A route.
    Route(Route),
    /// A kernel setting that was restored to its old value.
    Setting(Setting),
    /// The state file.
    StateFile(PathBuf),
}

impl fmt::Display for RemovedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => write!(f, "device {DEVICE}"),
            Self::Netns(path) => write!(f, "network namespace {}", path.display()),
            Self::Route(route) => write!(f, "route {route}"),
            Self::Setting(Setting { key, value }) => {
                write!(
                    f,
                    "the agent's value of /proc/sys/net/{key} (restored to {value})"
                )
            }
            Self::StateFile(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// The result of [`cleanup()`].
#[derive(Debug, Default)]
pub struct Cleanup {
    /// The removed or restored resources.
    pub removed: Vec<RemovedResource>,
    /// The errors. Cleanup continues after each of them.
    pub failed: Vec<HealthError>,
}

impl Cleanup {
    fn record<T>(&mut self, outcome: Result<T, impl Into<HealthError>>) -> Option<T> {
        outcome.map_err(|error| self.failed.push(error.into())).ok()
    }
}

/// Removes an instance's health endpoint, all routes of our protocol and the state file, and restores the kernel's
/// settings. Resources that do not exist are skipped. A foreign `lxc_health` or namespace is left alone. If another
/// agent created the device, the routes belong to that agent and also stay.
pub async fn cleanup(instance: &str, state_dir: &Path) -> Cleanup {
    let mut report = Cleanup::default();
    let file = StateFile::in_dir(state_dir);
    let saved = file.load();
    // Whether the namespace is foreign shows in its contents, so check this before removing anything.
    let foreign = report.record(pair::netns_is_foreign(instance, saved.as_ref()).await);
    if let Some(host) = report.record(netlink::open()) {
        remove_from_host(&host, instance, &mut report).await;
    }
    if foreign == Some(false) {
        remove_netns(instance, &mut report);
    }
    if let Some(state) = saved {
        give_back(&state.sysctls, &mut report);
    }
    if report.record(file.remove()) == Some(true) {
        report.removed.push(RemovedResource::StateFile(file.path()));
    }
    // The original settings of a node without a health endpoint.
    let file = OriginalsFile::in_dir(state_dir);
    give_back(&file.load(), &mut report);
    if report.record(file.remove()) == Some(true) {
        let path = file.path().to_owned();
        report.removed.push(RemovedResource::StateFile(path));
    }
    report
}

fn give_back(originals: &Originals, report: &mut Cleanup) {
    let (restored, failed) = originals.restore();
    let restored = restored.into_iter().map(RemovedResource::Setting);
    report.removed.extend(restored);
    let failed = failed.into_iter().map(HealthError::from);
    report.failed.extend(failed);
}

async fn remove_from_host(host: &Handle, instance: &str, report: &mut Cleanup) {
    match pair::remove_device(host, instance).await {
        Ok(true) => report.removed.push(RemovedResource::Device),
        Ok(false) => {}
        Err(HealthError::ForeignDevice { alias }) if alias.starts_with(ALIAS_PREFIX) => return,
        Err(HealthError::ForeignDevice { .. }) => {}
        Err(error) => report.failed.push(error),
    }
    let ours = report.record(route::list_ours(host).await);
    for route in ours.unwrap_or_default() {
        if report.record(route::delete(host, &route).await) == Some(true) {
            report.removed.push(RemovedResource::Route(route));
        }
    }
}

fn remove_netns(instance: &str, report: &mut Cleanup) {
    let name = pair::netns_name(instance);
    let removed = netns::path_of(&name).and_then(|path| Ok((netns::remove(&name)?, path)));
    if let Some((true, path)) = report.record(removed) {
        report.removed.push(RemovedResource::Netns(path));
    }
}
