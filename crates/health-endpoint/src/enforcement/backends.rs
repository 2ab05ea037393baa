//! The backends of policy enforcement: the programs and their maps, and the cluster's identities. Tests use their own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use health_common::ipcache::IpcacheEntry;
use health_datapath::ipcache::Ipcache;
use health_datapath::policy::{PolicyError, PolicyMatch, PolicyTables};
use health_datapath::{Datapath, DatapathError, TrieError, Workload};
use health_model::identity::Identity;
use health_registry::identity::{Addresses, CidrIdentities, Identities, IdentityAllocator};
use ipnet::IpNet;
use tokio::sync::watch;

use super::lock;

/// The programs, to the extent that they serve workloads.
pub(super) trait Programs: Send + Sync {
    /// Serves an endpoint, or changes its policy. After a failure, everything is unchanged.
    fn set(&self, workload: Workload) -> Result<(), DatapathError>;

    /// Makes an endpoint use another table, and changes nothing else; its device is not needed. It is not a failure if
    /// the endpoint is not served.
    fn set_policy(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Drops all traffic of an endpoint, by a table without entries. It is not a failure if the endpoint is not served.
    fn shut_off(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Removes an endpoint. It is not a failure if the endpoint is not served.
    fn remove(&self, id: u16) -> Result<(), DatapathError>;

    /// The endpoints that are served.
    fn served(&self) -> Vec<Workload>;

    /// Whether programs with another map layout serve some of them.
    fn is_changing_layout(&self) -> bool;
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

    fn served(&self) -> Vec<Workload> {
        lock(self).workloads().cloned().collect()
    }

    fn is_changing_layout(&self) -> bool {
        lock(self).is_changing_layout()
    }
}

/// The storage of tables.
pub(super) trait Tables: Send {
    /// Writes a table, completely or not at all.
    fn install(
        &mut self,
        table: u32,
        subject: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError>;

    /// Removes tables.
    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError>;

    /// Numbers of the existing tables.
    fn numbers(&self) -> BTreeSet<u32>;

    /// Whether a table with this many entries fits once these tables are removed.
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

/// The identity of each prefix, as read by the programs.
pub(super) trait Prefixes: Send {
    /// The written entries.
    fn entries(&self) -> Box<dyn Iterator<Item = (IpNet, IpcacheEntry)> + '_>;

    /// Writes one entry.
    fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), TrieError>;

    /// Replaces all entries by these.
    fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<(), TrieError>;
}

impl Prefixes for Ipcache {
    fn entries(&self) -> Box<dyn Iterator<Item = (IpNet, IpcacheEntry)> + '_> {
        Box::new(Self::entries(self))
    }

    fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), TrieError> {
        Self::set(self, net, entry)
    }

    fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<(), TrieError> {
        Self::set_all(self, wanted).map(drop)
    }
}

/// The identities and addresses of the cluster, and this node's identities of prefixes.
pub(super) trait Cluster: Send + Sync {
    fn identities(&self) -> watch::Receiver<Arc<Identities>>;

    fn addresses(&self) -> watch::Receiver<Arc<Addresses>>;

    /// The prefixes that have an identity.
    fn prefixes(&self) -> BTreeMap<IpNet, Identity>;

    /// Gives an identity to exactly these prefixes.
    fn require(&self, prefixes: &BTreeSet<IpNet>) -> BTreeMap<IpNet, Identity>;

    /// Announces to other nodes the identity of an address of this node.
    fn announce(&self, ip: IpAddr, identity: Identity, node: IpAddr);

    fn withdraw(&self, ip: IpAddr);

    /// Drops what the previous agent acquired and announced, and this one did not.
    fn forget_earlier(&self);
}

/// The cluster as an allocator knows it.
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
