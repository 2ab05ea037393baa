//! The backends of policy enforcement: the eBPF programs, their maps, and the cluster's identities. Tests use fakes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use health_common::ipcache::IpcacheEntry;
use health_datapath::ipcache::Ipcache;
use health_datapath::policy::{PolicyError, PolicyMatch, PolicyTables};
use health_datapath::{Datapath, DatapathError, TrieError, Workload};
use health_model::identity::Identity;
use health_registry::identity::{
    Addresses, Identities, IdentityAllocator, LocalIdentities, LocalNeeds, LocalNumbers,
};
use ipnet::IpNet;
use tokio::sync::watch;

use super::lock;

/// The eBPF programs that serve workloads.
pub(super) trait Programs: Send + Sync {
    /// Serves an endpoint, or changes its policy. On failure, nothing changes.
    fn set(&self, workload: Workload) -> Result<(), DatapathError>;

    /// Switches an endpoint to another table and changes nothing else; its device need not exist. Succeeds if the
    /// endpoint is not served.
    fn set_policy(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Drops all traffic of an endpoint by switching it to a table without entries. Succeeds if the endpoint is not
    /// served.
    fn shut_off(&self, id: u16, table: u32) -> Result<(), DatapathError>;

    /// Removes an endpoint. Succeeds if the endpoint is not served.
    fn remove(&self, id: u16) -> Result<(), DatapathError>;

    /// Returns the served endpoints.
    fn served(&self) -> Vec<Workload>;

    /// Whether some endpoints are still served by programs with another map layout.
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

/// Storage for the tables of verdicts.
pub(super) trait Tables: Send {
    /// Writes a table atomically: completely or not at all.
    fn install(
        &mut self,
        table: u32,
        subject: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError>;

    /// Removes tables.
    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError>;

    /// Returns the numbers of the existing tables.
    fn numbers(&self) -> BTreeSet<u32>;

    /// Whether a table with `entries` entries fits once the tables `without` are removed.
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

/// The ipcache, from which the programs read the identity of each prefix.
pub(super) trait Prefixes: Send {
    /// Returns all entries of the map.
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

/// The cluster's identities and addresses, and the identities that this node gives to prefixes.
pub(super) trait Cluster: Send + Sync {
    fn identities(&self) -> watch::Receiver<Arc<Identities>>;

    fn addresses(&self) -> watch::Receiver<Arc<Addresses>>;

    /// Returns the identities that are local to this node.
    fn local(&self) -> LocalNumbers;

    /// Gives identities to exactly the needed prefixes and nodes, and returns them.
    fn require(&self, needs: &LocalNeeds) -> LocalNumbers;

    /// Announces the identity of an endpoint's addresses to the other nodes, each with an address of this node.
    fn announce(&self, endpoint: u16, identity: Identity, addresses: &[(IpAddr, IpAddr)]);

    fn withdraw(&self, ip: IpAddr);

    /// Drops whatever the previous agent acquired and announced but this agent did not.
    fn forget_earlier(&self);
}

/// The cluster as seen by an identity allocator.
pub(super) struct AllocatorCluster {
    allocator: Arc<IdentityAllocator>,
    local: LocalIdentities,
}

impl AllocatorCluster {
    pub(super) fn new(allocator: Arc<IdentityAllocator>, state_dir: &Path) -> Self {
        Self {
            local: allocator.local(state_dir),
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

    fn local(&self) -> LocalNumbers {
        self.local.numbers()
    }

    fn require(&self, needs: &LocalNeeds) -> LocalNumbers {
        self.local.require(needs)
    }

    fn announce(&self, endpoint: u16, identity: Identity, addresses: &[(IpAddr, IpAddr)]) {
        self.allocator.announce(endpoint, identity, addresses);
    }

    fn withdraw(&self, ip: IpAddr) {
        self.allocator.withdraw(ip);
    }

    fn forget_earlier(&self) {
        self.allocator.forget_earlier();
    }
}
