//! The steps from the present to the desired kernel state.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::netlink::ipset::Entry;
use super::netlink::server::{
    Change, Flags, Forwarding, RealServer, Scheduler, ServerId, ServerKey, VirtualServer,
};
use super::plan::{Plan, Server, Touched};
use super::sets::{SetId, SetKind};

/// Our part of the kernel state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// Our virtual servers.
    pub servers: BTreeMap<ServerKey, PresentServer>,
    /// Virtual servers created by other programs.
    pub foreign: BTreeSet<ServerKey>,
    /// Entries of our sets.
    pub entries: BTreeSet<(SetId, Entry)>,
    /// Addresses of our device.
    pub addresses: BTreeSet<IpAddr>,
}

/// A virtual server in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentServer {
    /// The server's scheduler.
    pub scheduler: Scheduler,
    /// The server's flags, as requested.
    pub flags: Flags,
    /// The persistence timeout in seconds.
    pub timeout: u32,
    /// The server's real servers.
    pub real: BTreeMap<SocketAddr, PresentReal>,
}

/// A real server in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PresentReal {
    /// The server's share of new connections.
    pub weight: u32,
    /// How packets reach the server.
    pub forwarding: Forwarding,
    /// The number of connections when last checked after the last change of the weight; `None` if not checked since.
    pub connections: Option<u32>,
}

/// One step. Steps must be executed in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Adds entries to a set.
    AddEntries(SetId, Vec<Entry>),
    /// Deletes entries from a set.
    DeleteEntries(SetId, Vec<Entry>),
    /// Changes a server.
    Change(Change),
    /// Binds an address to our device.
    Bind(IpAddr),
    /// Removes an address from our device.
    Unbind(IpAddr),
}

impl Present {
    /// Records the real servers of a virtual server, with their connection counts.
    pub(crate) fn note_real(&mut self, key: ServerKey, listed: &[RealServer]) {
        let Some(server) = self.servers.get_mut(&key) else {
            return;
        };
        let real = listed.iter().map(|real| {
            let connections = real.active.saturating_add(real.inactive);
            let present = PresentReal {
                weight: real.weight,
                forwarding: real.forwarding,
                connections: Some(connections),
            };
            (real.address, present)
        });
        server.real = real.collect();
    }

    /// Applies the effect of a step.
    pub fn apply(&mut self, step: &Step) {
        match step {
            Step::AddEntries(set, entries) => {
                let entries = entries.iter().map(|entry| (*set, *entry));
                self.entries.extend(entries);
            }
            Step::DeleteEntries(set, entries) => {
                for entry in entries {
                    self.entries.remove(&(*set, *entry));
                }
            }
            Step::Bind(address) => {
                self.addresses.insert(*address);
            }
            Step::Unbind(address) => {
                self.addresses.remove(address);
            }
            Step::Change(change) => self.apply_change(change),
        }
    }

    fn apply_change(&mut self, change: &Change) {
        match change {
            Change::AddServer(server) | Change::SetServer(server) => {
                let ServerId::Address(key) = server.id else {
                    return;
                };
                let before = self.servers.remove(&key);
                let present = PresentServer {
                    scheduler: server.scheduler.clone(),
                    flags: server.flags,
                    timeout: server.timeout,
                    real: before.map(|server| server.real).unwrap_or_default(),
                };
                self.servers.insert(key, present);
            }
            Change::DeleteServer(ServerId::Address(key)) => {
                self.servers.remove(key);
            }
            Change::AddReal(ServerId::Address(key), real)
            | Change::SetReal(ServerId::Address(key), real) => {
                if let Some(server) = self.servers.get_mut(key) {
                    let present = PresentReal {
                        weight: real.weight,
                        forwarding: real.forwarding,
                        connections: None,
                    };
                    server.real.insert(real.address, present);
                }
            }
            Change::DeleteReal(ServerId::Address(key), real) => {
                if let Some(server) = self.servers.get_mut(key) {
                    server.real.remove(&real.address);
                }
            }
            // We create no server that is identified by a mark.
            _ => {}
        }
    }

    /// Marks everything that exists as touched.
    pub fn touched(&self) -> Touched {
        Touched {
            servers: self.servers.keys().copied().collect(),
            entries: self.entries.clone(),
            addresses: self.addresses.clone(),
        }
    }

    /// Whether a virtual server, or one of its real servers, exists but is not in the plan.
    pub(crate) fn is_draining(&self, plan: &Plan, key: &ServerKey) -> bool {
        self.servers.get(key).is_some_and(|present| {
            plan.server(key).is_none_or(|server| {
                let mut real = present.real.keys();
                real.any(|address| !server.real.contains_key(address))
            })
        })
    }
}

/// Returns the steps for everything that is touched.
///
/// A real server is removed gracefully: its weight becomes 0, and once it has then been seen without connections, it is
/// deleted. Real servers for UDP and SCTP are deleted at once, unless their endpoint still serves. A virtual server
/// stays until its last real server is gone, and with it its address and the entry that marks it as ours. Virtual
/// servers created by other programs are not changed.
pub fn diff(plan: &Plan, present: &Present, touched: &Touched) -> Vec<Step> {
    let mut differ = Differ {
        plan,
        present,
        changes: Vec::new(),
        deleted: BTreeSet::new(),
        added: BTreeMap::new(),
        removed: BTreeMap::new(),
    };
    for (set, entry) in &touched.entries {
        if !matches!(set.kind, SetKind::Servers | SetKind::BoundIps) {
            let is_wanted = plan.has_entry(*set, *entry);
            differ.entry(*set, *entry, is_wanted);
        }
    }
    // A mark without a server is a leftover too.
    let marked = touched.entries.iter().filter_map(marked_server);
    let servers: BTreeSet<_> = touched.servers.iter().copied().chain(marked).collect();
    for key in &servers {
        differ.server(*key);
    }
    let bound = touched.entries.iter().filter_map(bound_address);
    let of_servers = servers.iter().map(|key| key.address.ip());
    let addresses = touched.addresses.iter().copied();
    let addresses: BTreeSet<_> = addresses.chain(of_servers).chain(bound).collect();
    let (mut bind, mut unbind) = (Vec::new(), Vec::new());
    for address in addresses {
        differ.address(address, &mut bind, &mut unbind);
    }
    let Differ {
        changes,
        added,
        removed,
        ..
    } = differ;
    let added = added.into_iter();
    let added = added.map(|(set, entries)| Step::AddEntries(set, entries));
    let removed = removed.into_iter();
    let removed = removed.map(|(set, entries)| Step::DeleteEntries(set, entries));
    // Entries that block packets are added first and removed last.
    added
        .chain(changes.into_iter().map(Step::Change))
        .chain(bind.into_iter().map(Step::Bind))
        .chain(unbind.into_iter().map(Step::Unbind))
        .chain(removed)
        .collect()
}

struct Differ<'a> {
    plan: &'a Plan,
    present: &'a Present,
    changes: Vec<Change>,
    deleted: BTreeSet<ServerKey>,
    added: BTreeMap<SetId, Vec<Entry>>,
    removed: BTreeMap<SetId, Vec<Entry>>,
}

impl Differ<'_> {
    fn entry(&mut self, set: SetId, entry: Entry, is_wanted: bool) {
        match (is_wanted, self.present.entries.contains(&(set, entry))) {
            (true, false) => self.added.entry(set).or_default().push(entry),
            (false, true) => self.removed.entry(set).or_default().push(entry),
            _ => {}
        }
    }

    fn server(&mut self, key: ServerKey) {
        let is_there = match (self.plan.server(&key), self.present.servers.get(&key)) {
            _ if self.present.foreign.contains(&key) => false,
            (Some(server), present) => {
                self.keep(key, server, present);
                true
            }
            (None, Some(present)) => self.end(key, present),
            (None, None) => false,
        };
        let (set, entry) = mark(key);
        self.entry(set, entry, is_there);
    }

    fn keep(&mut self, key: ServerKey, wanted: &Server, present: Option<&PresentServer>) {
        let server = VirtualServer {
            id: key.into(),
            scheduler: wanted.scheduler.clone(),
            flags: wanted.flags,
            timeout: wanted.timeout,
        };
        match present {
            None => self.changes.push(Change::AddServer(server)),
            Some(present) => {
                let is_same = present.scheduler == server.scheduler
                    && present.flags.asked() == server.flags
                    && present.timeout == server.timeout;
                if !is_same {
                    self.changes.push(Change::SetServer(server));
                }
            }
        }
        let none = BTreeMap::new();
        let present = present.map_or(&none, |present| &present.real);
        for (address, weight) in &wanted.real {
            let real = RealServer::new(*address, *weight);
            match present.get(address) {
                None => self.changes.push(Change::AddReal(key.into(), real)),
                Some(present)
                    if (present.weight, present.forwarding) != (*weight, real.forwarding) =>
                {
                    self.changes.push(Change::SetReal(key.into(), real));
                }
                Some(_) => {}
            }
        }
        for (address, real) in present {
            if !wanted.real.contains_key(address) {
                let lingers = wanted.lingering.contains(address);
                self.drain(key, *address, real, lingers);
            }
        }
    }

    /// Ends a virtual server. Returns whether it stays for now.
    fn end(&mut self, key: ServerKey, present: &PresentServer) -> bool {
        let mut stays = false;
        for (address, real) in &present.real {
            stays |= !self.drain(key, *address, real, false);
        }
        if !stays {
            self.changes.push(Change::DeleteServer(key.into()));
            self.deleted.insert(key);
        }
        stays
    }

    /// Drains a real server. Returns whether it is deleted.
    fn drain(
        &mut self,
        key: ServerKey,
        address: SocketAddr,
        present: &PresentReal,
        lingers: bool,
    ) -> bool {
        let mut real = RealServer::new(address, 0);
        real.forwarding = present.forwarding;
        let is_idle = present.weight == 0 && present.connections == Some(0);
        if is_idle || (key.protocol != Protocol::TCP && !lingers) {
            self.changes.push(Change::DeleteReal(key.into(), real));
            return true;
        }
        if present.weight != 0 {
            self.changes.push(Change::SetReal(key.into(), real));
        }
        false
    }

    fn address(&mut self, address: IpAddr, bind: &mut Vec<IpAddr>, unbind: &mut Vec<IpAddr>) {
        let is_bound = self.present.addresses.contains(&address);
        let is_wanted = self.plan.has_address(&address);
        let first = ServerKey {
            address: SocketAddr::new(address, 0),
            protocol: Protocol(0),
        };
        let of_address = self.present.servers.range(first..);
        let of_address = of_address.map(|(key, _)| key);
        let mut of_address = of_address.take_while(|key| key.address.ip() == address);
        // A wanted server at an address of another device does not need that address on our device.
        let mut drains =
            || of_address.any(|key| self.plan.server(key).is_none() && !self.deleted.contains(key));
        let stays = is_wanted || (is_bound && drains());
        match (stays, is_bound) {
            (true, false) => bind.push(address),
            (false, true) => unbind.push(address),
            _ => {}
        }
        let set = SetId {
            family: Family::of(address),
            kind: SetKind::BoundIps,
        };
        self.entry(set, Entry::Ip(address), stays);
    }
}

/// Returns the entry that marks a virtual server as ours.
pub(super) fn mark(key: ServerKey) -> (SetId, Entry) {
    let ip = key.address.ip();
    let set = SetId {
        family: Family::of(ip),
        kind: SetKind::Servers,
    };
    (set, Entry::IpPort(ip, key.protocol, key.address.port()))
}

pub(super) fn marked_server((set, entry): &(SetId, Entry)) -> Option<ServerKey> {
    match (set.kind, entry) {
        (SetKind::Servers, Entry::IpPort(ip, protocol, port)) => Some(ServerKey {
            address: SocketAddr::new(*ip, *port),
            protocol: *protocol,
        }),
        _ => None,
    }
}

fn bound_address((set, entry): &(SetId, Entry)) -> Option<IpAddr> {
    match (set.kind, entry) {
        (SetKind::BoundIps, Entry::Ip(ip)) => Some(*ip),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
