//! Identities of addresses for the eBPF programs: every prefix that has its own identity.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use health_model::identity::Identity;
use ipnet::IpNet;

use super::Addresses;
use crate::nodes::Node;
use crate::prefix::{v4, v6};

/// All that is known about addresses.
#[derive(Clone, Copy, Debug)]
pub struct IpcacheInputs<'a> {
    /// Addresses of this node.
    pub host: &'a [IpAddr],
    /// Further prefixes that lead to this host.
    pub host_prefixes: &'a [IpNet],
    /// Addresses of services that are not translated before policy is applied.
    pub services: &'a BTreeSet<IpAddr>,
    /// Addresses of this node's health endpoint.
    pub health: &'a [IpAddr],
    /// This node's endpoints.
    pub endpoints: &'a BTreeMap<IpAddr, Identity>,
    /// This node's full name, `cluster/node`.
    pub own: &'a str,
    /// All nodes; this node may be among them.
    pub nodes: &'a [Node],
    /// The identities of addresses of other nodes, for those that have another one than `remote-node`.
    pub of_nodes: &'a BTreeMap<IpAddr, Identity>,
    /// The endpoints that nodes announced.
    pub announced: &'a Addresses,
    /// Prefixes that policy names.
    pub cidrs: &'a BTreeMap<IpNet, Identity>,
}

/// Prefixes that only lead to this host, whichever nodes claim them: this network and loopback (RFC 1122 section
/// 3.2.1.3), broadcast, link-local addresses on endpoints' own links, and their IPv6 equivalents (RFC 4291 section
/// 2.5).
const OF_HOST: [IpNet; 6] = [
    v4([0, 0, 0, 0], 8),
    v4([127, 0, 0, 0], 8),
    v4([255; 4], 32),
    v6([0; 8], 128),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
];
/// Multicast groups: packets to them reach this host if it listens. Rules can name groups by CIDR.
const GROUPS: [IpNet; 2] = [v4([224, 0, 0, 0], 4), v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8)];

/// Returns the identity of each prefix, and for another node's endpoint also that node. The longest prefix wins. If
/// several sources give an identity to the same prefix, the first of these wins: this node's addresses, its health
/// endpoint, its endpoints, other nodes' addresses, their health endpoints, announced endpoints, services, prefixes of
/// policy, the world. Prefixes that only lead to this host have no other owner. Consequently, no other node can claim
/// this node's own addresses, and a prefix of policy never hides an endpoint.
pub fn ipcache(inputs: IpcacheInputs<'_>) -> BTreeMap<IpNet, (Identity, Option<IpAddr>)> {
    let mut entries = BTreeMap::new();
    // In reverse order of precedence: later entries replace earlier ones.
    for world in [v4([0; 4], 0), v6([0; 8], 0)] {
        entries.insert(world, (Identity::WORLD, None));
    }
    for group in GROUPS {
        entries.insert(group, (Identity::HOST, None));
    }
    for (prefix, identity) in inputs.cidrs {
        entries.insert(prefix.trunc(), (*identity, None));
    }
    // Any endpoint may be behind a service, so services are not part of the world, and rules about the world do not
    // apply to them. A rule can name a service by prefix.
    for ip in inputs.services {
        let named = inputs.cidrs.iter();
        let named = named.filter(|(prefix, _)| prefix.prefix_len() > 0 && prefix.contains(ip));
        let named = named.max_by_key(|(prefix, _)| prefix.prefix_len());
        let identity = named.map_or(Identity::UNKNOWN, |(_, identity)| *identity);
        entries.insert(IpNet::from(*ip), (identity, None));
    }
    // This node's own endpoints are more up to date than its earlier announcements.
    for (prefix, one) in &inputs.announced.0 {
        if !inputs.host.contains(&one.node) {
            entries.insert(*prefix, (one.identity, Some(one.node)));
        }
    }
    let others = || {
        inputs
            .nodes
            .iter()
            .filter(|node| node.full_name() != inputs.own)
    };
    for node in others() {
        for ip in &node.health_addresses {
            entries.insert(IpNet::from(*ip), (Identity::HEALTH, address_of(node, *ip)));
        }
    }
    for node in others() {
        for ip in node.addresses.iter().chain(&node.secondary_addresses) {
            let identity = inputs.of_nodes.get(ip).unwrap_or(&Identity::REMOTE_NODE);
            entries.insert(IpNet::from(*ip), (*identity, None));
        }
    }
    for (ip, identity) in inputs.endpoints {
        entries.insert(IpNet::from(*ip), (*identity, None));
    }
    for ip in inputs.health {
        entries.insert(IpNet::from(*ip), (Identity::HEALTH, None));
    }
    for prefix in inputs.host_prefixes {
        entries.insert(prefix.trunc(), (Identity::HOST, None));
    }
    for ip in inputs.host {
        entries.insert(IpNet::from(*ip), (Identity::HOST, None));
    }
    entries.retain(|prefix, _| !OF_HOST.iter().any(|own| own.contains(prefix)));
    entries.extend(OF_HOST.map(|own| (own, (Identity::HOST, None))));
    entries
}

/// Returns the node's first address of the same family, else its first address.
fn address_of(node: &Node, ip: IpAddr) -> Option<IpAddr> {
    let same = |other: &&IpAddr| other.is_ipv4() == ip.is_ipv4();
    let addresses = || node.addresses.iter();
    addresses()
        .find(same)
        .or_else(|| addresses().next())
        .copied()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;
    use crate::identity::AddressAnnouncement;

    fn node(name: &str, addresses: Vec<IpAddr>, health: Vec<IpAddr>) -> Node {
        Node {
            name: name.to_owned(),
            cluster: "default".to_owned(),
            addresses,
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: health,
            labels: BTreeMap::new(),
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Returns the entry of the longest prefix that contains an address.
    fn lookup(
        cache: &BTreeMap<IpNet, (Identity, Option<IpAddr>)>,
        ip: IpAddr,
    ) -> Option<(Identity, Option<IpAddr>)> {
        let longest = cache.iter().filter(|(prefix, _)| prefix.contains(&ip));
        longest
            .max_by_key(|(prefix, _)| prefix.prefix_len())
            .map(|(_, entry)| *entry)
    }

    #[test]
    fn each_kind_of_address_has_its_identity_and_endpoints_their_node() {
        let own = node("a", vec![ip("172.30.0.1")], vec![ip("10.244.1.2")]);
        let other = node(
            "b",
            vec![ip("172.30.0.2"), ip("fd00:30::2"), ip("fd00:30::3")],
            vec![ip("fd00:10:244:2::2")],
        );
        let announced = |identity, node: &str, owner: &str| AddressAnnouncement {
            identity: Identity(identity),
            node: ip(node),
            owner: owner.to_owned(),
        };
        let addresses = Addresses(BTreeMap::from([
            (ip("10.244.2.9").into(), announced(300, "172.30.0.2", "b")),
            // Left behind by an earlier endpoint of this node.
            (ip("10.244.1.9").into(), announced(300, "172.30.0.1", "a")),
            // Another node claims this node's address.
            (ip("172.30.0.1").into(), announced(300, "172.30.0.2", "b")),
        ]));
        let cidrs = BTreeMap::from([
            ("10.0.0.0/8".parse().unwrap(), Identity(1 << 24 | 1)),
            ("10.244.2.9/32".parse().unwrap(), Identity(1 << 24 | 2)),
            ("239.1.1.0/24".parse().unwrap(), Identity(1 << 24 | 3)),
            // These prefixes lead to the host nevertheless.
            ("127.0.0.53/32".parse().unwrap(), Identity(1 << 24 | 4)),
            ("255.255.255.255/32".parse().unwrap(), Identity(1 << 24 | 5)),
        ]);
        let cache = ipcache(IpcacheInputs {
            host: &[ip("172.30.0.1"), ip("10.244.1.1")],
            host_prefixes: &[ip("172.30.0.255").into(), "198.18.7.0/24".parse().unwrap()],
            services: &BTreeSet::from([ip("10.96.0.1"), ip("203.0.113.1"), ip("10.244.1.7")]),
            health: &[ip("10.244.1.2")],
            endpoints: &BTreeMap::from([(ip("10.244.1.7"), Identity(301))]),
            own: "default/a",
            nodes: &[own, other],
            of_nodes: &BTreeMap::from([
                (ip("fd00:30::3"), Identity::KUBE_APISERVER),
                // A host's own addresses, and addresses of no node, stay what they are.
                (ip("172.30.0.1"), Identity::KUBE_APISERVER),
                (ip("192.0.2.1"), Identity::KUBE_APISERVER),
            ]),
            announced: &addresses,
            cidrs: &cidrs,
        });
        for (address, identity, node) in [
            ("172.30.0.1", Identity::HOST, None),
            ("10.244.1.1", Identity::HOST, None),
            ("172.30.0.255", Identity::HOST, None),
            ("198.18.7.9", Identity::HOST, None),
            ("198.18.8.9", Identity::WORLD, None),
            ("10.244.1.2", Identity::HEALTH, None),
            ("10.244.1.7", Identity(301), None),
            ("10.244.1.9", Identity(1 << 24 | 1), None),
            ("10.244.2.9", Identity(300), Some("172.30.0.2")),
            ("172.30.0.2", Identity::REMOTE_NODE, None),
            ("fd00:30::2", Identity::REMOTE_NODE, None),
            ("fd00:30::3", Identity::KUBE_APISERVER, None),
            ("fd00:10:244:2::2", Identity::HEALTH, Some("fd00:30::2")),
            // Services: one named by a rule's prefix, one not named, and an endpoint that is also a service.
            ("10.96.0.1", Identity(1 << 24 | 1), None),
            ("203.0.113.1", Identity::UNKNOWN, None),
            ("203.0.113.2", Identity::WORLD, None),
            ("192.0.2.1", Identity::WORLD, None),
            ("0.0.0.0", Identity::HOST, None),
            ("127.0.0.53", Identity::HOST, None),
            ("255.255.255.255", Identity::HOST, None),
            ("224.0.0.251", Identity::HOST, None),
            ("239.1.1.1", Identity(1 << 24 | 3), None),
            ("::", Identity::HOST, None),
            ("::1", Identity::HOST, None),
            ("::2", Identity::WORLD, None),
            ("fe80::1", Identity::HOST, None),
            ("ff02::fb", Identity::HOST, None),
            ("2001:db8::1", Identity::WORLD, None),
        ] {
            let expected = Some((identity, node.map(ip)));
            assert_eq!(lookup(&cache, ip(address)), expected, "{address}");
        }
    }

    /// A small set of addresses, so that they collide.
    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            (0..12_u8).prop_map(|n| IpAddr::from(Ipv4Addr::new(10, 0, 0, n))),
            (0..6_u16).prop_map(|n| IpAddr::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n))),
        ]
    }

    fn prefix() -> impl Strategy<Value = IpNet> {
        (address(), 0..=128_u8).prop_map(|(ip, bits)| {
            let most = if ip.is_ipv4() { 32 } else { 128 };
            IpNet::new(ip, bits.min(most)).expect("a length").trunc()
        })
    }

    proptest! {
        #[test]
        fn the_longest_prefix_is_what_a_plain_search_says(
            host in vec(address(), 0..3),
            health in vec(address(), 0..3),
            endpoints in btree_map(address(), (256..260_u32).prop_map(Identity), 0..5),
            other_nodes in vec((vec(address(), 1..3), vec(address(), 0..3)), 0..3),
            announced in btree_map(address(), (256..260_u32, address()), 0..6),
            cidrs in btree_map(prefix(), (1..9_u32).prop_map(|n| Identity(1 << 24 | n)), 0..8),
            asked in address(),
        ) {
            let nodes: Vec<Node> = other_nodes
                .into_iter()
                .enumerate()
                .map(|(i, (addresses, health))| node(&format!("n{i}"), addresses, health))
                .collect();
            let of = |identity, node| AddressAnnouncement { identity, node, owner: String::new() };
            let announced = Addresses(
                announced
                    .into_iter()
                    .map(|(ip, (identity, node))| (IpNet::from(ip), of(Identity(identity), node)))
                    .collect(),
            );
            let cache = ipcache(IpcacheInputs {
                host: &host,
                host_prefixes: &[],
                services: &BTreeSet::new(),
                health: &health,
                endpoints: &endpoints,
                own: "default/me",
                nodes: &nodes,
                of_nodes: &BTreeMap::new(),
                announced: &announced,
                cidrs: &cidrs,
            });
            let said = announced.0.get(&IpNet::from(asked)).filter(|one| !host.contains(&one.node));
            let mut policy: Vec<_> = cidrs.iter().filter(|(prefix, _)| prefix.contains(&asked)).collect();
            policy.sort_by_key(|(prefix, _)| prefix.prefix_len());
            let expected = if host.contains(&asked) {
                Identity::HOST
            } else if health.contains(&asked) {
                Identity::HEALTH
            } else if let Some(identity) = endpoints.get(&asked) {
                *identity
            } else if nodes.iter().any(|node| node.addresses.contains(&asked)) {
                Identity::REMOTE_NODE
            } else if nodes.iter().any(|node| node.health_addresses.contains(&asked)) {
                Identity::HEALTH
            } else if let Some(one) = said {
                one.identity
            } else if let Some((_, identity)) = policy.last() {
                **identity
            } else {
                Identity::WORLD
            };
            prop_assert_eq!(lookup(&cache, asked).map(|(identity, _)| identity), Some(expected));
        }
    }
}
