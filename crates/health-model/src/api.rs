//! What the API speaks. Everything under `/v1beta` but `status/path-mtu` has the paths, field names and
//! types of Cilium's health API (`api/v1/health/openapi.yaml`); fields that Cilium lacks are optional
//! additions.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::policy::{Direction, L4, PolicyMode};

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
    /// Its conntrack and NAT maps that are nearly full.
    #[serde(rename = "fullMaps", skip_serializing_if = "Vec::is_empty", default)]
    pub full_maps: Vec<FullMap>,
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
    /// The node's health endpoint; absent while its address is not known.
    #[serde(
        rename = "health-endpoint",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub health_endpoint: Option<AddressGroupStatus>,
    /// What is wrong with it, if something is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub diagnosis: Option<Diagnosis>,
}

/// The addresses of a host or an endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddressGroupStatus {
    /// IPv4 where there is one, else IPv6.
    #[serde(rename = "primary-address")]
    pub primary_address: PathStatus,
    /// The other family, and other addresses.
    #[serde(
        rename = "secondary-addresses",
        skip_serializing_if = "Vec::is_empty",
        default
    )]
    pub secondary_addresses: Vec<PathStatus>,
}

impl AddressGroupStatus {
    /// All paths, the primary first.
    pub fn paths(&self) -> impl Iterator<Item = &PathStatus> {
        std::iter::once(&self.primary_address).chain(&self.secondary_addresses)
    }
}

/// One probed address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathStatus {
    /// The address.
    pub ip: IpAddr,
    /// ICMP echo; absent while there is no result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub icmp: Option<ConnectivityStatus>,
    /// HTTP `GET /hello`; absent while there is no result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub http: Option<ConnectivityStatus>,
    /// Protocols that it is not probed by.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub off: Vec<Protocol>,
    /// How large packets to it may be, if that is less than this host sends.
    #[serde(rename = "pathMtu", skip_serializing_if = "Option::is_none", default)]
    pub path_mtu: Option<Box<PathMtuStatus>>,
}

/// How large packets along a path may be, in bytes of IP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathMtuStatus {
    /// The largest that gets through.
    pub mtu: u32,
    /// The largest that this host sends: by the device's MTU and the route's.
    pub local_mtu: u32,
    /// The device that they leave by.
    pub device: String,
    /// What becomes of larger ones that this host sends.
    pub larger: LargerPackets,
    /// The router that rejects them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rejected_by: Option<IpAddr>,
    /// When that was seen (RFC 3339).
    pub last_probed: Timestamp,
}

/// What becomes of packets that are larger than a path's MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LargerPackets {
    /// This host sends none.
    None,
    /// A router tells their sender that they are too big.
    Rejected,
    /// They are lost without a word.
    Vanish,
}

/// One path of `GET` and `PUT /v1beta/status/path-mtu`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathMtuEntry {
    /// `cluster/node`.
    pub node: String,
    /// The node's address.
    pub ip: IpAddr,
    /// Whether it is being probed on request.
    pub probing: bool,
    /// What was seen last; absent before the first time.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub path_mtu: Option<PathMtuStatus>,
}

/// The last result of one protocol on one path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectivityStatus {
    /// Round trip in nanoseconds, for HTTP that of the connection's handshake; 0 without an answer.
    pub latency: i64,
    /// Empty: answered. Else what went wrong.
    pub status: String,
    /// When the probe was sent (RFC 3339).
    #[serde(rename = "lastProbed")]
    pub last_probed: Timestamp,
    /// Where the round trip was stamped: `kernel` or `socket`.
    #[serde(rename = "rttSource", skip_serializing_if = "Option::is_none", default)]
    pub rtt_source: Option<RttSource>,
    /// For HTTP: time until the connection stood for the agent, nanoseconds.
    #[serde(
        rename = "connectLatency",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub connect_latency: Option<i64>,
    /// For HTTP: time until the answer was there, nanoseconds.
    #[serde(
        rename = "totalLatency",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub total_latency: Option<i64>,
    /// Probes without an answer since the last answer, the waiting ones included; 0 for a success.
    #[serde(
        rename = "consecutiveFailures",
        skip_serializing_if = "is_zero",
        default
    )]
    pub consecutive_failures: u32,
    /// When `status` last went from success to failure or back, or had its first value (RFC 3339).
    #[serde(
        rename = "lastChange",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub last_change: Option<Timestamp>,
    /// Why it is degraded although it answers: loss, or a latency far from the usual.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub degraded: Option<String>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// How an address is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// ICMP echo.
    Icmp,
    /// HTTP `GET /hello`.
    Http,
}

/// What an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PathKind {
    /// The node.
    Host,
    /// The node's health endpoint.
    Endpoint,
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
    Done(HealthStatus),
}

/// One target of `GET /v1/history`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TargetHistory {
    /// `cluster/node`.
    pub node: String,
    /// The address.
    pub ip: IpAddr,
    /// What it belongs to.
    pub path: PathKind,
    /// How it is probed.
    pub protocol: Protocol,
    /// The last minute, ten minutes and hour.
    pub windows: Vec<HistoryWindow>,
    /// The last results, the newest first: round trips in nanoseconds, `null` for a lost probe.
    pub last_results_ns: Vec<Option<u64>>,
}

/// What became of the probes of some time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HistoryWindow {
    /// Its length.
    pub length_ns: u64,
    /// For how much of it results are known.
    pub covered_ns: u64,
    /// Probes whose fate is known, the confirming ones included.
    pub probes: u32,
    /// Those without an answer.
    pub lost: u32,
    /// Half of the round trips took this time at most.
    pub p50_ns: Option<u64>,
    /// Nine tenths.
    pub p90_ns: Option<u64>,
    /// 99 in a hundred.
    pub p99_ns: Option<u64>,
    /// The longest.
    pub max_ns: Option<u64>,
    /// Mean difference between one round trip and the next.
    pub jitter_ns: Option<u64>,
}

/// Where a round trip was stamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RttSource {
    /// By the programs on the uplink.
    Kernel,
    /// At the agent's socket.
    Socket,
}

/// What is known about something probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reachability {
    /// All protocols were answered.
    Reachable,
    /// All were answered, and one is degraded.
    Degraded,
    /// At least one was not.
    Unreachable,
    /// No failure, and not all results yet.
    Unknown,
}

impl ConnectivityStatus {
    /// Whether the target answers.
    pub fn is_ok(&self) -> bool {
        self.status.is_empty()
    }

    /// What the result means for the target.
    pub fn reachability(&self) -> Reachability {
        match (self.is_ok(), &self.degraded) {
            (false, _) => Reachability::Unreachable,
            (true, Some(_)) => Reachability::Degraded,
            (true, None) => Reachability::Reachable,
        }
    }
}

impl PathStatus {
    /// The worst of both protocols. One that is switched off says nothing; a path without any result
    /// is unknown.
    pub fn reachability(&self) -> Reachability {
        let results = [(Protocol::Icmp, &self.icmp), (Protocol::Http, &self.http)];
        worst(
            results
                .into_iter()
                .filter(|(protocol, _)| !self.off.contains(protocol))
                .map(|(_, result)| {
                    result
                        .as_ref()
                        .map_or(Reachability::Unknown, ConnectivityStatus::reachability)
                }),
        )
    }
}

impl AddressGroupStatus {
    /// Unreachable if any path is, else unknown, else degraded if any is, else reachable.
    pub fn reachability(&self) -> Reachability {
        worst(self.paths().map(PathStatus::reachability))
    }
}

impl NodeStatus {
    /// The host and the health endpoint together. An endpoint whose address is not known yet leaves
    /// the node unknown.
    pub fn reachability(&self) -> Reachability {
        let endpoint = self
            .health_endpoint
            .as_ref()
            .map_or(Reachability::Unknown, AddressGroupStatus::reachability);
        worst([self.host.reachability(), endpoint])
    }
}

fn worst(all: impl IntoIterator<Item = Reachability>) -> Reachability {
    all.into_iter()
        .fold(Reachability::Reachable, |worst, one| match (worst, one) {
            (Reachability::Unreachable, _) | (_, Reachability::Unreachable) => {
                Reachability::Unreachable
            }
            (Reachability::Unknown, _) | (_, Reachability::Unknown) => Reachability::Unknown,
            (Reachability::Degraded, _) | (_, Reachability::Degraded) => Reachability::Degraded,
            _ => Reachability::Reachable,
        })
}

/// `GET /v1beta/healthz`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HealthzResponse {
    /// State of the agent.
    pub cilium: AgentState,
    /// How long the agent runs, as a Go duration.
    pub uptime: String,
    /// The machine's load averages.
    #[serde(rename = "system-load")]
    pub system_load: LoadAverage,
}

/// State of the agent as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentState {
    /// `Ok`, `Warning` or `Failure`.
    pub state: String,
    /// What is wrong, if something is.
    pub msg: String,
}

/// Load averages, as decimal text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadAverage {
    /// Over one minute.
    #[serde(rename = "last1min")]
    pub last_1_min: String,
    /// Over five minutes.
    #[serde(rename = "last5min")]
    pub last_5_min: String,
    /// Over fifteen minutes.
    #[serde(rename = "last15min")]
    pub last_15_min: String,
}

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
    /// Why it cannot be read; its nodes are then the last good set.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stale: Option<String>,
    /// When its nodes were known to be right for the last time (RFC 3339), if that is not now.
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
    /// Whether the node uses this family.
    pub enabled: bool,
    /// The prefix that its endpoints' addresses of this family come from.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub alloc_range: Option<IpNet>,
    /// What kind of address it is, in the terms of Kubernetes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub address_type: Option<String>,
}

/// One endpoint of `GET /v1/endpoints`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Endpoint {
    /// Unique on this node, 1..=4095.
    pub id: u16,
    /// What it is called.
    pub name: Option<String>,
    /// The container that it is of.
    pub container_id: Option<String>,
    /// The runtime's network that it is for.
    pub network: Option<String>,
    /// Security identity.
    pub identity: u32,
    /// Labels, `source:key` or `source:key=value`.
    pub labels: Vec<String>,
    /// Whether what goes to it is subject to policy.
    pub policy_ingress: Enforcement,
    /// Whether what it sends is subject to policy.
    pub policy_egress: Enforcement,
    /// IPv4 address.
    pub ipv4: Option<IpAddr>,
    /// IPv6 address.
    pub ipv6: Option<IpAddr>,
    /// Where its IPv4 packets go first.
    pub gateway4: Option<IpAddr>,
    /// Where its IPv6 packets go first.
    pub gateway6: Option<IpAddr>,
    /// Lifecycle state.
    pub state: String,
    /// Host side of its veth pair.
    pub interface: String,
    /// Index of that interface.
    pub ifindex: u32,
    /// The device in its network namespace.
    pub inner_interface: String,
    /// The endpoint's own hardware address.
    pub mac: String,
    /// The host side's hardware address.
    pub host_mac: String,
    /// File of its network namespace.
    pub netns: String,
    /// What was repaired since the agent started, by cause.
    pub repairs: BTreeMap<String, u64>,
}

/// Whether policy is enforced in a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Enforcement {
    /// What no rule allows is dropped.
    Enabled,
    /// All passes.
    Disabled,
    /// Not known before the endpoint is regenerated for the first time.
    Unknown,
}

impl Enforcement {
    /// As listings show it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Enabled => "Enabled",
            Self::Disabled => "Disabled",
            Self::Unknown => "Unknown",
        }
    }
}

/// How a part of an endpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthState {
    /// As it should.
    #[serde(rename = "OK")]
    Ok,
    /// It is not there yet.
    Bootstrap,
    /// It is being changed.
    Pending,
    /// The change failed; what was before serves.
    Warning,
    /// It failed.
    Failure,
    /// There is none.
    Disabled,
}

impl HealthState {
    /// As listings show it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Bootstrap => "Bootstrap",
            Self::Pending => "Pending",
            Self::Warning => "Warning",
            Self::Failure => "Failure",
            Self::Disabled => "Disabled",
        }
    }
}

/// `GET /v1/endpoints/{id}/healthz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointHealth {
    /// All in all.
    pub overall_health: HealthState,
    /// Its programs.
    pub bpf: HealthState,
    /// Its policy.
    pub policy: HealthState,
    /// Whether it is connected.
    pub connected: bool,
}

/// Body of `POST /v1/endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct EndpointRequest {
    /// File of its network namespace.
    pub netns: String,
    /// Labels, `source:key=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// What it is called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The container that it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Name of the device in the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ifname: Option<String>,
    /// The runtime's network that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The IPv4 address that it must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<String>,
    /// The IPv6 address that it must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,
}

/// Body of `PATCH /v1/endpoints/{id}/labels`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LabelChange {
    /// Labels that it gets, `source:key=value`.
    #[serde(default)]
    pub add: Vec<String>,
    /// Labels that it loses, by source and key.
    #[serde(default)]
    pub remove: Vec<String>,
}

/// An address of `GET /v1/ipam`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenAddress {
    /// The address.
    pub address: IpAddr,
    /// Id of the endpoint that has it.
    pub endpoint: u16,
    /// What that is called.
    pub name: String,
}

/// Answer to `DELETE /v1/endpoints` and `/v1/endpoints/{id}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// Ids of the endpoints that are no more.
    pub deleted: Vec<u16>,
}

/// A line of `GET /v1/endpoints?watch=true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EndpointEvent {
    /// One that is there, at first and whenever it changes.
    Updated {
        /// As it is now.
        endpoint: Box<Endpoint>,
    },
    /// One that is no more.
    Deleted {
        /// Its id.
        id: u16,
    },
    /// All that were there at first have been told.
    Listed,
}

/// One identity of `GET /v1/identities`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IdentityEntry {
    /// Its number.
    pub id: u32,
    /// Labels, `source:key` or `source:key=value`.
    pub labels: Vec<String>,
    /// Names of the nodes that use it; `None` where that is not counted: only identities of the
    /// cluster are.
    pub references: Option<Vec<String>>,
}

/// Answer to `GET /v1/policies`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PolicyList {
    /// How often the policies have changed.
    pub revision: u64,
    /// When policy is enforced.
    pub mode: PolicyMode,
    /// By name.
    pub policies: Vec<PolicyDocument>,
}

/// A policy as it was imported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyDocument {
    /// Kind, namespace and name, or the labels of its rules.
    pub name: String,
    /// What was imported.
    pub document: serde_json::Value,
}

/// Answer to `POST` and `DELETE /v1/policies`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PolicyChange {
    /// Policies that are new.
    pub added: Vec<String>,
    /// Policies that took the place of one of their name.
    pub replaced: Vec<String>,
    /// Policies that were there word for word.
    pub unchanged: Vec<String>,
    /// Policies that are no more.
    pub deleted: Vec<String>,
    /// How often the policies have changed by now.
    pub revision: u64,
    /// Whether all endpoints that it touches follow.
    pub is_in_force: bool,
    /// How long it took until then, or until waiting ended.
    pub took_ns: u64,
}

/// Body of `POST /v1/policies/trace`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TraceQuery {
    /// Where the packet comes from.
    pub source: TraceEndRequest,
    /// Where it goes.
    pub destination: TraceEndRequest,
    /// Its protocol and destination port.
    pub l4: L4,
    /// The one side to look at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Direction>,
}

/// One end of a packet's way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceEndRequest {
    /// An endpoint of this node, by its id.
    Endpoint(u16),
    /// An identity, by number or reserved name.
    Identity(String),
    /// Whoever has an address.
    Ip(String),
    /// Somebody with these labels.
    Labels(Vec<String>),
}

/// Body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What failed, on what.
    pub error: String,
}
