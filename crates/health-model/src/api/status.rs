//! The health of all nodes.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::path::{AddressGroupStatus, Reachability, worst};

/// `GET /v1beta/status` and `PUT /v1beta/status/probe`.
// For very many nodes, `N` may be a type that is serialized node by node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "HealthStatus")
)]
pub struct HealthStatus<N = Vec<NodeStatus>> {
    /// When the newest result in this report was taken (RFC 3339); absent before the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timestamp: Option<Timestamp>,
    /// Time between two probes of one address, as a Go duration (`10s`): the shortest configured interval, or longer if
    /// the probe rate limits it.
    #[serde(rename = "probeInterval")]
    pub probe_interval: String,
    /// The configured interval, if the probe rate does not allow it.
    #[serde(
        rename = "configuredInterval",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub configured_interval: Option<String>,
    /// The reporting node.
    pub local: SelfStatus,
    /// All known nodes, this one included, sorted by name.
    pub nodes: N,
}

impl<N> HealthStatus<N> {
    /// The status without the nodes.
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

/// The reporting node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct SelfStatus {
    /// `cluster/node`.
    pub name: String,
    /// What is wrong with this node, if most other nodes fail at once.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub diagnosis: Option<Diagnosis>,
    /// Whether the public mesh key is in force, alone or beside another one: anyone can answer for a peer.
    #[serde(
        rename = "publicMeshKey",
        skip_serializing_if = "std::ops::Not::not",
        default
    )]
    pub public_mesh_key: bool,
    /// Why it does not take part in endpoint health: it has no health endpoint and probes none.
    #[serde(
        rename = "hostsOnlyReason",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub hosts_only_reason: Option<String>,
    /// Its conntrack and NAT maps that are nearly full.
    #[serde(rename = "fullMaps", skip_serializing_if = "Vec::is_empty", default)]
    pub full_maps: Vec<FullMap>,
    /// Its endpoints that do not enforce its current policy, if any.
    #[serde(rename = "policyLag", skip_serializing_if = "Option::is_none", default)]
    pub policy_lag: Option<PolicyLag>,
    /// What is wrong with its agent.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub problems: Vec<AgentProblem>,
}

/// A failing check of `/healthz`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct AgentProblem {
    /// The check's name.
    pub check: String,
    /// True if the agent cannot do this work; false if it still works with what it has.
    #[serde(rename = "isFailure")]
    pub is_failure: bool,
    /// What is wrong.
    pub message: String,
}

/// Endpoints on which the previous policy is still in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct PolicyLag {
    /// How many.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub endpoints: u64,
    /// The reason, in a sentence about one of them.
    pub reason: String,
}

/// A map that is over 80 % full.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct FullMap {
    /// Its name.
    pub map: String,
    /// Approximate number of entries.
    pub entries: u64,
    /// Maximum number of entries.
    pub capacity: u64,
}

/// What is wrong, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct Diagnosis {
    /// The cause as one word, such as `agent-down`.
    pub cause: String,
    /// What is wrong, in one sentence.
    pub message: String,
    /// The facts that support it.
    pub evidence: Vec<String>,
}

/// One node as seen from the local node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct NodeStatus {
    /// `cluster/node`.
    pub name: String,
    /// The node's own addresses.
    pub host: AddressGroupStatus,
    /// The node's health endpoint; absent while its address is unknown, and if none is probed.
    #[serde(
        rename = "health-endpoint",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub health_endpoint: Option<AddressGroupStatus>,
    /// Whether only its own addresses are probed: it has no health endpoint, or the reporting node probes none.
    #[serde(
        rename = "hostsOnly",
        skip_serializing_if = "std::ops::Not::not",
        default
    )]
    pub hosts_only: bool,
    /// What is wrong with it, if anything.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub diagnosis: Option<Diagnosis>,
}

/// One line of the answer to `PUT /v1beta/status/probe?stream=true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ProbeEvent {
    /// All results of a node are in.
    Node(Box<NodeStatus>),
    /// Number of targets that have a result; sent at most ten times a second.
    Progress {
        /// Targets with a result.
        done: usize,
        /// All targets.
        total: usize,
    },
    /// The last line: the final status.
    Done(Box<HealthStatus>),
}

impl NodeStatus {
    /// The host and the health endpoint combined. An endpoint whose address is still unknown makes the node unknown;
    /// without an endpoint to probe, only the host counts.
    pub fn reachability(&self) -> Reachability {
        worst(
            [Some(self.host.reachability()), self.endpoint_reachability()]
                .into_iter()
                .flatten(),
        )
    }

    /// The health endpoint; `None` if there is none to probe.
    pub fn endpoint_reachability(&self) -> Option<Reachability> {
        match &self.health_endpoint {
            Some(endpoint) => Some(endpoint.reachability()),
            None if self.hosts_only => None,
            None => Some(Reachability::Unknown),
        }
    }
}
