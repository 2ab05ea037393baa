//! What there is to probe: the addresses of each node in the order of the report, and a key for
//! each address and protocol.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::net::IpAddr;

use health_common::probe::Path;
pub(super) use health_common::probe::Protocol;
use health_common::rtt::RttKey;
use health_registry::nodes::Node;
use slotmap::{SlotMap, new_key_type};

new_key_type! {
    /// A target, for as long as it is one. Never used again for another.
    pub(super) struct TargetId;
}

/// One address probed by one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TargetKey {
    /// The address.
    pub(super) address: IpAddr,
    /// What it belongs to.
    pub(super) path: Path,
    /// How it is probed.
    pub(super) protocol: Protocol,
}

impl fmt::Display for TargetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            Protocol::Icmp => "ICMP",
            Protocol::Http => "HTTP",
        };
        let path = match self.path {
            Path::Host => "host",
            Path::Endpoint => "endpoint",
        };
        write!(f, "{protocol} to {} ({path})", self.address)
    }
}

impl From<TargetKey> for RttKey {
    fn from(key: TargetKey) -> Self {
        Self {
            peer: key.address.into(),
            path: key.path as u8,
            protocol: key.protocol as u8,
            pad: 0,
        }
    }
}

/// What there is to know about a target besides its results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// Its key.
    pub(super) key: TargetKey,
    /// Index in the node set in force.
    pub(super) node: usize,
}

/// All targets, by id and by key.
#[derive(Debug, Default)]
pub(super) struct Targets {
    by_id: SlotMap<TargetId, Target>,
    by_key: HashMap<TargetKey, TargetId>,
}

/// What [`Targets::replace`] changed.
#[derive(Debug)]
pub(super) struct Changes {
    /// Targets that are there no more.
    pub(super) gone: Vec<(TargetId, TargetKey)>,
    /// Targets that were not there before.
    pub(super) fresh: Vec<(TargetId, TargetKey)>,
}

impl Targets {
    /// The target, unless it has gone.
    pub(super) fn get(&self, id: TargetId) -> Option<&Target> {
        self.by_id.get(id)
    }

    /// The id of a key.
    pub(super) fn id(&self, key: &TargetKey) -> Option<TargetId> {
        self.by_key.get(key).copied()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TargetId, &Target)> {
        self.by_id.iter()
    }

    /// Makes exactly these the targets; of two with one key, the first. Those that stay keep their ids.
    pub(super) fn replace(&mut self, wanted: impl Iterator<Item = Target>) -> Changes {
        let mut before = std::mem::take(&mut self.by_key);
        let mut fresh = Vec::new();
        for target in wanted {
            if let Entry::Vacant(vacant) = self.by_key.entry(target.key) {
                let id = match before.remove(&target.key) {
                    Some(id) => {
                        self.by_id[id] = target;
                        id
                    }
                    None => {
                        let id = self.by_id.insert(target);
                        fresh.push((id, target.key));
                        id
                    }
                };
                vacant.insert(id);
            }
        }
        let gone: Vec<_> = before.into_iter().map(|(key, id)| (id, key)).collect();
        for (id, _) in &gone {
            self.by_id.remove(*id);
        }
        Changes { gone, fresh }
    }
}

/// The addresses of one node that are probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodePaths {
    /// `cluster/node`.
    pub(super) name: String,
    /// Whether it is the node that probes.
    pub(super) local: bool,
    /// The node's own addresses, the primary first.
    pub(super) host: Vec<IpAddr>,
    /// Those of its health endpoint, the primary first; empty while not known.
    pub(super) endpoint: Vec<IpAddr>,
    /// Whether there is no health endpoint to probe.
    pub(super) hosts_only: bool,
}

impl NodePaths {
    /// The paths of a node whose health endpoint has the addresses `endpoint`; `None`: there is none to probe.
    pub(super) fn new(node: &Node, local: bool, endpoint: Option<&[IpAddr]>) -> Self {
        let mut host = primary_first(&node.addresses);
        host.extend(&node.secondary_addresses);
        Self {
            name: node.full_name(),
            local,
            host,
            endpoint: endpoint.map(primary_first).unwrap_or_default(),
            hosts_only: endpoint.is_none(),
        }
    }

    /// All addresses of this node.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (IpAddr, Path)> {
        let host = self.host.iter().map(|&address| (address, Path::Host));
        let endpoint = self.endpoint.iter();
        host.chain(endpoint.map(|&address| (address, Path::Endpoint)))
    }

    /// All targets of this node.
    pub(super) fn targets(&self) -> impl Iterator<Item = TargetKey> {
        self.addresses().flat_map(|(address, path)| {
            [Protocol::Icmp, Protocol::Http].map(|protocol| TargetKey {
                address,
                path,
                protocol,
            })
        })
    }
}

/// The first IPv4 address, or without one the first IPv6 address, moved to the front; the first of
/// the other family next.
fn primary_first(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let first4 = addresses.iter().position(IpAddr::is_ipv4);
    let first6 = addresses.iter().position(IpAddr::is_ipv6);
    let firsts = [first4, first6];
    let rest = (0..addresses.len()).filter(|&index| !firsts.contains(&Some(index)));
    firsts
        .into_iter()
        .flatten()
        .chain(rest)
        .map(|index| addresses[index])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_primary_address_is_ipv4_where_there_is_one() {
        let ips =
            |list: &[&str]| -> Vec<IpAddr> { list.iter().map(|ip| ip.parse().unwrap()).collect() };
        for (given, expected) in [
            (
                ips(&["fd00::1", "10.0.0.2", "10.0.0.1"]),
                ips(&["10.0.0.2", "fd00::1", "10.0.0.1"]),
            ),
            (ips(&["fd00::1", "fd00::2"]), ips(&["fd00::1", "fd00::2"])),
            (ips(&["10.0.0.1"]), ips(&["10.0.0.1"])),
            (ips(&[]), ips(&[])),
        ] {
            assert_eq!(primary_first(&given), expected);
        }
    }
}
