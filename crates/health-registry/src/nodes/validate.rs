//! The checks that every registry's entries must pass: names, addresses and prefixes must be usable, and must not
//! belong to another node.

mod parse;
mod problem;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::Node;

pub use self::problem::{Problem, RefusedEntry};

use self::parse::{ParsedEntry, parse};
use self::problem::refused;

/// Maximum length of a node or cluster name in bytes: the limit of a DNS name (RFC 1035 section 2.3.4).
const MAX_NAME_LEN: usize = 253;
/// Maximum number of addresses or prefixes of one kind per entry.
const MAX_LIST_LEN: usize = 64;

/// A part of an entry as written, and its location: a line of a file, or a key of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceText<P> {
    /// The string as written.
    pub text: String,
    /// The location.
    pub place: P,
}

/// A registry's entry as written.
#[derive(Clone, Debug)]
pub struct Entry<P> {
    /// Where the entry starts.
    pub place: P,
    /// See [`Node::name`].
    pub name: SourceText<P>,
    /// See [`Node::cluster`]. Defaults to the registry's own cluster.
    pub cluster: Option<SourceText<P>>,
    /// See [`Node::addresses`].
    pub addresses: Vec<SourceText<P>>,
    /// See [`Node::secondary_addresses`].
    pub secondary_addresses: Vec<SourceText<P>>,
    /// See [`Node::pod_cidrs`].
    pub pod_cidrs: Vec<SourceText<P>>,
    /// See [`Node::health_addresses`].
    pub health_addresses: Vec<SourceText<P>>,
    /// See [`Node::labels`].
    pub labels: BTreeMap<String, String>,
}

impl Entry<String> {
    /// Converts a node that was read earlier. The location of each part is `place`.
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
            labels: node.labels.clone(),
        }
    }
}

/// The claims of the entries accepted so far. A claim stays with its entry: a later entry that claims the same is
/// refused, and changes nothing.
#[derive(Debug)]
pub struct Claims<P> {
    names: HashMap<String, P>,
    /// All addresses, of nodes and of health endpoints.
    addresses: HashMap<IpAddr, Claim<P>>,
    /// The nodes' own addresses, in order.
    node_addresses: BTreeMap<IpAddr, Claim<P>>,
    /// The pod CIDRs by first address. They are disjoint, so only the neighbours of a new CIDR can overlap it.
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

impl<P: Clone + fmt::Display> Claims<P> {
    /// Accepts an entry. An entry without a cluster belongs to `default_cluster`.
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

fn health_endpoint(node: &str) -> String {
    format!("the health endpoint of {node}")
}

/// Whether two prefixes overlap. Prefixes are either nested or disjoint.
fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b.network()) || b.contains(&a.network())
}

#[cfg(test)]
mod tests;
