//! Services of this node.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A service that is served on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "Service")
)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceEntry {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `ClusterIP`, `NodePort` or `LoadBalancer`.
    #[serde(rename = "type")]
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["ClusterIP", "NodePort", "LoadBalancer"])))]
    pub kind: String,
    /// Where it was read from.
    pub source: String,
    /// Which endpoints traffic to its ClusterIPs may use: `Cluster` or `Local`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["Cluster", "Local"])))]
    pub internal_policy: String,
    /// The same for traffic to all its other addresses.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["Cluster", "Local"])))]
    pub external_policy: String,
    /// How long a client keeps its backend after it last opened a flow, nanoseconds; `null` without affinity.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub affinity_ns: Option<u64>,
    /// How a backend is chosen; `null` for the node's default.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["random", "round-robin", "maglev", "least-connection", null])))]
    pub algorithm: Option<String>,
    /// How packets from external clients reach backends on other nodes: `snat`, `dsr` or `hybrid`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["snat", "dsr", "hybrid"])))]
    pub forwarding: String,
    /// Why `forwarding` is not what the annotation requests; `null` if it is.
    pub forwarding_problem: Option<String>,
    /// The port on which this node reports to load balancers whether it has endpoints.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub health_check_node_port: Option<u16>,
    /// Its ports, in manifest order.
    pub ports: Vec<ServicePortEntry>,
}

impl ServiceEntry {
    /// `NAMESPACE/NAME`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "ServicePort")
)]
#[serde(rename_all = "kebab-case")]
pub struct ServicePortEntry {
    /// Name; empty for a service's only port.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["TCP", "UDP", "SCTP"])))]
    pub protocol: String,
    /// Port number at the service's addresses.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub port: u16,
    /// Port number at node addresses.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
    pub node_port: Option<u16>,
    /// Where its traffic arrives, IPv4 first.
    pub frontends: Vec<ServiceFrontend>,
    /// Its endpoints, IPv4 first.
    pub backends: Vec<ServiceBackend>,
    /// The outcome of its endpoints' topology hints, for each family with hints.
    pub topology: Vec<ServiceTopology>,
    /// Why this port could not be put in force, each with the family: the previous state stays in force.
    pub failures: Vec<String>,
}

impl ServicePortEntry {
    /// Whether `wanted` is its name or its number.
    pub fn is_called(&self, wanted: &str) -> bool {
        self.name == wanted || self.port.to_string() == wanted
    }

    /// `NAME NUMBER/PROTOCOL`.
    pub fn title(&self) -> String {
        let number = format!("{}/{}", self.port, self.protocol);
        match &*self.name {
            "" => number,
            name => format!("{name} {number}"),
        }
    }
}

/// The outcome of the topology hints of a port's endpoints, where traffic may use the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceTopology {
    /// The family: `IPv4` or `IPv6`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["IPv4", "IPv6"])))]
    pub family: String,
    /// Which endpoints get new flows: those hinted for this `node` or this `zone`, or `all`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["node", "zone", "all"])))]
    pub prefers: String,
    /// The reason.
    pub reason: String,
}

/// Where traffic of a port arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceFrontend {
    /// `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"])))]
    pub kind: String,
    /// `ADDRESS:PORT`, or `node port NUMBER`.
    pub listen: String,
    /// The family: `IPv4` or `IPv6`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["IPv4", "IPv6"])))]
    pub family: String,
    /// Where new flows from this node and its pods go: to a backend in the `cluster`, to one on this node (`local`), or
    /// nowhere (`drop`, `reject`).
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["cluster", "local", "drop", "reject"])))]
    pub inside: String,
    /// The same for all other new flows.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["cluster", "local", "drop", "reject"])))]
    pub outside: String,
}

/// An endpoint of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceBackend {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether it should get new flows.
    pub ready: bool,
    /// Whether it can serve, even while terminating.
    pub serving: bool,
    /// Whether it is terminating.
    pub terminating: bool,
    /// Whether it is on this node.
    pub local: bool,
    /// Whether this node's probes find it ready; `null` if they do not probe it, or if they have no say because the
    /// service comes from the Kubernetes API. The conditions above combine its endpoint slice with this result.
    pub probed: Option<bool>,
    /// Whether it gets new flows that may use endpoints of the whole cluster.
    pub in_cluster_list: bool,
    /// Whether it gets new flows that may only use endpoints of this node.
    pub in_local_list: bool,
    /// Whether it still serves and keeps its flows but gets no new ones.
    pub lingering: bool,
    /// Its share of new flows, relative to the others of the port.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1, max = 1000)))]
    pub weight: u16,
    /// The node where it runs.
    pub node: Option<String>,
    /// The zone where it runs.
    pub zone: Option<String>,
}

impl ServiceBackend {
    /// Its state in words.
    pub const fn state(&self) -> &'static str {
        match (self.terminating, self.serving, self.ready) {
            (true, true, _) => "terminating, serving",
            (true, false, _) => "terminating",
            (false, _, true) => "ready",
            (false, true, false) => "not ready, serving",
            (false, false, false) => "not ready",
        }
    }
}

/// A port that is not served at an address because another port or the node owns it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceConflict {
    /// The service that lost the address, `NAMESPACE/NAME`.
    pub service: String,
    /// Name of its port; empty for the only one.
    pub port: String,
    /// `TCP`, `UDP` or `SCTP`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["TCP", "UDP", "SCTP"])))]
    pub protocol: String,
    /// Which address it is, and who owns it.
    pub problem: String,
}

/// A problem that keeps a service from being served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceProblem {
    /// The subject: a file, or a service.
    pub subject: String,
    /// What is wrong, with the object and the field.
    pub problem: String,
}

/// Overall state of a node's services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ServiceSummary {
    /// Whether this agent has a source of services.
    pub enabled: bool,
    /// What serves them, `ebpf` or `ipvs`; empty if nothing does.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["", "ebpf", "ipvs"])))]
    pub mode: String,
    /// Whether all sources were read completely at least once. Before that, a service may be missing here.
    pub synced: bool,
    /// Number of services.
    pub services: u64,
    /// Why the last sync failed; `null` if it succeeded.
    pub error: Option<String>,
    /// The ports that are not served at an address because another port owns it.
    pub conflicts: Vec<ServiceConflict>,
    /// Why services are not served, or not reported to load balancers.
    pub problems: Vec<ServiceProblem>,
}
