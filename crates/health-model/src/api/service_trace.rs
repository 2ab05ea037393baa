//! What becomes of a flow to a service, and why.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Answer to `GET /v1/services/trace`: what becomes of a new flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceTrace {
    /// Who opens it.
    pub source: TracedSource,
    /// Where it goes.
    pub destination: SocketAddr,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// What is reached there.
    pub frontend: TracedFrontend,
    /// From which backends one is chosen.
    pub pool: TracedPool,
    /// Who may use it; none for all.
    pub source_ranges: Option<TracedRanges>,
    /// What is known of a flow with these ends; none if nothing is, or the source's port was not given.
    pub flow: Option<TracedStay>,
    /// Where the client stays; none without affinity, or if it is not known.
    pub affinity: Option<TracedStay>,
    /// Those that it may go to.
    pub backends: Vec<TracedBackend>,
    /// What the programs know differently than the agent means them to.
    pub differences: Vec<String>,
    /// What becomes of it.
    pub verdict: TraceVerdict,
    /// All in one line.
    pub answer: String,
}

/// Who opens a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedSource {
    /// Its address.
    pub address: IpAddr,
    /// Its port, if it was given.
    pub port: Option<u16>,
    /// What it is.
    pub kind: SourceKind,
    /// Its endpoint, if that is on this node.
    pub endpoint: Option<u16>,
    /// What that is called, or the node that it is on.
    pub name: Option<String>,
    /// The identity that policy judges it by.
    pub identity: u32,
    /// The labels of that, as far as they are known.
    pub labels: Vec<String>,
}

/// What a source is to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Anybody else.
    Outside,
}

/// What is reached at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedFrontend {
    /// `NAMESPACE/NAME` of its service, or `NAMESPACE/NAME:PORT` where the port has a name; none if the agent knows of
    /// no service there.
    pub service: Option<String>,
    /// `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The number of the service's port in the maps; none if they have no such frontend.
    pub number: Option<u32>,
    /// How a backend is chosen.
    pub algorithm: String,
    /// How flows from outside get to backends on other nodes, where that is possible: `dsr` or `snat`; none of flows from
    /// this node and its endpoints.
    pub forwarding: Option<String>,
    /// How long a client stays with its backend after its last packet; none for no affinity.
    pub affinity_ns: Option<u64>,
}

/// From which backends one is chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedPool {
    /// Whether it is that of flows from this node and its endpoints, and not that of all others.
    pub inside: bool,
    /// The policy that it follows, `Cluster` or `Local`; none if the agent does not know it.
    pub policy: Option<String>,
    /// Why it has these backends, one reason each.
    pub reasons: Vec<String>,
}

/// Who may use a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedRanges {
    /// They and nobody else.
    pub ranges: Vec<IpNet>,
    /// Whether the source is one of them.
    pub admitted: bool,
}

/// A backend that a flow or a client has already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedStay {
    /// The backend; none if it is gone.
    pub backend: Option<SocketAddr>,
    /// Whether it stays there.
    pub stays: bool,
    /// Why.
    pub reason: String,
}

/// A backend that a flow may go to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedBackend {
    /// Where it listens.
    pub address: SocketAddr,
    /// How likely it is that the flow goes there, from 0 to 1.
    pub share: f64,
    /// Its share of new flows relative to others of the port; none if the agent does not know it.
    pub weight: Option<u16>,
    /// Its state, as far as the agent knows it.
    pub state: String,
    /// Flows that were sent to it and are not over, as far as is known.
    pub flows: u32,
    /// The node that it is on, if its slice says so.
    pub node: Option<String>,
    /// Its endpoint, if that is on this node.
    pub endpoint: Option<u16>,
    /// What that is called.
    pub name: Option<String>,
    /// What policy lets the source send there; none if that is not this node's to judge.
    pub egress: Option<TracedPolicy>,
    /// What policy lets it be sent; none if that is not this node's to judge.
    pub ingress: Option<TracedPolicy>,
    /// What else keeps the flow from it.
    pub problem: Option<String>,
}

impl TracedBackend {
    /// Whether nothing keeps a flow from it.
    pub fn is_reached(&self) -> bool {
        let mut sides = [&self.egress, &self.ingress].into_iter().flatten();
        self.problem.is_none() && sides.all(|side| side.allowed)
    }
}

/// What policy says of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TracedPolicy {
    /// Whether it passes.
    pub allowed: bool,
    /// The rule that says so, or what holds without one.
    pub reason: String,
}

/// What becomes of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceVerdict {
    /// It reaches whichever backend it gets.
    Reached,
    /// It reaches some of the backends that it may get.
    Partly,
    /// Policy refuses it.
    Refused,
    /// It is dropped silently.
    Dropped,
    /// Its sender is told that there is no backend: by an ICMP error, or, of this node's own sockets, by the call.
    Rejected,
    /// It is no flow to a service: it goes on as it is.
    NotServed,
}

impl TraceVerdict {
    /// Whether it may reach a backend.
    pub const fn may_reach(self) -> bool {
        matches!(self, Self::Reached | Self::Partly)
    }
}
