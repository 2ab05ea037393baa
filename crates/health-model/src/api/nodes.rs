//! The nodes, and the registries that they come from.

use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// `GET /v1/nodes`: the registry as the agent sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeList {
    /// Where they come from.
    pub registries: Vec<RegistryState>,
    /// The nodes, sorted by name.
    pub nodes: Vec<NodeEntry>,
}

/// How a node registry does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RegistryState {
    /// As the settings write it: `file:/etc/nodes.yaml`.
    pub registry: String,
    /// The cluster whose nodes it holds.
    pub cluster: String,
    /// When its nodes were known to be right for the last time (RFC 3339).
    pub last_read: Timestamp,
    /// Why it cannot be read; its nodes are then the last good set.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stale: Option<String>,
    /// When its nodes were last known to be right; set only while it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stale_since: Option<Timestamp>,
    /// Entries that were left out.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub rejected: Vec<RejectedEntry>,
}

/// An entry of a registry that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedEntry {
    /// Its key or name in the registry.
    pub key: String,
    /// What is wrong with it.
    pub reason: String,
}

/// One node of the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeEntry {
    /// `cluster/node`.
    pub name: String,
    /// Whether it is the node that answers.
    pub local: bool,
    /// Node addresses, the primary first.
    pub addresses: Vec<IpAddr>,
    /// Prefixes that its endpoints' addresses come from.
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses of its health endpoint, as far as known.
    pub health_addresses: Vec<IpAddr>,
    /// Addresses of the node and of its health endpoint that this agent probes by neither ICMP nor HTTP.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub not_probed: Vec<IpAddr>,
}

/// `GET /v1beta/cluster/nodes`: how the nodes have changed since this client's last answer.
///
/// A reader drops all it has if `full` says so, takes `nodes-removed` out, and only then puts
/// `nodes-added` in: a node that has changed is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ClusterNodeStatus {
    /// What to ask with the next time; 0 for a reader that gave none and gets all nodes each time.
    pub client_id: i64,
    /// `cluster/node` of the node that answers.
    #[serde(rename = "self")]
    pub own_name: String,
    /// Nodes that are new, and changed ones as they are now; sorted by name.
    pub nodes_added: Vec<NodeElement>,
    /// Nodes that are gone, and changed ones as they were; sorted by name.
    pub nodes_removed: Vec<NodeElement>,
    /// The state of the nodes that this answer leads to. A reader that gives the last one that it got
    /// misses nothing when an answer is lost.
    pub generation: u64,
    /// Whether `nodes-added` holds all nodes, and not a difference.
    pub full: bool,
}

/// One node of `GET /v1beta/cluster/nodes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeElement {
    /// `cluster/node`.
    pub name: String,
    /// The first address of each family.
    pub primary_address: NodeAddressing,
    /// Its other addresses.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub secondary_addresses: Vec<NodeAddressingElement>,
    /// Addresses of its health endpoint, as far as known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub health_endpoint_address: Option<NodeAddressing>,
}

/// An address of each family.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAddressing {
    /// IPv4.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv4: Option<NodeAddressingElement>,
    /// IPv6.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv6: Option<NodeAddressingElement>,
}

/// An address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeAddressingElement {
    /// The address.
    pub ip: IpAddr,
    /// Whether the agent that answers probes it.
    pub enabled: bool,
    /// The prefix that its endpoints' addresses of this family come from.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub alloc_range: Option<IpNet>,
}
