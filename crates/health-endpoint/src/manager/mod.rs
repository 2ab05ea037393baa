//! All workload endpoints of the node: creating, changing, deleting and restoring them, and what is shown
//! of them.

mod build;
mod create;
mod delete;
mod departed;
mod devices;
mod health;
mod identity;
mod mtu;
mod restore;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::api::{Endpoint, EndpointHealth, TakenAddress};
use health_model::ipam::NodeIpam;
use health_model::labels::{Label, LabelSet};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tracing::debug;

use super::error::EndpointError;
use super::identities::IdentitySource;
use super::log::{LogEntry, Status};
use super::regenerate::Regenerator;
use super::workload::{Devices, StateDir};

pub use self::health::HealthReport;
pub use self::restore::{Survey, survey};
pub use self::table::Counts;
pub use self::table::DURATION_BOUNDS;

use self::table::Table;

/// Time between two looks at the devices of endpoints.
const LOOK_PERIOD: Duration = Duration::from_secs(5);

/// What a new endpoint shall be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewEndpoint {
    /// File of its network namespace.
    pub netns: PathBuf,
    /// Its labels. Empty: not known yet.
    pub labels: LabelSet,
    /// What it is called.
    pub name: Option<String>,
    /// The container that it is of. One container has one namespace, and in that an endpoint for each device.
    pub container_id: Option<String>,
    /// The runtime's network that it is for.
    pub network: Option<String>,
    /// Name of the device in its namespace; `eth0` unless told.
    pub ifname: Option<String>,
    /// Whether the routes of the namespace that lead out are to lead to it. Not given: if they lead to no other endpoint.
    pub default_route: Option<bool>,
    /// The IPv4 address that it must have.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address that it must have.
    pub ipv6: Option<Ipv6Addr>,
}

/// Which endpoints are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The one of this id.
    Id(u16),
    /// Those of this container.
    Container(String),
    /// That of one device of a container.
    Attachment {
        /// The container.
        container_id: String,
        /// Name of the device in its namespace.
        ifname: String,
    },
    /// All whose namespace was given by this file.
    Netns(PathBuf),
}

/// What a manager works with.
pub struct Parts {
    /// Makes and removes devices.
    pub devices: Arc<dyn Devices>,
    /// Gives identities.
    pub identities: Arc<dyn IdentitySource>,
    /// Builds datapaths.
    pub regenerator: Arc<dyn Regenerator>,
    /// Tells the time of day.
    pub clock: fn() -> Timestamp,
}

/// What a manager is told of its node.
#[derive(Debug)]
pub struct ManagerOptions {
    /// Where the endpoints are kept across restarts.
    pub states: StateDir,
    /// The addresses of endpoints.
    pub ipam: NodeIpam,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
    /// The health endpoint, if there is one.
    pub health: Option<HealthReport>,
    /// MTU of endpoints, bytes.
    pub mtu: u32,
    /// Most regenerations at a time.
    pub parallel: usize,
}

/// Manages the workload endpoints of a node. Clones share them.
#[derive(Clone)]
pub struct Manager(Arc<Shared>);

struct Shared {
    devices: Arc<dyn Devices>,
    identities: Arc<dyn IdentitySource>,
    regenerator: Arc<dyn Regenerator>,
    clock: fn() -> Timestamp,
    states: StateDir,
    /// Held while an endpoint's file is written or removed.
    files: Mutex<()>,
    node_addresses: Vec<IpAddr>,
    /// MTU that endpoints are to have, bytes.
    mtu: watch::Sender<u32>,
    table: Mutex<Table>,
    /// Counts changes of the table.
    changed: watch::Sender<u64>,
    /// Told when there may be something to regenerate.
    work: Notify,
}

impl Manager {
    /// Takes over the endpoints that [`survey`] found, and begins to manage. Must be called in a tokio
    /// runtime; what it spawns ends with the runtime.
    pub fn start(options: ManagerOptions, parts: Parts, survey: Survey) -> Self {
        let ManagerOptions {
            states,
            ipam,
            node_addresses,
            health,
            mtu,
            parallel,
        } = options;
        let held_back = parts.regenerator.held_back();
        let mut table = Table::new(ipam, parallel);
        table.holds_back = held_back.borrow().is_some();
        let manager = Self(Arc::new(Shared {
            devices: parts.devices,
            identities: parts.identities,
            regenerator: parts.regenerator,
            clock: parts.clock,
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
            // As a registry may fix it: it is nobody else's to have.
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
        manager
    }

    /// Makes an endpoint, and waits until it is ready to be used. After a failure nothing of it is left.
    pub async fn create(&self, new: NewEndpoint) -> Result<Arc<Endpoint>, EndpointError> {
        // Whoever asked may go away; the endpoint must not be left half made.
        let manager = self.clone();
        let made = tokio::spawn(async move { manager.make(new).await });
        made.await.unwrap_or_else(|error| Err(broken_off(&error)))
    }

    /// Deletes the endpoints that are meant, and tells their ids. That there is none is no failure.
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
            .unwrap_or_else(|error| Err(broken_off(&error)))
    }

    /// Gives an endpoint other labels, and so another identity: those to `remove` go, by source and key,
    /// those to `add` come or take the place of those with their source and key. Returns the endpoint as
    /// it is then; the identity follows.
    pub async fn change_labels(
        &self,
        id: u16,
        add: Vec<Label>,
        remove: Vec<Label>,
    ) -> Result<Arc<Endpoint>, EndpointError> {
        let manager = self.clone();
        let changed = tokio::spawn(async move { manager.relabel(id, add, remove).await });
        changed
            .await
            .unwrap_or_else(|error| Err(broken_off(&error)))
    }

    /// Has endpoints regenerated, as what they are built from has changed: those of these ids, or all.
    pub fn regenerate(&self, ids: Option<&BTreeSet<u16>>, reason: &str) {
        let now = self.now();
        self.table().request(ids, now, reason);
        self.note_change();
        self.0.work.notify_one();
    }

    /// Takes note of whether all containers behind an endpoint can serve; `None` if none is probed. Without effect for one
    /// that is not there.
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

    /// Which endpoints wait for something that somebody should know of, and for what, in words; `None` if none does.
    pub fn problem(&self) -> Option<String> {
        self.table().problem()
    }

    /// The endpoints that are being deleted and are not built any more, and why that failed where it did.
    pub fn leaving(&self) -> BTreeMap<u16, Option<String>> {
        self.table().leaving()
    }

    /// Writes a warning into the logs of these endpoints.
    pub fn note(&self, ids: &BTreeSet<u16>, message: &str) {
        let now = self.now();
        let mut table = self.table();
        for (_, entry) in table.entries.iter_mut().filter(|(id, _)| ids.contains(id)) {
            entry.note(now, Status::Warning, message);
        }
    }

    /// All endpoints, and those that were deleted in the last minute.
    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.table().shown()
    }

    /// The log of an endpoint, the oldest line first.
    pub fn log(&self, id: u16) -> Option<Vec<LogEntry>> {
        self.table().log(id)
    }

    /// How an endpoint does.
    pub fn health(&self, id: u16) -> Option<EndpointHealth> {
        self.table().health(id)
    }

    /// Every address of this node's endpoints, and whose it is.
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

    /// What was put right at the devices of endpoints since the start, by cause.
    pub fn repairs(&self) -> BTreeMap<String, u64> {
        self.table().repairs.clone()
    }

    /// Changes with every change of an endpoint.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// How many endpoints are in which state, and what became of regenerations.
    pub fn counts(&self) -> Counts {
        self.table().counts()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        (self.0.clock)()
    }

    /// Wakes those who wait for a change.
    fn note_change(&self) {
        self.0
            .changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Waits until the table is as `is_so` wants it.
    async fn wait_until<T>(&self, mut is_so: impl FnMut(&mut Table) -> Option<T>) -> T {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            if let Some(found) = is_so(&mut self.table()) {
                return found;
            }
            // The sender is this manager's own.
            let _ = changes.changed().await;
        }
    }

    /// Drops endpoints whose device is gone, and addresses without an endpoint, and puts devices right, now and again.
    async fn look_forever(self) {
        let mut ticks = tokio::time::interval(LOOK_PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look().await;
        }
    }
}

fn broken_off(error: &tokio::task::JoinError) -> EndpointError {
    EndpointError::BrokenOff(error.to_string())
}
