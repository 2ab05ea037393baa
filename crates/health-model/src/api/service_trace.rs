//! What happens to a flow to a service, and why.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Answer to `GET /v1/services/trace`: what happens to a new flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceTrace {
    /// Who opens it.
    pub source: TracedSource,
    /// Where it goes.
    pub destination: SocketAddr,
    /// `TCP`, `UDP` or `SCTP`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["TCP", "UDP", "SCTP"])))]
    pub protocol: String,
    /// What answers at the destination.
    pub frontend: TracedFrontend,
    /// The backends from which one is chosen.
    pub pool: TracedPool,
    /// The allowed sources; `null` if all are.
    pub source_ranges: Option<TracedRanges>,
    /// What is known about a flow with these ends; `null` if nothing is, or if the source port was not given.
    pub flow: Option<TracedStay>,
    /// The client's affinity backend; `null` without affinity, or if it is unknown.
    pub affinity: Option<TracedStay>,
    /// The possible backends.
    pub backends: Vec<TracedBackend>,
    /// Where the BPF programs' state differs from what the agent intends.
    pub differences: Vec<String>,
    /// The outcome.
    pub verdict: TraceVerdict,
    /// Summary in one line.
    pub answer: String,
}

/// Who opens a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedSource {
    /// Its address.
    pub address: IpAddr,
    /// Its port; `null` if it was not given.
    pub port: Option<u16>,
    /// What kind of source it is.
    pub kind: SourceKind,
    /// Id of its endpoint, if that is on this node.
    pub endpoint: Option<u16>,
    /// Name of the endpoint, or of its node.
    pub name: Option<String>,
    /// The identity that policy applies to.
    pub identity: u32,
    /// The labels of that identity, if known.
    pub labels: Vec<String>,
}

/// What a source is to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// An endpoint of this node.
    Endpoint,
    /// This node itself.
    Host,
    /// Another node.
    Node,
    /// An endpoint of another node.
    RemoteEndpoint,
    /// Anything else.
    Outside,
}

/// What answers at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedFrontend {
    /// `NAMESPACE/NAME` of its service, or `NAMESPACE/NAME:PORT` if the port has a name; `null` if the agent knows no
    /// service there.
    pub service: Option<String>,
    /// `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The number of the service's port in the maps; `null` if they have no such frontend.
    pub number: Option<u32>,
    /// How a backend is chosen.
    pub algorithm: String,
    /// How flows from outside reach backends on other nodes, where that is possible: `dsr` or `snat`; `null` for flows
    /// from this node and its endpoints.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["snat", "dsr", null])))]
    pub forwarding: Option<String>,
    /// How long a client keeps its backend after it last opened a flow; `null` without affinity.
    pub affinity_ns: Option<u64>,
}

/// The backends from which one is chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedPool {
    /// Whether it is the pool for flows from this node and its endpoints rather than the one for all other flows.
    pub inside: bool,
    /// The traffic policy that it follows, `Cluster` or `Local`; `null` if the agent does not know it.
    pub policy: Option<String>,
    /// Why the pool contains these backends, one reason each.
    pub reasons: Vec<String>,
}

/// The allowed sources of a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedRanges {
    /// The only sources that may use it.
    #[cfg_attr(feature = "openapi", schemars(with = "Vec<String>"))]
    pub ranges: Vec<IpNet>,
    /// Whether the source is in one of them.
    pub admitted: bool,
}

/// A backend that a flow or a client already has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedStay {
    /// The backend; `null` if it no longer exists.
    pub backend: Option<SocketAddr>,
    /// Whether the flow or client keeps it.
    pub stays: bool,
    /// The reason.
    pub reason: String,
}

/// A backend that a flow may get.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedBackend {
    /// Where it listens.
    pub address: SocketAddr,
    /// Probability that the flow gets it, from 0 to 1.
    #[cfg_attr(feature = "openapi", schemars(range(min = 0, max = 1)))]
    pub share: f64,
    /// Its share of new flows relative to the other backends of the port; `null` if the agent does not know it.
    pub weight: Option<u16>,
    /// Its state, if the agent knows it.
    pub state: String,
    /// Known open flows to it.
    pub flows: u32,
    /// The node where it runs, if its endpoint slice says so.
    pub node: Option<String>,
    /// Id of its endpoint, if that is on this node.
    pub endpoint: Option<u16>,
    /// Name of that endpoint.
    pub name: Option<String>,
    /// Egress policy of the source towards it; `null` if another node decides.
    pub egress: Option<TracedPolicy>,
    /// Its ingress policy towards the source; `null` if another node decides.
    pub ingress: Option<TracedPolicy>,
    /// What else blocks the flow.
    pub problem: Option<String>,
}

impl TracedBackend {
    /// Whether nothing blocks a flow to it.
    pub fn is_reached(&self) -> bool {
        let mut sides = [&self.egress, &self.ingress].into_iter().flatten();
        self.problem.is_none() && sides.all(|side| side.allowed)
    }
}

/// Policy verdict on a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct TracedPolicy {
    /// Whether the packet passes.
    pub allowed: bool,
    /// The rule that decides, or the default that applies without one.
    pub reason: String,
}

/// Outcome of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TraceVerdict {
    /// It reaches its backend, whichever it gets.
    Reached,
    /// It reaches some of the backends that it may get.
    Partly,
    /// Policy denies it.
    Refused,
    /// It is dropped silently.
    Dropped,
    /// The sender learns that there is no backend: from an ICMP error, or, for this node's own sockets, from the system
    /// call.
    Rejected,
    /// Not a flow to a service: it passes unchanged.
    NotServed,
}

impl TraceVerdict {
    /// Whether it may reach a backend.
    pub const fn may_reach(self) -> bool {
        matches!(self, Self::Reached | Self::Partly)
    }
}
