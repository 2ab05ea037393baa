//! Endpoints of this node, and identities.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

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
    /// Why it is not as it should be, in words; `None` if nothing is known to be wrong.
    #[serde(default)]
    pub reason: Option<String>,
    /// Whether all containers behind it can serve, as their probes say; `None` where none is probed.
    pub ready: Option<bool>,
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
    /// Whether its device is there and up on the host; for the health endpoint also its addresses, routes and
    /// namespace.
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
    /// Whether the routes of the namespace that lead out are to lead to it. Not given: if they lead to no other endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_route: Option<bool>,
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
    /// One that is no longer shown: a minute after it was deleted, or earlier if its id is needed.
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
