//! Nodes, and the registries that list them.

use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// `GET /v1/nodes`: the registry as the agent sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct NodeList {
    /// The registries that the nodes come from.
    pub registries: Vec<RegistryState>,
    /// The nodes, sorted by name.
    pub nodes: Vec<NodeEntry>,
}

/// State of a node registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct RegistryState {
    /// As written in the settings: `file:/etc/nodes.yaml`.
    pub registry: String,
    /// The cluster whose nodes it holds.
    pub cluster: String,
    /// When its nodes were last known to be correct (RFC 3339).
    pub last_read: Timestamp,
    /// Why it cannot be read; its nodes are then the last good set.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stale: Option<String>,
    /// When its nodes were last known to be correct; set only while it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stale_since: Option<Timestamp>,
    /// Skipped entries.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub rejected: Vec<RejectedEntry>,
}

/// A registry entry that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct RejectedEntry {
    /// Its key or name in the registry.
    pub key: String,
    /// What is wrong with it.
    pub reason: String,
}

/// One node of the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct NodeEntry {
    /// `cluster/node`.
    pub name: String,
    /// Whether this is the node that answers the request.
    pub local: bool,
    /// Node addresses, the primary first.
    pub addresses: Vec<IpAddr>,
    /// Prefixes from which its endpoints get their addresses.
    #[cfg_attr(feature = "openapi", schemars(with = "Vec<String>"))]
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses of its health endpoint, if known.
    pub health_addresses: Vec<IpAddr>,
    /// Addresses of the node and of its health endpoint that this agent probes by neither ICMP nor HTTP.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub not_probed: Vec<IpAddr>,
}

/// `GET /v1beta/cluster/nodes`: changes to the nodes since this client's last request.
///
/// If `full` is set, the client drops all its nodes first. It then removes `nodes-removed` and only after that adds
/// `nodes-added`: a changed node is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ClusterNodeStatus {
    /// Client id to send with the next request; 0 for a client that sent none, which gets all nodes each time.
    pub client_id: i64,
    /// `cluster/node` of the node that answers the request.
    #[serde(rename = "self")]
    pub own_name: String,
    /// New nodes, and changed nodes in their new state; sorted by name.
    pub nodes_added: Vec<NodeElement>,
    /// Removed nodes, and changed nodes in their old state; sorted by name.
    pub nodes_removed: Vec<NodeElement>,
    /// Generation of the node list that this answer leads to. A client that sends the last generation it received
    /// misses nothing when an answer is lost.
    pub generation: u64,
    /// Whether `nodes-added` holds all nodes rather than a difference.
    pub full: bool,
}

/// One node of `GET /v1beta/cluster/nodes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct NodeElement {
    /// `cluster/node`.
    pub name: String,
    /// The first address of each family.
    pub primary_address: NodeAddressing,
    /// Its other addresses.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub secondary_addresses: Vec<NodeAddressingElement>,
    /// Addresses of its health endpoint, if known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub health_endpoint_address: Option<NodeAddressing>,
}

/// One address per family.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
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
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct NodeAddressingElement {
    /// The address.
    pub ip: IpAddr,
    /// Whether the answering agent probes it.
    pub enabled: bool,
    /// The prefix from which its endpoints get their addresses of this family.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "openapi", schemars(with = "Option<String>"))]
    pub alloc_range: Option<IpNet>,
}
