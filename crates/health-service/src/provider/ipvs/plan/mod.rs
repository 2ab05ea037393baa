//! The desired kernel state.
//!
//! A plan consists of port plans, each of which depends only on the port's state and the node's addresses. The cost of
//! changing a port therefore depends on that port alone.

mod port;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use health_model::ipam::Family;
use ipnet::IpNet;

use super::netlink::ipset::Entry;
use super::netlink::server::{Flags, Scheduler, ServerKey};
use super::sets::{SetId, SetKind};
use crate::spec::PortKey;
use crate::state::{PortState, State};
use port::PortPlan;

/// The node's own addresses: those of all devices except [`DEVICE`](super::DEVICE).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// All addresses.
    pub all: BTreeSet<IpAddr>,
    /// The addresses that serve NodePorts.
    pub node_ports: BTreeSet<IpAddr>,
}

/// Settings for plans, besides services and the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanSettings {
    /// The scheduler for services that do not set one.
    pub scheduler: Scheduler,
    /// Networks that are left to other programs: their addresses get no virtual servers.
    pub excluded_networks: Vec<IpNet>,
}

impl Default for PlanSettings {
    fn default() -> Self {
        Self {
            scheduler: Scheduler::RoundRobin,
            excluded_networks: Vec::new(),
        }
    }
}

impl PlanSettings {
    fn excludes(&self, address: IpAddr) -> bool {
        let mut networks = self.excluded_networks.iter();
        networks.any(|network| network.contains(&address))
    }
}

/// The desired state of a virtual server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// The server's scheduler.
    pub scheduler: Scheduler,
    /// The server's flags.
    pub flags: Flags,
    /// If the server is persistent, how long a client stays with its real server, in seconds.
    pub timeout: u32,
    /// The server's real servers, with their weights.
    pub real: BTreeMap<SocketAddr, u32>,
    /// Endpoints that get no new connections but keep existing ones, with any protocol.
    pub lingering: BTreeSet<SocketAddr>,
}

/// Sets of addresses that block packets from some sources or from all. Only the port that owns the virtual server at an
/// address decides whether these sets contain the address.
const GUARDS: [SetKind; 4] = [
    SetKind::Reject,
    SetKind::Drop,
    SetKind::DropOutside,
    SetKind::LoadBalancerFirewall,
];

/// A claim on a virtual server; the smallest claim wins. NodePorts come after service addresses.
type Claim = (bool, PortKey);

/// The desired state of the kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    ports: BTreeMap<PortKey, PortPlan>,
    /// The claims on each virtual server; never empty.
    servers: BTreeMap<ServerKey, BTreeSet<Claim>>,
    /// The number of ports that want each entry.
    entries: BTreeMap<(SetId, Entry), usize>,
    addresses: BTreeMap<IpAddr, usize>,
    checks: BTreeSet<(Family, u16)>,
}

/// The parts of a plan that may have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// The virtual servers.
    pub servers: BTreeSet<ServerKey>,
    /// The entries of sets.
    pub entries: BTreeSet<(SetId, Entry)>,
    /// The addresses of our device.
    pub addresses: BTreeSet<IpAddr>,
}

/// Returns the desired kernel state for a service state, on a node with these addresses.
pub fn wanted(state: &State, node: &NodeAddresses, settings: &PlanSettings) -> Plan {
    let mut plan = Plan::default();
    let keys: BTreeSet<_> = state.ports().map(|(key, _)| key.clone()).collect();
    plan.update(state, &keys, node, settings);
    plan
}

impl Plan {
    /// Updates the health-check node ports, and these ports to their new state.
    pub fn update(
        &mut self,
        state: &State,
        keys: &BTreeSet<PortKey>,
        node: &NodeAddresses,
        settings: &PlanSettings,
    ) -> Touched {
        let mut touched = Touched::default();
        for key in keys {
            self.set_port(key, state.port(key), node, settings, &mut touched);
        }
        let checks = Family::ALL.into_iter().flat_map(|family| {
            let checks = state.health_checks(family).values();
            checks.map(move |check| (family, check.port))
        });
        let before = std::mem::replace(&mut self.checks, checks.collect());
        let changed = before.symmetric_difference(&self.checks);
        touched
            .entries
            .extend(changed.map(|check| check_entry(*check)));
        touched
    }

    /// Updates a port to its new state; `None` if it is gone.
    pub(super) fn set_port(
        &mut self,
        key: &PortKey,
        state: Option<&PortState>,
        node: &NodeAddresses,
        settings: &PlanSettings,
        touched: &mut Touched,
    ) {
        if let Some(before) = self.ports.remove(key) {
            self.forget(key, &before);
            touched.note(&before);
            self.touch_guards(&before, touched);
        }
        if let Some(state) = state {
            let plan = port::plan(key, state, node, settings);
            touched.note(&plan);
            self.touch_guards(&plan, touched);
            self.remember(key, &plan);
            self.ports.insert(key.clone(), plan);
        }
    }

    /// Marks the guards of a port's virtual servers as touched where other ports claim the server too, as its owner may
    /// have changed.
    fn touch_guards(&self, port: &PortPlan, touched: &mut Touched) {
        let contested = port.servers.keys();
        for key in contested.filter(|key| self.servers.contains_key(key)) {
            touched.entries.extend(guards(key));
        }
    }

    fn remember(&mut self, key: &PortKey, plan: &PortPlan) {
        for (server, (is_node_port, _)) in &plan.servers {
            let claim = (*is_node_port, key.clone());
            self.servers.entry(*server).or_default().insert(claim);
        }
        for entry in &plan.entries {
            *self.entries.entry(*entry).or_default() += 1;
        }
        for address in &plan.addresses {
            *self.addresses.entry(*address).or_default() += 1;
        }
    }

    fn forget(&mut self, key: &PortKey, plan: &PortPlan) {
        for (server, (is_node_port, _)) in &plan.servers {
            if let Some(claims) = self.servers.get_mut(server) {
                claims.remove(&(*is_node_port, key.clone()));
                if claims.is_empty() {
                    self.servers.remove(server);
                }
            }
        }
        for entry in &plan.entries {
            uncount(&mut self.entries, entry);
        }
        for address in &plan.addresses {
            uncount(&mut self.addresses, address);
        }
    }

    /// Returns the desired state of a virtual server.
    pub fn server(&self, key: &ServerKey) -> Option<&Server> {
        let (_, server): &(bool, Arc<Server>) = self.owner(key)?.servers.get(key)?;
        Some(server)
    }

    /// Returns the plan of the port that owns a virtual server.
    fn owner(&self, key: &ServerKey) -> Option<&PortPlan> {
        let (_, port) = self.servers.get(key)?.first()?;
        self.ports.get(port)
    }

    /// Whether a set should have an entry.
    pub fn has_entry(&self, set: SetId, entry: Entry) -> bool {
        match (set.kind, entry) {
            (SetKind::CheckNodePort, Entry::Port(port)) => {
                self.checks.contains(&(set.family, port))
            }
            (kind, Entry::IpPort(ip, protocol, port)) if GUARDS.contains(&kind) => {
                let address = SocketAddr::new(ip, port);
                let owner = self.owner(&ServerKey { address, protocol });
                owner.is_some_and(|plan| plan.entries.contains(&(set, entry)))
            }
            _ => self.entries.contains_key(&(set, entry)),
        }
    }

    /// Whether an address should be bound to our device.
    pub fn has_address(&self, address: &IpAddr) -> bool {
        self.addresses.contains_key(address)
    }

    /// Returns all parts of the plan.
    pub fn touched(&self) -> Touched {
        let checks = self.checks.iter().map(|check| check_entry(*check));
        Touched {
            servers: self.servers.keys().copied().collect(),
            entries: self.entries.keys().copied().chain(checks).collect(),
            addresses: self.addresses.keys().copied().collect(),
        }
    }
}

impl Touched {
    fn note(&mut self, plan: &PortPlan) {
        self.servers.extend(plan.servers.keys());
        self.entries.extend(&plan.entries);
        self.addresses.extend(&plan.addresses);
    }

    /// Adds the parts of another value.
    pub fn extend(&mut self, other: Self) {
        self.servers.extend(other.servers);
        self.entries.extend(other.entries);
        self.addresses.extend(other.addresses);
    }
}

/// Returns all entries that may guard a virtual server.
fn guards(key: &ServerKey) -> [(SetId, Entry); GUARDS.len()] {
    let ip = key.address.ip();
    let family = Family::of(ip);
    let entry = Entry::IpPort(ip, key.protocol, key.address.port());
    GUARDS.map(|kind| (SetId { family, kind }, entry))
}

fn check_entry((family, port): (Family, u16)) -> (SetId, Entry) {
    let kind = SetKind::CheckNodePort;
    (SetId { family, kind }, Entry::Port(port))
}

fn uncount<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}
