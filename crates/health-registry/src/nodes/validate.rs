//! The checks that every registry's entries must pass: names, addresses and prefixes must be usable, and must not
//! belong to another node.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use health_model::address::{parse_ip, parse_network};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::Node;

/// Longest name of a node or cluster in bytes: the limit of a DNS name (RFC 1035 section 2.3.4).
const MAX_NAME_LEN: usize = 253;
/// Maximum addresses or prefixes of one kind per entry.
const MAX_LIST_LEN: usize = 64;

/// A piece of an entry as written, and its place: a line of a file, or a key of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceText<P> {
    /// The text.
    pub text: String,
    /// Where it is.
    pub place: P,
}

/// A registry's entry as written.
#[derive(Clone, Debug)]
pub struct Entry<P> {
    /// Where it starts.
    pub place: P,
    /// See [`Node::name`].
    pub name: SourceText<P>,
    /// See [`Node::cluster`]. If absent, the registry's own cluster.
    pub cluster: Option<SourceText<P>>,
    /// See [`Node::addresses`].
    pub addresses: Vec<SourceText<P>>,
    /// See [`Node::secondary_addresses`].
    pub secondary_addresses: Vec<SourceText<P>>,
    /// See [`Node::pod_cidrs`].
    pub pod_cidrs: Vec<SourceText<P>>,
    /// See [`Node::health_addresses`].
    pub health_addresses: Vec<SourceText<P>>,
}

impl Entry<String> {
    /// Converts a node that was read before. Every piece gets the place `place`.
    pub fn from_node(node: &Node, place: &str) -> Self {
        let written = |text: String| SourceText {
            text,
            place: place.to_owned(),
        };
        fn all<T: ToString>(
            list: &[T],
            written: impl Fn(String) -> SourceText<String>,
        ) -> Vec<SourceText<String>> {
            list.iter().map(|item| written(item.to_string())).collect()
        }
        Self {
            place: place.to_owned(),
            name: written(node.name.clone()),
            cluster: Some(written(node.cluster.clone())),
            addresses: all(&node.addresses, written),
            secondary_addresses: all(&node.secondary_addresses, written),
            pod_cidrs: all(&node.pod_cidrs, written),
            health_addresses: all(&node.health_addresses, written),
        }
    }
}

/// An entry that cannot be used: what is wrong with it, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct RefusedEntry<P: fmt::Display> {
    /// Place of the wrong piece.
    pub place: P,
    /// What is wrong.
    pub problem: Problem<P>,
}

/// What is wrong with an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem<P: fmt::Display> {
    /// A name that cannot be part of `cluster/node`.
    #[error("{what} {name:?} must not be empty or contain white space or a slash")]
    InvalidName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// As written.
        name: String,
    },
    /// The name is longer than reports allow.
    #[error("{what} of {len} bytes is too long; at most {MAX_NAME_LEN} are allowed")]
    LongName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// Length in bytes.
        len: usize,
    },
    /// More addresses or prefixes than any node has.
    #[error("node {node} has {len} {what}; at most {MAX_LIST_LEN} are allowed")]
    TooMany {
        /// The node.
        node: String,
        /// What there is too much of.
        what: &'static str,
        /// Their number.
        len: usize,
    },
    /// The node has no address.
    #[error("node {0} has no address")]
    NoAddress(String),
    /// Two nodes have the same name.
    #[error("node {name} is listed twice, first at {first}")]
    DuplicateName {
        /// `cluster/node`.
        name: String,
        /// Place of the other node.
        first: P,
    },
    /// The text is not an IP address.
    #[error("{0:?} is not an IP address")]
    InvalidAddress(String),
    /// Other nodes cannot reach this one at such an address.
    #[error("{0} is not a unicast address")]
    NotUnicast(IpAddr),
    /// The same address is listed twice.
    #[error("address {address} is listed twice, first at {first} as {owner}")]
    DuplicateAddress {
        /// The address.
        address: IpAddr,
        /// The other place.
        first: P,
        /// Its owner there.
        owner: String,
    },
    /// The text is not a prefix.
    #[error("{0:?} is not a CIDR such as 10.244.1.0/24")]
    InvalidCidr(String),
    /// The text is an address with a length, instead of a prefix.
    #[error("CIDR {written} has host bits set; write {network}")]
    HostBits {
        /// As written.
        written: IpNet,
        /// What it should be.
        network: IpNet,
    },
    /// Pods cannot have addresses of this prefix. Routes for it would take away the host's own packets.
    #[error("CIDR {cidr} overlaps {special}, which is not allowed for pods")]
    SpecialCidr {
        /// As written.
        cidr: IpNet,
        /// What it overlaps.
        special: IpNet,
    },
    /// Two prefixes share addresses.
    #[error("pod CIDR {cidr} of {owner} overlaps {other} of {other_owner} at {place}")]
    OverlappingCidrs {
        /// The later one.
        cidr: IpNet,
        /// Its node.
        owner: String,
        /// The earlier one.
        other: IpNet,
        /// Its node.
        other_owner: String,
        /// Place of the earlier one.
        place: P,
    },
    /// A node's own address lies in a pod CIDR.
    #[error("address {address} of {node} lies in the pod CIDR {cidr} of {owner} at {place}")]
    AddressInPodCidr {
        /// The node's address.
        address: IpAddr,
        /// The node.
        node: String,
        /// The prefix.
        cidr: IpNet,
        /// The prefix's node.
        owner: String,
        /// Place of the prefix.
        place: P,
    },
    /// A pod CIDR contains the own address of an earlier node.
    #[error("pod CIDR {cidr} of {owner} holds the address {address} of {node} at {place}")]
    PodCidrOverAddress {
        /// The prefix.
        cidr: IpNet,
        /// Its node.
        owner: String,
        /// The other node's address.
        address: IpAddr,
        /// The other node.
        node: String,
        /// Place of the address.
        place: P,
    },
    /// The node cannot have assigned this health address.
    #[error("health address {address} is in none of the pod CIDRs of {node}")]
    OutsidePodCidrs {
        /// The address.
        address: IpAddr,
        /// Its node.
        node: String,
    },
}

/// The claims of the entries accepted so far. What an entry claims stays its own: a later entry that wants the same is
/// refused, and changes nothing.
#[derive(Debug)]
pub struct Claims<P> {
    names: HashMap<String, P>,
    /// All addresses, of nodes and of health endpoints.
    addresses: HashMap<IpAddr, Claim<P>>,
    /// The nodes' own addresses, in order.
    node_addresses: BTreeMap<IpAddr, Claim<P>>,
    /// By first address. They are disjoint, so only neighbours can overlap a new one.
    pod_cidrs: BTreeMap<IpAddr, (IpNet, Claim<P>)>,
}

#[derive(Clone, Debug)]
struct Claim<P> {
    owner: String,
    place: P,
}

impl<P> Default for Claims<P> {
    fn default() -> Self {
        Self {
            names: HashMap::new(),
            addresses: HashMap::new(),
            node_addresses: BTreeMap::new(),
            pod_cidrs: BTreeMap::new(),
        }
    }
}

/// An entry that is valid by itself.
struct ParsedEntry<P> {
    node: Node,
    full_name: String,
    name_place: P,
    node_addresses: Vec<(IpAddr, P)>,
    pod_cidrs: Vec<(IpNet, P)>,
    health_addresses: Vec<(IpAddr, P)>,
}

impl<P: Clone + fmt::Display> Claims<P> {
    /// Accepts an entry. Without a cluster of its own, it belongs to `default_cluster`.
    pub fn take(
        &mut self,
        entry: Entry<P>,
        default_cluster: &str,
    ) -> Result<Node, RefusedEntry<P>> {
        let parsed = parse(entry, default_cluster)?;
        self.check(&parsed)?;
        Ok(self.claim(parsed))
    }

    fn check(&self, entry: &ParsedEntry<P>) -> Result<(), RefusedEntry<P>> {
        if let Some(first) = self.names.get(&entry.full_name) {
            return Err(refused(
                &entry.name_place,
                Problem::DuplicateName {
                    name: entry.full_name.clone(),
                    first: first.clone(),
                },
            ));
        }
        for (address, place) in entry.node_addresses.iter().chain(&entry.health_addresses) {
            if let Some(claim) = self.addresses.get(address) {
                return Err(refused(place, claim.duplicate(*address)));
            }
        }
        for (address, place) in &entry.node_addresses {
            let below = self.pod_cidrs.range(..=address).next_back();
            if let Some((_, (cidr, claim))) = below.filter(|(_, (cidr, _))| cidr.contains(address))
            {
                return Err(refused(
                    place,
                    Problem::AddressInPodCidr {
                        address: *address,
                        node: entry.full_name.clone(),
                        cidr: *cidr,
                        owner: claim.owner.clone(),
                        place: claim.place.clone(),
                    },
                ));
            }
        }
        for (cidr, place) in &entry.pod_cidrs {
            self.check_pod_cidr(*cidr, place, &entry.full_name)?;
        }
        Ok(())
    }

    fn check_pod_cidr(&self, cidr: IpNet, place: &P, owner: &str) -> Result<(), RefusedEntry<P>> {
        let below = self.pod_cidrs.range(..=cidr.network()).next_back();
        let above = self.pod_cidrs.range(cidr.network()..).next();
        for (_, (other, claim)) in below.into_iter().chain(above) {
            if overlap(cidr, *other) {
                return Err(refused(
                    place,
                    Problem::OverlappingCidrs {
                        cidr,
                        owner: owner.to_owned(),
                        other: *other,
                        other_owner: claim.owner.clone(),
                        place: claim.place.clone(),
                    },
                ));
            }
        }
        let inside = self.node_addresses.range(cidr.network()..).next();
        if let Some((address, claim)) = inside.filter(|(address, _)| cidr.contains(*address)) {
            return Err(refused(
                place,
                Problem::PodCidrOverAddress {
                    cidr,
                    owner: owner.to_owned(),
                    address: *address,
                    node: claim.owner.clone(),
                    place: claim.place.clone(),
                },
            ));
        }
        Ok(())
    }

    fn claim(&mut self, entry: ParsedEntry<P>) -> Node {
        let owner = entry.full_name;
        self.names.insert(owner.clone(), entry.name_place);
        for (address, place) in entry.node_addresses {
            let claim = Claim {
                owner: owner.clone(),
                place,
            };
            self.addresses.insert(address, claim.clone());
            self.node_addresses.insert(address, claim);
        }
        for (address, place) in entry.health_addresses {
            let owner = health_endpoint(&owner);
            self.addresses.insert(address, Claim { owner, place });
        }
        for (cidr, place) in entry.pod_cidrs {
            let owner = owner.clone();
            self.pod_cidrs
                .insert(cidr.network(), (cidr, Claim { owner, place }));
        }
        entry.node
    }
}

impl<P: Clone + fmt::Display> Claim<P> {
    fn duplicate(&self, address: IpAddr) -> Problem<P> {
        Problem::DuplicateAddress {
            address,
            first: self.place.clone(),
            owner: self.owner.clone(),
        }
    }
}

/// Parses an entry, and checks everything that does not depend on other entries.
fn parse<P: Clone + fmt::Display>(
    entry: Entry<P>,
    default_cluster: &str,
) -> Result<ParsedEntry<P>, RefusedEntry<P>> {
    let name_place = entry.name.place.clone();
    let name = name("node name", entry.name)?;
    let cluster = match entry.cluster {
        Some(cluster) => self::name("cluster name", cluster)?,
        None => default_cluster.to_owned(),
    };
    let full_name = format!("{cluster}/{name}");
    if entry.addresses.is_empty() {
        return Err(refused(&entry.place, Problem::NoAddress(full_name)));
    }
    for (what, list) in [
        ("addresses", &entry.addresses),
        ("secondary addresses", &entry.secondary_addresses),
        ("pod CIDRs", &entry.pod_cidrs),
        ("health addresses", &entry.health_addresses),
    ] {
        if list.len() > MAX_LIST_LEN {
            let problem = Problem::TooMany {
                node: full_name,
                what,
                len: list.len(),
            };
            return Err(refused(&entry.place, problem));
        }
    }

    let primary_count = entry.addresses.len();
    let own = entry.addresses.into_iter().chain(entry.secondary_addresses);
    let node_addresses = own.map(address).collect::<Result<Vec<_>, _>>()?;
    let pod_cidrs = entry
        .pod_cidrs
        .into_iter()
        .map(cidr)
        .collect::<Result<Vec<_>, _>>()?;
    let health = entry.health_addresses.into_iter().map(address);
    let health_addresses = health.collect::<Result<Vec<_>, _>>()?;

    check_within(&full_name, &node_addresses, &pod_cidrs, &health_addresses)?;
    let ips = |list: &[(IpAddr, P)]| list.iter().map(|(address, _)| *address).collect();
    Ok(ParsedEntry {
        node: Node {
            name,
            cluster,
            addresses: ips(&node_addresses[..primary_count]),
            secondary_addresses: ips(&node_addresses[primary_count..]),
            pod_cidrs: pod_cidrs.iter().map(|(cidr, _)| *cidr).collect(),
            health_addresses: ips(&health_addresses),
        },
        full_name,
        name_place,
        node_addresses,
        pod_cidrs,
        health_addresses,
    })
}

/// Checks the pieces of one entry against each other.
fn check_within<P: Clone + fmt::Display>(
    full_name: &str,
    node_addresses: &[(IpAddr, P)],
    pod_cidrs: &[(IpNet, P)],
    health_addresses: &[(IpAddr, P)],
) -> Result<(), RefusedEntry<P>> {
    let mut seen: HashMap<IpAddr, Claim<P>> = HashMap::new();
    let own = node_addresses.iter().map(|a| (a, full_name.to_owned()));
    let health = health_addresses
        .iter()
        .map(|a| (a, health_endpoint(full_name)));
    for ((address, place), owner) in own.chain(health) {
        if let Some(first) = seen.get(address) {
            return Err(refused(place, first.duplicate(*address)));
        }
        let place = place.clone();
        seen.insert(*address, Claim { owner, place });
    }
    for (i, (cidr, place)) in pod_cidrs.iter().enumerate() {
        if let Some((other, first)) = pod_cidrs[..i].iter().find(|(o, _)| overlap(*cidr, *o)) {
            return Err(refused(
                place,
                Problem::OverlappingCidrs {
                    cidr: *cidr,
                    owner: full_name.to_owned(),
                    other: *other,
                    other_owner: full_name.to_owned(),
                    place: first.clone(),
                },
            ));
        }
    }
    let holding = |address| {
        pod_cidrs
            .iter()
            .find(move |(cidr, _)| cidr.contains(address))
    };
    for (address, place) in node_addresses {
        if let Some((cidr, cidr_place)) = holding(address) {
            return Err(refused(
                place,
                Problem::AddressInPodCidr {
                    address: *address,
                    node: full_name.to_owned(),
                    cidr: *cidr,
                    owner: full_name.to_owned(),
                    place: cidr_place.clone(),
                },
            ));
        }
    }
    for (address, place) in health_addresses {
        if holding(address).is_none() {
            return Err(refused(
                place,
                Problem::OutsidePodCidrs {
                    address: *address,
                    node: full_name.to_owned(),
                },
            ));
        }
    }
    Ok(())
}

fn refused<P: Clone + fmt::Display>(place: &P, problem: Problem<P>) -> RefusedEntry<P> {
    RefusedEntry {
        place: place.clone(),
        problem,
    }
}

fn health_endpoint(node: &str) -> String {
    format!("the health endpoint of {node}")
}

/// Whether two prefixes overlap: they are either nested or disjoint.
fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b.network()) || b.contains(&a.network())
}

fn name<P: Clone + fmt::Display>(
    what: &'static str,
    written: SourceText<P>,
) -> Result<String, RefusedEntry<P>> {
    let name = written.text;
    if name.len() > MAX_NAME_LEN {
        let len = name.len();
        return Err(refused(&written.place, Problem::LongName { what, len }));
    }
    if name.is_empty() || name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) {
        return Err(refused(&written.place, Problem::InvalidName { what, name }));
    }
    Ok(name)
}

fn address<P: Clone + fmt::Display>(
    written: SourceText<P>,
) -> Result<(IpAddr, P), RefusedEntry<P>> {
    let SourceText { text, place } = written;
    let Ok(address) = parse_ip(&text) else {
        return Err(refused(&place, Problem::InvalidAddress(shortened(text))));
    };
    let broadcast = address == IpAddr::V4(Ipv4Addr::BROADCAST);
    if address.is_unspecified() || address.is_multicast() || broadcast {
        return Err(refused(&place, Problem::NotUnicast(address)));
    }
    Ok((address, place))
}

/// Networks that pods cannot have: this network, loopback, link-local, multicast and reserved addresses (RFC 6890).
const SPECIAL: [IpNet; 8] = [
    v4([0, 0, 0, 0], 8),
    v4([127, 0, 0, 0], 8),
    v4([169, 254, 0, 0], 16),
    v4([224, 0, 0, 0], 3),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
];

const fn v4([a, b, c, d]: [u8; 4], len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), len))
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(a, b, c, d, e, f, g, h),
        len,
    ))
}

fn cidr<P: Clone + fmt::Display>(written: SourceText<P>) -> Result<(IpNet, P), RefusedEntry<P>> {
    let SourceText { text, place } = written;
    let Ok(cidr) = parse_network(&text) else {
        return Err(refused(&place, Problem::InvalidCidr(shortened(text))));
    };
    if let Some(special) = SPECIAL.iter().find(|special| overlap(cidr, **special)) {
        let special = *special;
        return Err(refused(&place, Problem::SpecialCidr { cidr, special }));
    }
    if cidr != cidr.trunc() {
        return Err(refused(
            &place,
            Problem::HostBits {
                written: cidr,
                network: cidr.trunc(),
            },
        ));
    }
    Ok((cidr, place))
}

/// Shortens text: input that is not an address may have any length, but reports are single lines.
fn shortened(mut text: String) -> String {
    const LONGEST: usize = 64;
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(name: &str, addresses: &[&str], pod_cidrs: &[&str], health: &[&str]) -> Entry<String> {
        let place = format!("key {name}");
        let written = |text: &&str| SourceText {
            text: (*text).to_owned(),
            place: place.clone(),
        };
        Entry {
            name: written(&name),
            cluster: None,
            addresses: addresses.iter().map(written).collect(),
            secondary_addresses: Vec::new(),
            pod_cidrs: pod_cidrs.iter().map(written).collect(),
            health_addresses: health.iter().map(written).collect(),
            place,
        }
    }

    #[test]
    fn networks_that_are_no_pods_are_refused_as_pod_cidrs() {
        for cidr in [
            "127.0.0.53/32",
            "0.0.0.0/0",
            "128.0.0.0/1",
            "169.254.169.254/32",
            "239.0.0.0/8",
            "::1/128",
            "fe80::/64",
            "ff00::/7",
        ] {
            let error = Claims::default().take(node("a", &["10.0.0.1"], &[cidr], &[]), "west");
            let problem = error.unwrap_err().problem;
            assert!(
                matches!(problem, Problem::SpecialCidr { .. }),
                "{cidr}: {problem}"
            );
        }
    }

    #[test]
    fn one_address_is_one_however_it_is_written() {
        let mut claims = Claims::default();
        let first = node(
            "a",
            &["::ffff:10.0.0.1"],
            &["::ffff:10.1.0.0/120"],
            &["010.1.0.007"],
        );
        let taken = claims.take(first, "west").unwrap();
        assert_eq!(taken.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(taken.pod_cidrs, ["10.1.0.0/24".parse::<IpNet>().unwrap()]);
        for address in [
            "010.0.0.1",
            "10.0.0.1",
            "::ffff:0a00:0001",
            "::ffff:127.0.0.1",
        ] {
            let second = node("b", &[address], &[], &[]);
            let is_taken = claims.take(second, "west").is_ok();
            assert_eq!(is_taken, address == "::ffff:127.0.0.1", "{address}");
        }
    }

    #[test]
    fn a_refused_entry_is_told_why_and_claims_nothing() {
        let mut claims = Claims::default();
        let first = node("a", &["10.0.0.1"], &["10.1.0.0/24"], &["10.1.0.7"]);
        claims.take(first, "west").unwrap();
        let long = "n".repeat(254);
        let many = vec!["10.0.0.9"; 65];
        for (entry, expected) in [
            (
                node("a", &["10.0.0.2"], &[], &[]),
                "node west/a is listed twice, first at key a",
            ),
            (
                node("b", &["10.0.0.2", "10.0.0.1"], &[], &[]),
                "address 10.0.0.1 is listed twice, first at key a as west/a",
            ),
            (
                node("b", &["10.0.0.2", "10.1.0.9"], &[], &[]),
                "address 10.1.0.9 of west/b lies in the pod CIDR 10.1.0.0/24 of west/a at key a",
            ),
            (
                node("b", &["10.0.0.2"], &["10.0.0.0/31"], &[]),
                "pod CIDR 10.0.0.0/31 of west/b holds the address 10.0.0.1 of west/a at key a",
            ),
            (
                node("b", &["10.0.0.2"], &["10.0.0.0/8"], &[]),
                "address 10.0.0.2 of west/b lies in the pod CIDR 10.0.0.0/8 of west/b at key b",
            ),
            (
                node("b", &["10.0.0.2"], &["10.1.0.0/16"], &[]),
                "pod CIDR 10.1.0.0/16 of west/b overlaps 10.1.0.0/24 of west/a at key a",
            ),
            (
                node("b", &["10.0.0.2"], &["10.1.0.128/25"], &[]),
                "pod CIDR 10.1.0.128/25 of west/b overlaps 10.1.0.0/24 of west/a at key a",
            ),
            (
                node("b", &["10.0.0.2"], &["10.2.0.0/24"], &["10.3.0.1"]),
                "health address 10.3.0.1 is in none of the pod CIDRs of west/b",
            ),
            (
                node(&long, &["10.0.0.2"], &[], &[]),
                "node name of 254 bytes is too long; at most 253 are allowed",
            ),
            (
                node("b", &many, &[], &[]),
                "node west/b has 65 addresses; at most 64 are allowed",
            ),
        ] {
            let refused = claims.take(entry, "west").unwrap_err();
            assert_eq!(refused.to_string(), expected);
        }
        let second = node("b", &["10.0.0.2"], &["10.2.0.0/24"], &["10.2.0.1"]);
        claims.take(second, "west").unwrap();
    }

    proptest! {
        #[test]
        fn what_was_taken_is_disjoint(
            entries in proptest::collection::vec((0..6_u8, 0..8_u8, 0..8_u8, 26..=32_u8), 1..20),
        ) {
            let mut claims = Claims::default();
            let mut taken: Vec<Node> = Vec::new();
            for (name, address, base, len) in entries {
                let cidr = IpNet::new(IpAddr::from([10, 0, 0, base * 4]), len).expect("a length");
                let entry = node(
                    &format!("n{name}"),
                    &[&format!("10.0.0.{}", address * 8)],
                    &[&cidr.trunc().to_string()],
                    &[],
                );
                taken.extend(claims.take(entry, "default"));
            }
            for (i, a) in taken.iter().enumerate() {
                for b in &taken[..i] {
                    prop_assert_ne!(&a.name, &b.name);
                    prop_assert_ne!(&a.addresses, &b.addresses);
                    prop_assert!(!overlap(a.pod_cidrs[0], b.pod_cidrs[0]));
                    prop_assert!(!a.pod_cidrs[0].contains(&b.addresses[0]));
                    prop_assert!(!b.pod_cidrs[0].contains(&a.addresses[0]));
                }
            }
        }
    }
}
