//! All workload endpoints of the node: creates, changes, deletes, restores and reports endpoints.

mod build;
mod create;
mod delete;
mod departed;
mod devices;
mod health;
mod identity;
mod labels;
mod mtu;
mod restore;
mod settings;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::api::{Endpoint, EndpointHealth, PodName, TakenAddress};
use health_model::ipam::NodeIpam;
use health_model::labels::{Label, LabelSet};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tracing::debug;

use super::error::EndpointError;
use super::identities::IdentitySource;
use super::log::{LogEntry, Status};
use super::pods::PodLabels;
use super::regenerate::Regenerator;
use super::workload::{Devices, StateDir};

pub use self::health::HealthReport;
pub use self::restore::{Survey, survey};
pub use self::table::Counts;
pub use self::table::DURATION_BOUNDS;

use self::labels::LabelChange;
use self::table::Table;

/// Time between two checks of endpoints' devices.
const LOOK_PERIOD: Duration = Duration::from_secs(5);

/// The settings of a new endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewEndpoint {
    /// File of the endpoint's network namespace.
    pub netns: PathBuf,
    /// The endpoint's labels. Empty: not known yet.
    pub labels: LabelSet,
    /// The endpoint's name.
    pub name: Option<String>,
    /// The endpoint's container. A container has one namespace, with one endpoint per device.
    pub container_id: Option<String>,
    /// The endpoint's pod.
    pub pod: Option<PodName>,
    /// The container runtime's network for which the endpoint is created.
    pub network: Option<String>,
    /// Name of the device in the endpoint's namespace; `eth0` if absent.
    pub ifname: Option<String>,
    /// Whether the namespace's default routes lead to this endpoint. `None`: only if they lead to no other endpoint.
    pub default_route: Option<bool>,
    /// The IPv4 address that the endpoint must have.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address that the endpoint must have.
    pub ipv6: Option<Ipv6Addr>,
}

/// Selects endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The endpoint with this id.
    Id(u16),
    /// The endpoints of this container.
    Container(String),
    /// The endpoint of one device of a container.
    Attachment {
        /// The container.
        container_id: String,
        /// Name of the device in the container's namespace.
        ifname: String,
    },
    /// All endpoints whose namespace was given as this file.
    Netns(PathBuf),
}

/// What a manager needs for its node.
pub struct ManagerOptions {
    /// Where endpoints are stored across restarts.
    pub states: StateDir,
    /// Allocates the addresses of endpoints.
    pub ipam: NodeIpam,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
    /// The health endpoint, if there is one.
    pub health: Option<HealthReport>,
    /// MTU of endpoints in bytes.
    pub mtu: u32,
    /// Maximum number of concurrent regenerations.
    pub parallel: usize,
    /// Creates and removes devices.
    pub devices: Arc<dyn Devices>,
    /// Allocates identities.
    pub identities: Arc<dyn IdentitySource>,
    /// The labels of this node's pods; `None` if the agent does not follow pods.
    pub pods: Option<watch::Receiver<Arc<PodLabels>>>,
    /// Builds datapaths.
    pub regenerator: Arc<dyn Regenerator>,
    /// Returns the time of day.
    pub clock: fn() -> Timestamp,
}

/// Manages the workload endpoints of a node. Clones share their state.
#[derive(Clone)]
pub struct Manager(Arc<Shared>);

struct Shared {
    devices: Arc<dyn Devices>,
    identities: Arc<dyn IdentitySource>,
    pods: Option<watch::Receiver<Arc<PodLabels>>>,
    regenerator: Arc<dyn Regenerator>,
    clock: fn() -> Timestamp,
    states: StateDir,
    /// Held while an endpoint's file is written or removed.
    files: Mutex<()>,
    node_addresses: Vec<IpAddr>,
    /// The intended MTU of endpoints in bytes.
    mtu: watch::Sender<u32>,
    table: Mutex<Table>,
    /// Incremented by every change of the table.
    changed: watch::Sender<u64>,
    /// Notified when there may be something to regenerate.
    work: Notify,
}

impl Manager {
    /// Takes over the endpoints that [`survey`] found, and starts to manage. Must be called in a tokio runtime; the
    /// spawned tasks end with the runtime.
    pub fn start(options: ManagerOptions, survey: Survey) -> Self {
        let ManagerOptions {
            states,
            ipam,
            node_addresses,
            health,
            mtu,
            parallel,
            devices,
            identities,
            pods,
            regenerator,
            clock,
        } = options;
        let held_back = regenerator.held_back();
        let mut table = Table::new(ipam, parallel);
        table.holds_back = held_back.borrow().is_some();
        let manager = Self(Arc::new(Shared {
            devices,
            identities,
            pods: pods.clone(),
            regenerator,
            clock,
            states,
            files: Mutex::new(()),
            node_addresses,
            mtu: watch::Sender::new(mtu),
            table: Mutex::new(table),
            changed: watch::Sender::new(0),
            work: Notify::new(),
        }));
        if let Some(health) = health
            && let Err(error) = manager.note_health(health)
        {
            // The registry may configure such an address: no other endpoint can get it.
            debug!(%error, "the health endpoint has an address outside this node's pod CIDRs");
        }
        manager.take_over(survey);
        tokio::spawn(manager.clone().build_forever());
        tokio::spawn(manager.clone().look_forever());
        let mtu = manager.0.mtu.subscribe();
        tokio::spawn(manager.clone().follow_mtu(mtu));
        if manager.table().holds_back {
            tokio::spawn(manager.clone().follow_held_back(held_back));
        }
        let held = manager.0.identities.held();
        tokio::spawn(manager.clone().follow_identities(held));
        if let Some(pods) = pods {
            tokio::spawn(manager.clone().follow_pods(pods));
        }
        manager
    }

    /// Creates an endpoint, and waits until it is ready for use. A failure leaves nothing of the endpoint behind.
    pub async fn create(&self, new: NewEndpoint) -> Result<Arc<Endpoint>, EndpointError> {
        // The caller may drop this future; the endpoint must not be left half created.
        let manager = self.clone();
        let made = tokio::spawn(async move { manager.make(new).await });
        made.await.unwrap_or_else(|error| Err(interrupted(&error)))
    }

    /// Deletes the selected endpoints, and returns their ids. Succeeds if there are none.
    pub async fn delete(&self, selector: &Selector) -> Result<Vec<u16>, EndpointError> {
        let ids = self.table().matching(selector)?;
        let manager = self.clone();
        let deleted = tokio::spawn(async move {
            let mut deleted = Vec::new();
            for id in ids {
                if manager.unmake(id).await? {
                    deleted.push(id);
                }
            }
            Ok(deleted)
        });
        deleted
            .await
            .unwrap_or_else(|error| Err(interrupted(&error)))
    }

    /// Changes an endpoint's labels, and thereby its identity. Labels in `remove` are removed by source and key; labels
    /// in `add` are added, or replace those with the same source and key. Returns the endpoint after the change; its
    /// identity follows later.
    pub async fn change_labels(
        &self,
        id: u16,
        add: Vec<Label>,
        remove: Vec<Label>,
    ) -> Result<Arc<Endpoint>, EndpointError> {
        let manager = self.clone();
        let change = LabelChange::Edit { add, remove };
        let changed = tokio::spawn(async move { manager.relabel(id, change).await });
        changed
            .await
            .unwrap_or_else(|error| Err(interrupted(&error)))
    }

    /// Regenerates endpoints whose inputs have changed: those with these ids, or all.
    pub fn regenerate(&self, ids: Option<&BTreeSet<u16>>, reason: &str) {
        let now = self.now();
        self.table().request(ids, now, reason);
        self.note_change();
        self.0.work.notify_one();
    }

    /// Records whether all containers behind an endpoint can serve; `None` if none is probed. Has no effect if the
    /// endpoint does not exist.
    pub fn set_ready(&self, id: u16, ready: Option<bool>) {
        let set = self.with(id, |entry, _| {
            let is_news = entry.ready != ready;
            if is_news {
                entry.ready = ready;
                entry.touch();
            }
            is_news
        });
        if set.unwrap_or_default() {
            self.note_change();
        }
    }

    /// Describes which endpoints wait for something that the operator should know about, and for what; `None` if none
    /// does.
    pub fn problem(&self) -> Option<String> {
        self.table().problem()
    }

    /// Returns the endpoints that are being deleted and are no longer built, with the reason if the deletion failed.
    pub fn leaving(&self) -> BTreeMap<u16, Option<String>> {
        self.table().leaving()
    }

    /// Writes a warning to the logs of these endpoints.
    pub fn note(&self, ids: &BTreeSet<u16>, message: &str) {
        let now = self.now();
        let mut table = self.table();
        for (_, entry) in table.entries.iter_mut().filter(|(id, _)| ids.contains(id)) {
            entry.note(now, Status::Warning, message);
        }
    }

    /// Returns all endpoints, including those deleted in the last minute.
    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.table().shown()
    }

    /// Returns the log of an endpoint, oldest line first.
    pub fn log(&self, id: u16) -> Option<Vec<LogEntry>> {
        self.table().log(id)
    }

    /// Returns the health of an endpoint.
    pub fn health(&self, id: u16) -> Option<EndpointHealth> {
        self.table().health(id)
    }

    /// Returns all addresses of this node's endpoints with their owners.
    pub fn taken_addresses(&self) -> Result<Vec<TakenAddress>, EndpointError> {
        let table = self.table();
        if table.ipam.families().next().is_none() {
            return Err(EndpointError::NoPodCidr);
        }
        let owners = table.ipam.owners();
        Ok(owners
            .map(|(address, owner)| TakenAddress {
                address,
                endpoint: owner.endpoint,
                name: owner.name.clone(),
            })
            .collect())
    }

    /// Returns the number of repairs of endpoints' devices since the start, by cause.
    pub fn repairs(&self) -> BTreeMap<String, u64> {
        self.table().repairs.clone()
    }

    /// Returns a counter that changes with every change of an endpoint.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Returns the number of endpoints per state, and statistics of regenerations.
    pub fn counts(&self) -> Counts {
        self.table().counts()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        (self.0.clock)()
    }

    /// Wakes all tasks that wait for a change.
    fn note_change(&self) {
        self.0
            .changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Waits until `is_so` returns a value for the table, and returns that value.
    async fn wait_until<T>(&self, mut is_so: impl FnMut(&mut Table) -> Option<T>) -> T {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            if let Some(found) = is_so(&mut self.table()) {
                return found;
            }
            // Cannot fail: the sender belongs to this manager.
            let _ = changes.changed().await;
        }
    }

    /// Periodically drops endpoints whose device is gone and addresses without an endpoint, and repairs devices.
    async fn look_forever(self) {
        let mut ticks = tokio::time::interval(LOOK_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look().await;
        }
    }
}

fn interrupted(error: &tokio::task::JoinError) -> EndpointError {
    EndpointError::Interrupted(error.to_string())
}
