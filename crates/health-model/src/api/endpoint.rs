//! Endpoints of this node, and identities.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::policy::PolicyMode;

/// One endpoint of `GET /v1/endpoints`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct Endpoint {
    /// Unique on this node, 1 to 4095.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1, max = 4095)))]
    pub id: u16,
    /// Name.
    pub name: Option<String>,
    /// The container that it belongs to.
    pub container_id: Option<String>,
    /// The pod that it belongs to.
    #[serde(default)]
    pub pod: Option<PodName>,
    /// The container runtime's network that it was created for.
    pub network: Option<String>,
    /// Security identity.
    pub identity: u32,
    /// Labels, `source:key` or `source:key=value`.
    pub labels: Vec<String>,
    /// Whether traffic to it is subject to policy.
    pub policy_ingress: Enforcement,
    /// Whether traffic from it is subject to policy.
    pub policy_egress: Enforcement,
    /// Its settings.
    #[serde(default)]
    pub settings: EndpointSettings,
    /// IPv4 address.
    pub ipv4: Option<IpAddr>,
    /// IPv6 address.
    pub ipv6: Option<IpAddr>,
    /// IPv4 gateway.
    pub gateway4: Option<IpAddr>,
    /// IPv6 gateway.
    pub gateway6: Option<IpAddr>,
    /// Lifecycle state.
    #[cfg_attr(feature = "openapi", schemars(extend("$ref" = "#/components/schemas/EndpointState")))]
    pub state: String,
    /// Why it is not healthy, in words; `null` if no problem is known.
    #[serde(default)]
    pub reason: Option<String>,
    /// Whether all containers behind it can serve, according to their probes; `null` if none is probed.
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
    /// Path of its network namespace file.
    pub netns: String,
    /// Repairs since the agent started, by cause.
    pub repairs: BTreeMap<String, u64>,
}

/// Settings of an endpoint that may change while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", default)]
pub struct EndpointSettings {
    /// When policy is enforced for it; `default`: as for the node.
    pub enforcement: PolicyMode,
    /// Whether its packets get conntrack entries. Without them, policy judges each packet by itself.
    pub conntrack: bool,
    /// Whether monitors see the packets that pass to it and from it.
    pub debug: bool,
}

impl Default for EndpointSettings {
    fn default() -> Self {
        Self {
            enforcement: PolicyMode::default(),
            conntrack: true,
            debug: false,
        }
    }
}

/// Body of `PATCH /v1/endpoints/{id}/config`. Absent settings stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct EndpointSettingsChange {
    /// When policy is enforced for it; `default`: as for the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<PolicyMode>,
    /// Whether its packets get conntrack entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conntrack: Option<bool>,
    /// Whether monitors see the packets that pass to it and from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub debug: Option<bool>,
}

impl EndpointSettingsChange {
    /// This change with a later one.
    pub fn then(self, later: Self) -> Self {
        Self {
            enforcement: later.enforcement.or(self.enforcement),
            conntrack: later.conntrack.or(self.conntrack),
            debug: later.debug.or(self.debug),
        }
    }

    /// The settings after the change.
    pub fn applied_to(self, settings: EndpointSettings) -> EndpointSettings {
        EndpointSettings {
            enforcement: self.enforcement.unwrap_or(settings.enforcement),
            conntrack: self.conntrack.unwrap_or(settings.conntrack),
            debug: self.debug.unwrap_or(settings.debug),
        }
    }
}

impl EndpointSettings {
    /// Each setting as `NAME=VALUE`, in order.
    pub fn words(&self) -> [String; 3] {
        let word = |is_on| if is_on { "on" } else { "off" };
        [
            format!("enforcement={}", self.enforcement),
            format!("conntrack={}", word(self.conntrack)),
            format!("debug={}", word(self.debug)),
        ]
    }
}

/// A pod, as its container runtime names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PodName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; `null` if the runtime does not give it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for PodName {
    /// `NAMESPACE/NAME`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Whether policy is enforced in a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub enum Enforcement {
    /// Traffic that no rule allows is dropped.
    Enabled,
    /// All traffic passes.
    Disabled,
    /// Unknown until the endpoint is first regenerated.
    Unknown,
}

impl Enforcement {
    /// Name shown in listings.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Enabled => "Enabled",
            Self::Disabled => "Disabled",
            Self::Unknown => "Unknown",
        }
    }
}

/// Health of one part of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub enum HealthState {
    /// Healthy.
    #[serde(rename = "OK")]
    Ok,
    /// Not set up yet.
    Bootstrap,
    /// A change is in progress.
    Pending,
    /// The change failed; the previous state still serves.
    Warning,
    /// It failed.
    Failure,
    /// The endpoint does not have this part.
    Disabled,
}

impl HealthState {
    /// Name shown in listings.
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
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EndpointHealth {
    /// Overall health.
    pub overall_health: HealthState,
    /// Its BPF programs.
    pub bpf: HealthState,
    /// Its policy; `Disabled` if none is enforced.
    pub policy: HealthState,
    /// Whether its device exists and is up on the host; for the health endpoint, also its addresses, routes and
    /// namespace.
    pub connected: bool,
}

/// Body of `POST /v1/endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct EndpointRequest {
    /// Path of its network namespace file, absolute.
    pub netns: String,
    /// Labels, `source:key=value`, at most 256 of at most 1024 bytes each. Without labels, its identity is
    /// `reserved:init`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The container that it belongs to. A device of a container can have only one endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// The pod that it belongs to. If the agent follows the pods of Kubernetes, the endpoint's labels of source `k8s`
    /// are those of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// Name of the device in the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schemars(extend("default" = "eth0")))]
    pub ifname: Option<String>,
    /// The container runtime's network that it was created for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Whether the namespace's default routes must lead to this endpoint; refused while they lead to another one. If not
    /// given: only if they lead to no other endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_route: Option<bool>,
    /// The requested IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schemars(extend("format" = "ipv4")))]
    pub ipv4: Option<String>,
    /// The requested IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schemars(extend("format" = "ipv6")))]
    pub ipv6: Option<String>,
}

/// Body of `PATCH /v1/endpoints/{id}/labels`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LabelChange {
    /// Labels to add, `source:key=value`. They replace labels of the same source and key.
    #[serde(default)]
    pub add: Vec<String>,
    /// Labels to remove, by source and key.
    #[serde(default)]
    pub remove: Vec<String>,
}

/// An address of `GET /v1/ipam`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct TakenAddress {
    /// The address.
    pub address: IpAddr,
    /// Id of the endpoint that owns it.
    #[cfg_attr(feature = "openapi", schemars(range(min = 1, max = 4095)))]
    pub endpoint: u16,
    /// Name of that endpoint.
    pub name: String,
}

/// Answer to `DELETE /v1/endpoints` and `/v1/endpoints/{id}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct Deleted {
    /// Ids of the deleted endpoints.
    pub deleted: Vec<u16>,
}

/// A line of `GET /v1/endpoints?watch=true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EndpointEvent {
    /// An endpoint that exists: sent once at the start, then on every change.
    Updated {
        /// Current state.
        endpoint: Box<Endpoint>,
    },
    /// An endpoint that is no longer listed: a minute after its deletion, or earlier if its id is needed.
    Deleted {
        /// Its id.
        id: u16,
    },
    /// All initial endpoints have been sent.
    Listed,
}

/// One identity of `GET /v1/identities`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "Identity")
)]
#[serde(rename_all = "kebab-case")]
pub struct IdentityEntry {
    /// Numeric id: 0 to 255 for reserved identities, 256 to 65535 for those of the cluster, with bit 24 set for this
    /// node's own.
    #[cfg_attr(feature = "openapi", schemars(range(max = 4_294_967_295_u32)))]
    pub id: u32,
    /// Labels, `source:key` or `source:key=value`.
    pub labels: Vec<String>,
    /// Names of the nodes that use it; `null` if they are not counted: only cluster identities are.
    pub references: Option<Vec<String>>,
}
