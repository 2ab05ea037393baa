//! The YAML document of the node registry: parsing and validation, no files involved.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde_saphyr::{Location, MessageFormatter as _, Spanned, UserMessageFormatter};

use super::Node;

/// Why a document is refused, and where in it.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Nothing but white space and comments.
    #[error("it is empty; it needs a list `nodes` with at least one node")]
    Empty,
    /// Something in it is wrong.
    #[error("line {line}, column {column}: {problem}")]
    At {
        /// Counted from 1.
        line: u64,
        /// In characters, counted from 1.
        column: u64,
        /// What is wrong.
        problem: Problem,
    },
    /// Something in it is wrong, and the parser could not tell where.
    #[error("{0}")]
    Somewhere(Problem),
}

/// What is wrong with a document.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Not YAML, or not the fields that a registry has.
    #[error("{0}")]
    Malformed(String),
    /// An empty list.
    #[error("there are no nodes in it")]
    NoNodes,
    /// A name that cannot be part of `cluster/node`.
    #[error("{what} {name:?} must not be empty nor hold white space or a slash")]
    InvalidName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// As written.
        name: String,
    },
    /// A node without an address.
    #[error("node {0} has no address")]
    NoAddress(String),
    /// Two nodes with one name.
    #[error("node {name} is there twice, first at {first}")]
    DuplicateName {
        /// `cluster/node`.
        name: String,
        /// The other place.
        first: Place,
    },
    /// Not an IP address.
    #[error("{0:?} is not an IP address")]
    InvalidAddress(String),
    /// An address that no host has.
    #[error("{0} is not a unicast address")]
    NotUnicast(IpAddr),
    /// One address for two things.
    #[error("address {address} is there twice, first at {first} as {owner}")]
    DuplicateAddress {
        /// The address.
        address: IpAddr,
        /// The other place.
        first: Place,
        /// Whose it is there.
        owner: String,
    },
    /// Not a prefix.
    #[error("{0:?} is not a CIDR such as 10.244.1.0/24")]
    InvalidCidr(String),
    /// An address with a length instead of a prefix.
    #[error("CIDR {written} has host bits set; write {network}")]
    HostBits {
        /// As written.
        written: IpNet,
        /// What it should be.
        network: IpNet,
    },
    /// Two prefixes with addresses in common.
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
        /// Where the earlier one stands.
        place: Place,
    },
    /// A node's own address lies where endpoints get theirs.
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
        /// Where the prefix stands.
        place: Place,
    },
    /// A health address that the node cannot have given out.
    #[error("health address {address} is in none of the pod CIDRs of {node}")]
    OutsidePodCidrs {
        /// The address.
        address: IpAddr,
        /// Its node.
        node: String,
    },
}

/// A place in the document, to refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    line: u64,
    column: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl From<Location> for Place {
    fn from(location: Location) -> Self {
        Self {
            line: location.line(),
            column: location.column(),
        }
    }
}

impl Place {
    fn error(self, problem: Problem) -> DocumentError {
        DocumentError::At {
            line: self.line,
            column: self.column,
            problem,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    nodes: Spanned<Vec<Spanned<Entry>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Spanned<String>,
    #[serde(default)]
    cluster: Option<Spanned<String>>,
    #[serde(default)]
    addresses: Vec<Spanned<String>>,
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Vec<Spanned<String>>,
    #[serde(rename = "healthAddresses", default)]
    health_addresses: Vec<Spanned<String>>,
    #[serde(rename = "secondaryAddresses", default)]
    secondary_addresses: Vec<Spanned<String>>,
}

/// Most YAML nodes in a registry. One of the cluster's nodes takes up to 30 of them, so there is room
/// for 100 000.
const YAML_NODES: usize = 3_000_000;

/// Reads a registry; nodes that name no cluster are of `default_cluster`. Sorted by full name.
///
/// The result holds what [`Node`] promises: each node has an address, and no name, address or pod
/// CIDR is another's.
pub fn parse(text: &str, default_cluster: &str) -> Result<Vec<Node>, DocumentError> {
    let blank = |line: &str| line.trim_start().is_empty() || line.trim_start().starts_with('#');
    if text.lines().all(blank) {
        return Err(DocumentError::Empty);
    }
    let limits = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: YAML_NODES,
            max_events: 2 * YAML_NODES,
        },
    };
    let document: Document =
        serde_saphyr::from_str_with_options(text, limits).map_err(malformed)?;
    if document.nodes.value.is_empty() {
        return Err(Place::from(document.nodes.referenced).error(Problem::NoNodes));
    }

    let mut seen = Seen::default();
    let mut nodes = Vec::with_capacity(document.nodes.value.len());
    for entry in document.nodes.value {
        nodes.push(seen.node(entry, default_cluster)?);
    }
    seen.check_pod_cidrs()?;
    nodes.sort_by(|a, b| (&a.cluster, &a.name).cmp(&(&b.cluster, &b.name)));
    Ok(nodes)
}

fn malformed(error: serde_saphyr::Error) -> DocumentError {
    let error = error.without_snippet();
    let problem = Problem::Malformed(UserMessageFormatter.format_message(error).into_owned());
    match error.location().map(Place::from) {
        Some(place) if place.line > 0 => place.error(problem),
        _ => DocumentError::Somewhere(problem),
    }
}

/// A node's own address.
struct NodeAddress {
    address: IpAddr,
    node: String,
    place: Place,
}

/// A node's pod CIDR.
struct PodCidr {
    cidr: IpNet,
    node: String,
    place: Place,
}

/// What must not occur twice.
#[derive(Default)]
struct Seen {
    names: HashMap<String, Place>,
    addresses: HashMap<IpAddr, (Place, String)>,
    node_addresses: Vec<NodeAddress>,
    pod_cidrs: Vec<PodCidr>,
}

impl Seen {
    fn node(
        &mut self,
        entry: Spanned<Entry>,
        default_cluster: &str,
    ) -> Result<Node, DocumentError> {
        let place = Place::from(entry.referenced);
        let entry = entry.value;
        let name_place = Place::from(entry.name.referenced);
        let name = name("node name", entry.name)?;
        let cluster = match entry.cluster {
            Some(cluster) => self::name("cluster name", cluster)?,
            None => default_cluster.to_owned(),
        };
        let mut node = Node {
            name,
            cluster,
            addresses: Vec::new(),
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
        };
        let full_name = node.full_name();
        if let Some(&first) = self.names.get(&full_name) {
            return Err(name_place.error(Problem::DuplicateName {
                name: full_name,
                first,
            }));
        }
        self.names.insert(full_name.clone(), name_place);
        if entry.addresses.is_empty() {
            return Err(place.error(Problem::NoAddress(full_name)));
        }

        for (written, kept) in [
            (entry.addresses, &mut node.addresses),
            (entry.secondary_addresses, &mut node.secondary_addresses),
        ] {
            for written in written {
                let (address, place) = self.address(written, &full_name)?;
                kept.push(address);
                self.node_addresses.push(NodeAddress {
                    address,
                    node: full_name.clone(),
                    place,
                });
            }
        }
        for written in entry.pod_cidrs {
            let (cidr, place) = cidr(written)?;
            node.pod_cidrs.push(cidr);
            self.pod_cidrs.push(PodCidr {
                cidr,
                node: full_name.clone(),
                place,
            });
        }
        for written in entry.health_addresses {
            let owner = format!("the health endpoint of {full_name}");
            let (address, place) = self.address(written, &owner)?;
            if !node.pod_cidrs.iter().any(|cidr| cidr.contains(&address)) {
                return Err(place.error(Problem::OutsidePodCidrs {
                    address,
                    node: full_name,
                }));
            }
            node.health_addresses.push(address);
        }
        Ok(node)
    }

    fn address(
        &mut self,
        written: Spanned<String>,
        owner: &str,
    ) -> Result<(IpAddr, Place), DocumentError> {
        let place = Place::from(written.referenced);
        let address: IpAddr = written
            .value
            .parse()
            .map_err(|_| place.error(Problem::InvalidAddress(written.value)))?;
        let broadcast = address == IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
        let mapped = matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
        if address.is_unspecified() || address.is_multicast() || broadcast || mapped {
            return Err(place.error(Problem::NotUnicast(address)));
        }
        if let Some((first, owner)) = self.addresses.get(&address) {
            return Err(place.error(Problem::DuplicateAddress {
                address,
                first: *first,
                owner: owner.clone(),
            }));
        }
        self.addresses.insert(address, (place, owner.to_owned()));
        Ok((address, place))
    }

    /// Compares neighbours in order of their first address alone: prefixes are nested or apart, so
    /// if any two overlap, two neighbours do.
    fn check_pod_cidrs(&mut self) -> Result<(), DocumentError> {
        self.pod_cidrs
            .sort_by_key(|pod| (pod.cidr.network(), pod.cidr.prefix_len()));
        for pair in self.pod_cidrs.windows(2) {
            if pair[0].cidr.contains(&pair[1].cidr.network()) {
                let (earlier, later) = if pair[0].place < pair[1].place {
                    (&pair[0], &pair[1])
                } else {
                    (&pair[1], &pair[0])
                };
                return Err(later.place.error(Problem::OverlappingCidrs {
                    cidr: later.cidr,
                    owner: later.node.clone(),
                    other: earlier.cidr,
                    other_owner: earlier.node.clone(),
                    place: earlier.place,
                }));
            }
        }
        for own in &self.node_addresses {
            let below = self
                .pod_cidrs
                .partition_point(|pod| pod.cidr.network() <= own.address);
            let Some(pod) = self.pod_cidrs[..below].last() else {
                continue;
            };
            if pod.cidr.contains(&own.address) {
                return Err(own.place.error(Problem::AddressInPodCidr {
                    address: own.address,
                    node: own.node.clone(),
                    cidr: pod.cidr,
                    owner: pod.node.clone(),
                    place: pod.place,
                }));
            }
        }
        Ok(())
    }
}

fn name(what: &'static str, written: Spanned<String>) -> Result<String, DocumentError> {
    let name = written.value;
    if name.is_empty() || name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) {
        return Err(Place::from(written.referenced).error(Problem::InvalidName { what, name }));
    }
    Ok(name)
}

fn cidr(written: Spanned<String>) -> Result<(IpNet, Place), DocumentError> {
    let place = Place::from(written.referenced);
    let cidr: IpNet = written
        .value
        .parse()
        .map_err(|_| place.error(Problem::InvalidCidr(written.value)))?;
    if cidr != cidr.trunc() {
        return Err(place.error(Problem::HostBits {
            written: cidr,
            network: cidr.trunc(),
        }));
    }
    Ok((cidr, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_document_is_read() {
        let nodes = parse(
            r#"
nodes:
  - name: hnode2
    addresses: [172.30.0.2]
    podCIDRs: [10.244.2.0/24]
  - name: hnode1
    cluster: other
    addresses: [172.30.0.1, "fd00:30::1"]
    podCIDRs: [10.244.1.0/24, "fd00:10:244:1::/64"]
    healthAddresses: [10.244.1.7]
    secondaryAddresses: [192.168.0.1]
"#,
            "default",
        )
        .unwrap();
        let names: Vec<_> = nodes.iter().map(Node::full_name).collect();
        assert_eq!(names, ["default/hnode2", "other/hnode1"]);
        assert_eq!(nodes[1].addresses.len(), 2);
        assert_eq!(nodes[1].pod_cidrs[1], "fd00:10:244:1::/64".parse().unwrap());
        assert_eq!(
            nodes[1].health_addresses,
            ["10.244.1.7".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(
            nodes[1].secondary_addresses,
            ["192.168.0.1".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn each_problem_is_named_with_its_place() {
        for (text, expected) in [
            (
                "",
                "it is empty; it needs a list `nodes` with at least one node",
            ),
            (
                "# nothing\n\n",
                "it is empty; it needs a list `nodes` with at least one node",
            ),
            ("nodes: []", "line 1, column 8: there are no nodes in it"),
            (
                "nodes:\n- name: a\n  addresses: [10.0.0.1\n",
                "line 3, column 14: ",
            ),
            (
                "nodes:\n- name: a\n  address: [10.0.0.1]\n",
                "line 3, column 3: unknown field `address`",
            ),
            (
                "nodes:\n- addresses: [10.0.0.1]\n",
                "line 2, column 3: missing field `name`",
            ),
            (
                "nodes:\n- name: a/b\n",
                "line 2, column 9: node name \"a/b\" must not",
            ),
            (
                "nodes:\n- name: a\n",
                "line 2, column 3: node default/a has no address",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1]}\n- {name: a, addresses: [10.0.0.2]}",
                "line 3, column 10: node default/a is there twice, first at line 2, column 10",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1]}\n- {name: b, addresses: [10.0.0.1]}",
                "line 3, column 25: address 10.0.0.1 is there twice, first at line 2, column 25 \
                 as default/a",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], secondaryAddresses: [10.0.0.1]}",
                "line 2, column 57: address 10.0.0.1 is there twice",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.256]}",
                "line 2, column 25: \"10.0.0.256\" is not an IP address",
            ),
            (
                "nodes:\n- {name: a, addresses: [224.0.0.1]}",
                "line 2, column 25: 224.0.0.1 is not a unicast address",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/33]}",
                "line 2, column 47: \"10.1.0.0/33\" is not a CIDR",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.1/24]}",
                "line 2, column 47: CIDR 10.1.0.1/24 has host bits set; write 10.1.0.0/24",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/24], \
                 healthAddresses: [10.1.1.1]}",
                "line 2, column 79: health address 10.1.1.1 is in none of the pod CIDRs",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.1.0.0/16]}\n\
                 - {name: b, addresses: [10.0.0.2], podCIDRs: [10.2.0.0/16, 10.1.3.0/24]}",
                "line 3, column 60: pod CIDR 10.1.3.0/24 of default/b overlaps 10.1.0.0/16 of \
                 default/a at line 2, column 47",
            ),
            (
                "nodes:\n- {name: a, addresses: [10.0.0.1], podCIDRs: [10.0.0.0/24]}",
                "line 2, column 25: address 10.0.0.1 of default/a lies in the pod CIDR",
            ),
        ] {
            let error = parse(text, "default").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error:?} for {text:?}");
            assert_eq!(error.lines().count(), 1, "{error:?}");
        }
    }

    #[test]
    fn thirty_thousand_nodes_fit() {
        let mut text = "nodes:\n".to_owned();
        for i in 0..30_000_u32 {
            let (high, low) = (i >> 8, i & 255);
            text.push_str(&format!(
                "- name: n{i}\n  addresses: [172.16.{high}.{low}, \"fd00:30::{i:x}\"]\n  \
                 podCIDRs: [10.{high}.{low}.0/24, \"fd00:10:{i:x}::/64\"]\n"
            ));
        }
        assert_eq!(parse(&text, "default").unwrap().len(), 30_000);
    }
}
