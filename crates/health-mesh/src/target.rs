//! What to probe: the addresses of each node in report order, and a key for each address and protocol.

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
    /// Id of a target for its lifetime. Never reused for another.
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

/// What is known about a target besides its results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// Its key.
    pub(super) key: TargetKey,
    /// Index in the current node set.
    pub(super) node: usize,
}

/// All targets, by id and by key.
#[derive(Debug, Default)]
pub(super) struct Targets {
    by_id: SlotMap<TargetId, Target>,
    by_key: HashMap<TargetKey, TargetId>,
}

/// Changes made by [`Targets::replace`].
#[derive(Debug)]
pub(super) struct Changes {
    /// Removed targets.
    pub(super) gone: Vec<(TargetId, TargetKey)>,
    /// New targets.
    pub(super) fresh: Vec<(TargetId, TargetKey)>,
}

impl Targets {
    /// The target, unless it was removed.
    pub(super) fn get(&self, id: TargetId) -> Option<&Target> {
        self.by_id.get(id)
    }

    /// The id for a key.
    pub(super) fn id(&self, key: &TargetKey) -> Option<TargetId> {
        self.by_key.get(key).copied()
    }

    /// Number of targets.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// All targets.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TargetId, &Target)> {
        self.by_id.iter()
    }

    /// Replaces the set of targets; if two share a key, the first one counts. Existing targets keep their ids.
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

/// The probed addresses of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodePaths {
    /// `cluster/node`.
    pub(super) name: String,
    /// Whether it is the probing node itself.
    pub(super) local: bool,
    /// The node's own addresses, the primary first.
    pub(super) host: Vec<IpAddr>,
    /// Addresses of its health endpoint, the primary first; empty while unknown.
    pub(super) endpoint: Vec<IpAddr>,
    /// Whether there is no health endpoint to probe.
    pub(super) hosts_only: bool,
}

impl NodePaths {
    /// The paths of a node whose health endpoint has the addresses `endpoint`; `None` if there is none to probe.
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

/// Moves the first IPv4 address to the front, or without one the first IPv6 address; the first address of the other
/// family comes next.
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
