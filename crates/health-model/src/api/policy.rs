//! Policies, and questions about them.

use serde::{Deserialize, Serialize};

use crate::policy::{Direction, L4, PolicyMode};

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
    /// Objects of other kinds that were in the text, and were left out.
    #[serde(default)]
    pub skipped: Vec<String>,
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
