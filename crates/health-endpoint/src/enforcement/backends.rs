//! What policy is kept in force with: the programs and their maps, and the identities of the cluster. Tests bring their
//! own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use health_common::ipcache::IpcacheEntry;
use health_datapath::ipcache::{Ipcache, IpcacheError};
use health_datapath::policy::{PolicyError, PolicyMatch, PolicyTables};
use health_datapath::{Datapath, DatapathError, Workload};
use health_model::identity::Identity;
use health_registry::identity::{Addresses, CidrIdentities, Identities, IdentityAllocator};
use ipnet::IpNet;
use tokio::sync::watch;

use super::lock;

/// The programs, as far as they serve workloads.
pub(super) trait Programs: Send + Sync {
    /// Serves an endpoint, or changes what holds for it. After a failure all is as before.
    fn set(&self, workload: Workload) -> Result<(), DatapathError>;

    /// Has an endpoint name another table, and else nothing: that needs nothing of its device. One that is not served
    /// is no failure.
    fn set_policy(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Drops all traffic of an endpoint, by a table without entries. One that is not served is no failure.
    fn shut_off(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Takes an endpoint away. One that is not served is no failure.
    fn remove(&self, id: u16) -> Result<(), DatapathError>;
}

impl Programs for Mutex<Datapath> {
    fn set(&self, workload: Workload) -> Result<(), DatapathError> {
        lock(self).set_workload(workload)
    }

    fn set_policy(&self, id: u16, table: u32) -> Result<(), DatapathError> {
        lock(self).set_workload_policy(id, table)
    }

    fn shut_off(&self, id: u16, table: u32) -> Result<(), DatapathError> {
        lock(self).shut_off_workload(id, table)
    }

    fn remove(&self, id: u16) -> Result<(), DatapathError> {
        lock(self).remove_workload(id).map(drop)
    }
}

/// Where tables are written.
pub(super) trait Tables: Send {
    /// Writes a table, as a whole or not at all.
    fn install(
        &mut self,
        table: u32,
        subject: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError>;

    /// Removes tables.
    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError>;

    /// Numbers of the tables that are there.
    fn numbers(&self) -> BTreeSet<u32>;

    /// Whether a table of so many entries has room once these are removed.
    fn has_room(&self, entries: usize, without: &BTreeSet<u32>) -> bool;
}

impl Tables for PolicyTables {
    fn install(
        &mut self,
        table: u32,
        subject: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError> {
        Self::install(self, table, subject, entries.iter().copied())
    }

    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError> {
        Self::remove(self, tables)
    }

    fn numbers(&self) -> BTreeSet<u32> {
        self.tables().collect()
    }

    fn has_room(&self, entries: usize, without: &BTreeSet<u32>) -> bool {
        Self::has_room(self, entries, without)
    }
}

/// The identity of each prefix, as the programs read it.
pub(super) trait Prefixes: Send {
    /// What is written.
    fn entries(&self) -> Box<dyn Iterator<Item = (IpNet, IpcacheEntry)> + '_>;

    /// Writes one.
    fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), IpcacheError>;

    /// Makes these the only ones.
    fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<(), IpcacheError>;
}

impl Prefixes for Ipcache {
    fn entries(&self) -> Box<dyn Iterator<Item = (IpNet, IpcacheEntry)> + '_> {
        Box::new(Self::entries(self))
    }

    fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), IpcacheError> {
        Self::set(self, net, entry)
    }

    fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<(), IpcacheError> {
        Self::set_all(self, wanted).map(drop)
    }
}

/// The identities and addresses of the cluster, and this node's identities of prefixes.
pub(super) trait Cluster: Send + Sync {
    fn identities(&self) -> watch::Receiver<Arc<Identities>>;

    fn addresses(&self) -> watch::Receiver<Arc<Addresses>>;

    /// The prefixes that have an identity.
    fn prefixes(&self) -> BTreeMap<IpNet, Identity>;

    /// Gives an identity to each of these prefixes, and to no others.
    fn require(&self, prefixes: &BTreeSet<IpNet>) -> BTreeMap<IpNet, Identity>;

    /// Tells other nodes whose an address of this node is.
    fn announce(&self, ip: IpAddr, identity: Identity, node: IpAddr);

    fn withdraw(&self, ip: IpAddr);

    /// Drops what an agent before this one acquired and announced, and this one did not.
    fn forget_earlier(&self);
}

/// Those that an allocator knows.
pub(super) struct AllocatorCluster {
    allocator: Arc<IdentityAllocator>,
    cidrs: CidrIdentities,
}

impl AllocatorCluster {
    pub(super) fn new(allocator: Arc<IdentityAllocator>, state_dir: &Path) -> Self {
        Self {
            cidrs: allocator.cidrs(state_dir),
            allocator,
        }
    }
}

impl Cluster for AllocatorCluster {
    fn identities(&self) -> watch::Receiver<Arc<Identities>> {
        self.allocator.identities()
    }

    fn addresses(&self) -> watch::Receiver<Arc<Addresses>> {
        self.allocator.addresses()
    }

    fn prefixes(&self) -> BTreeMap<IpNet, Identity> {
        self.cidrs.prefixes()
    }

    fn require(&self, prefixes: &BTreeSet<IpNet>) -> BTreeMap<IpNet, Identity> {
        self.cidrs.require(prefixes)
    }

    fn announce(&self, ip: IpAddr, identity: Identity, node: IpAddr) {
        self.allocator.announce(ip, identity, node);
    }

    fn withdraw(&self, ip: IpAddr) {
        self.allocator.withdraw(ip);
    }

    fn forget_earlier(&self) {
        self.allocator.forget_earlier();
    }
}
