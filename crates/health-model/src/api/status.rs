//! What is known of all nodes.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::path::{AddressGroupStatus, Reachability, worst};

/// `GET /v1beta/status` and `PUT /v1beta/status/probe`. Of very many nodes, `N` may be something that
/// is written down node by node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthStatus<N = Vec<NodeStatus>> {
    /// When the newest result in this report was taken (RFC 3339); absent before the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timestamp: Option<Timestamp>,
    /// Time between two probes of one address, as a Go duration (`10s`): the shortest one set, or
    /// longer where the probe rate allows no more.
    #[serde(rename = "probeInterval")]
    pub probe_interval: String,
    /// The interval that was set, where the probe rate does not allow it.
    #[serde(
        rename = "configuredInterval",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub configured_interval: Option<String>,
    /// The node that reports.
    pub local: SelfStatus,
    /// All known nodes, this one included, sorted by name.
    pub nodes: N,
}

impl<N> HealthStatus<N> {
    /// What it says besides the nodes.
    pub fn head(self) -> HealthStatus<()> {
        let Self {
            timestamp,
            probe_interval,
            configured_interval,
            local,
            nodes: _,
        } = self;
        HealthStatus {
            timestamp,
            probe_interval,
            configured_interval,
            local,
            nodes: (),
        }
    }
}

/// The node that reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelfStatus {
    /// `cluster/node`.
    pub name: String,
    /// What is wrong with this node, where most others fail at once.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub diagnosis: Option<Diagnosis>,
    /// Whether the public mesh key is in force, alone or beside another one: anyone can answer for a peer.
    #[serde(
        rename = "publicMeshKey",
        skip_serializing_if = "std::ops::Not::not",
        default
    )]
    pub public_mesh_key: bool,
    /// Why it takes no part in the health of endpoints: it has no health endpoint, and probes none.
    #[serde(
        rename = "hostsOnlyReason",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub hosts_only_reason: Option<String>,
    /// Its conntrack and NAT maps that are nearly full.
    #[serde(rename = "fullMaps", skip_serializing_if = "Vec::is_empty", default)]
    pub full_maps: Vec<FullMap>,
    /// Its endpoints that do not follow its policy, if there are any.
    #[serde(rename = "policyLag", skip_serializing_if = "Option::is_none", default)]
    pub policy_lag: Option<PolicyLag>,
    /// What is not in order with its agent.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub problems: Vec<AgentProblem>,
}

/// A check of `/healthz` that is not in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentProblem {
    /// The check's name.
    pub check: String,
    /// True if the agent cannot do this work; false if it still works, with what it has.
    #[serde(rename = "isFailure")]
    pub is_failure: bool,
    /// What is wrong.
    pub message: String,
}

/// Endpoints that keep what was in force before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyLag {
    /// How many they are.
    pub endpoints: u64,
    /// Why, in a sentence about one of them.
    pub reason: String,
}

/// A map that is over 80 % full.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FullMap {
    /// Its name.
    pub map: String,
    /// Entries in it, about.
    pub entries: u64,
    /// Entries that it has room for.
    pub capacity: u64,
}

/// What is wrong, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// What is wrong, in a word such as `agent-down`.
    pub cause: String,
    /// The same in a sentence.
    pub message: String,
    /// The facts that it rests on.
    pub evidence: Vec<String>,
}

/// One node as the local one sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// `cluster/node`.
    pub name: String,
    /// The node's own addresses.
    pub host: AddressGroupStatus,
    /// The node's health endpoint; absent while its address is not known, and where none is probed.
    #[serde(
        rename = "health-endpoint",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub health_endpoint: Option<AddressGroupStatus>,
    /// Whether its own addresses are all that is probed of it: it has no health endpoint, or the node that reports
    /// probes none.
    #[serde(
        rename = "hostsOnly",
        skip_serializing_if = "std::ops::Not::not",
        default
    )]
    pub hosts_only: bool,
    /// What is wrong with it, if something is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub diagnosis: Option<Diagnosis>,
}

/// One line of the answer to `PUT /v1beta/status/probe?stream=true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeEvent {
    /// All results of a node are there.
    Node(Box<NodeStatus>),
    /// So many of all targets have a result; sent at most ten times a second.
    Progress {
        /// Targets with a result.
        done: usize,
        /// All targets.
        total: usize,
    },
    /// The last line: what is known at the end.
    Done(Box<HealthStatus>),
}

impl NodeStatus {
    /// The host and the health endpoint together. An endpoint whose address is not known yet leaves
    /// the node unknown; where there is none to probe, the host is all.
    pub fn reachability(&self) -> Reachability {
        worst(
            [Some(self.host.reachability()), self.endpoint_reachability()]
                .into_iter()
                .flatten(),
        )
    }

    /// The health endpoint; `None` where there is none to probe.
    pub fn endpoint_reachability(&self) -> Option<Reachability> {
        match &self.health_endpoint {
            Some(endpoint) => Some(endpoint.reachability()),
            None if self.hosts_only => None,
            None => Some(Reachability::Unknown),
        }
    }
}
