//! What is known about one address: by protocol, and by packet size.

use std::net::IpAddr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The addresses of a host or an endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct AddressGroupStatus {
    /// IPv4 if there is one, else IPv6.
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
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct PathStatus {
    /// The address.
    pub ip: IpAddr,
    /// ICMP echo; absent while there is no result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub icmp: Option<ConnectivityStatus>,
    /// HTTP `GET /hello`; absent while there is no result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub http: Option<ConnectivityStatus>,
    /// Protocols by which it is not probed.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub off: Vec<Protocol>,
    /// Largest packet size to it, if smaller than what this host sends.
    #[serde(rename = "pathMtu", skip_serializing_if = "Option::is_none", default)]
    pub path_mtu: Option<Box<PathMtuStatus>>,
}

/// Packet size limit of a path, in bytes of IP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PathMtuStatus {
    /// The largest packet that gets through.
    pub mtu: u32,
    /// The largest packet that this host sends, limited by the MTU of the device and of the route.
    pub local_mtu: u32,
    /// The outgoing device.
    pub device: String,
    /// What happens to larger packets that this host sends.
    pub larger: LargerPackets,
    /// The router that rejects them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rejected_by: Option<IpAddr>,
    /// When the MTU was observed (RFC 3339).
    pub last_probed: Timestamp,
}

/// What happens to packets larger than the path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum LargerPackets {
    /// This host sends none.
    None,
    /// A router reports to the sender that they are too big.
    Rejected,
    /// They are lost silently.
    Vanish,
}

/// One path of `GET` and `PUT /v1beta/status/path-mtu`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PathMtuEntry {
    /// `cluster/node`.
    pub node: String,
    /// The node's address.
    pub ip: IpAddr,
    /// Whether it is being probed on request.
    pub probing: bool,
    /// Last observation; absent before the first one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub path_mtu: Option<PathMtuStatus>,
}

/// The last result of one protocol on one path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct ConnectivityStatus {
    /// Round-trip time in nanoseconds; for HTTP, of the TCP handshake; 0 without an answer.
    pub latency: i64,
    /// Empty if answered, else what went wrong.
    pub status: String,
    /// When the probe was sent (RFC 3339).
    #[serde(rename = "lastProbed")]
    pub last_probed: Timestamp,
    /// Where the round trip was timestamped: `kernel` or `socket`.
    #[serde(rename = "rttSource", skip_serializing_if = "Option::is_none", default)]
    pub rtt_source: Option<RttSource>,
    /// HTTP only: time until the agent saw the connection established, nanoseconds.
    #[serde(
        rename = "connectLatency",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub connect_latency: Option<i64>,
    /// HTTP only: time until the answer arrived, nanoseconds.
    #[serde(
        rename = "totalLatency",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub total_latency: Option<i64>,
    /// Unanswered probes since the last answer, including those still waiting; absent on success.
    #[serde(
        rename = "consecutiveFailures",
        skip_serializing_if = "is_zero",
        default
    )]
    pub consecutive_failures: u32,
    /// When `status` last changed between success and failure, or got its first value (RFC 3339).
    #[serde(
        rename = "lastChange",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub last_change: Option<Timestamp>,
    /// Why it is degraded although it answers: packet loss, or unusual latency.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub degraded: Option<String>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// How an address is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// ICMP echo.
    Icmp,
    /// HTTP `GET /hello`.
    Http,
}

/// What an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PathKind {
    /// The node.
    Host,
    /// The node's health endpoint.
    Endpoint,
}

/// Where a round trip was timestamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RttSource {
    /// By the programs on the uplink.
    Kernel,
    /// At the agent's socket.
    Socket,
}

/// Summary of what is known about a probed target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reachability {
    /// All protocols got an answer.
    Reachable,
    /// All protocols got an answer, and at least one is degraded.
    Degraded,
    /// At least one protocol got no answer.
    Unreachable,
    /// No failure, but results are still missing.
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
    /// The worst of both protocols. A disabled protocol is ignored; a path without any result is unknown.
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

pub(super) fn worst(all: impl IntoIterator<Item = Reachability>) -> Reachability {
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
