//! Policies, and policy traces.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::policy::{Direction, L4, PolicyMode, PolicyOrigin};

/// Answer to `GET /v1/policies`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct PolicyList {
    /// How often the policies have changed.
    pub revision: u64,
    /// When policy is enforced.
    pub mode: PolicyMode,
    /// The mode that `policy mode` has set; it takes precedence over the settings. Absent if the settings decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commanded_mode: Option<PolicyMode>,
    /// The policies: those that were imported, by name, then those of the Kubernetes cluster, by name.
    pub policies: Vec<PolicyDocument>,
    /// Objects of the Kubernetes cluster that are not in force as they are, by name. If an earlier form of an object
    /// was in force, it still is, and is one of the policies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedPolicy>,
}

/// Body of `PATCH /v1/policies/mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PolicyModeChange {
    /// The mode, which takes precedence over the settings; `null`: the settings decide.
    pub mode: Option<PolicyMode>,
}

/// Answer to `PATCH /v1/policies/mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct PolicyModeStatus {
    /// When policy is enforced.
    pub mode: PolicyMode,
    /// Whether this was set by `policy mode`; if not, the settings say it.
    pub is_commanded: bool,
    /// Whether all endpoints follow the mode.
    pub is_in_force: bool,
}

/// An object that is not in force as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct RefusedPolicy {
    /// Kind, namespace and name.
    pub name: String,
    /// The field and what is wrong with it.
    pub reason: String,
    /// When the agent refused it.
    pub since: Timestamp,
}

/// A policy in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct PolicyDocument {
    /// Kind, namespace and name, or the labels of its rules.
    pub name: String,
    /// Where it comes from.
    pub origin: PolicyOrigin,
    /// When the agent got it in this form; absent if an earlier version got it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// What was imported, or the object without its status.
    pub document: serde_json::Value,
}

/// Answer to `POST` and `DELETE /v1/policies`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct PolicyChange {
    /// New policies.
    pub added: Vec<String>,
    /// Policies that replaced one of the same name.
    pub replaced: Vec<String>,
    /// Policies that are identical to existing ones.
    pub unchanged: Vec<String>,
    /// Deleted policies.
    pub deleted: Vec<String>,
    /// Objects of other kinds in the document, which were skipped.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// How often the policies have changed so far.
    pub revision: u64,
    /// Whether all affected endpoints already enforce the change.
    pub is_in_force: bool,
    /// How long enforcing the change took, or how long the request waited for that.
    pub took_ns: u64,
}

/// Body of `POST /v1/policies/trace`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TraceQuery {
    /// Where the packet comes from.
    pub source: TraceEndRequest,
    /// Where it goes.
    pub destination: TraceEndRequest,
    /// Its protocol and destination port.
    pub l4: L4,
    /// Limits the trace to one side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Direction>,
}

/// One end of a packet's path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TraceEndRequest {
    /// An endpoint of this node, by its id.
    Endpoint(u16),
    /// An identity, by number or reserved name.
    Identity(String),
    /// The owner of an address.
    Ip(String),
    /// An endpoint with these labels.
    Labels(Vec<String>),
}
