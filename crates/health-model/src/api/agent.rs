//! What the agent reports about itself.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::nodes::RegistryState;

/// `GET /v1beta/healthz`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct HealthzResponse {
    /// State of the agent.
    pub cilium: AgentState,
    /// How long the agent has been running, as a Go duration.
    pub uptime: String,
    /// The machine's load averages.
    #[serde(rename = "system-load")]
    pub system_load: LoadAverage,
}

/// State of the agent as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct AgentState {
    /// `Ok`, `Warning` or `Failure`.
    #[cfg_attr(feature = "openapi", schemars(extend("enum" = ["Ok", "Warning", "Failure"])))]
    pub state: String,
    /// What is wrong, if anything.
    pub msg: String,
}

/// The machine's load averages, as decimal text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
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

/// `GET /v1/agent`: the agent's own part of `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct AgentReport {
    /// State of the agent.
    pub state: AgentState,
    /// What the start waits for; absent once the agent has started.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub starting: Option<String>,
    /// The agent's version.
    pub version: String,
    /// How long the agent has been running, as a Go duration.
    pub uptime: String,
    /// The kernel's release: `6.12.0`.
    pub kernel: String,
    /// The node registries; none while the agent starts.
    pub registries: Vec<RegistryState>,
    /// The pinned eBPF programs, sorted by name.
    pub programs: Vec<ProgramStatus>,
    /// Why the programs cannot be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub programs_error: Option<String>,
    /// The controllers, sorted by name.
    pub controllers: Vec<ControllerStatus>,
}

/// A loaded program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct ProgramStatus {
    /// Its name.
    pub name: String,
    /// Where it is attached: `eth0/ingress`, `eth0/egress`, `eth0/xdp`, or `cgroup` at the root control group. Empty
    /// for programs that others call, or that the agent runs.
    pub attached: Vec<String>,
}

/// A part of the agent that talks to something outside it, or repairs something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct ControllerStatus {
    /// Its name.
    pub name: String,
    /// Longest time from one run to the next, as a Go duration; absent if it runs when there is work.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub interval: Option<String>,
    /// Number of runs that succeeded. A watch is a run that succeeds once it is established.
    pub successes: u64,
    /// Number of runs that failed.
    pub failures: u64,
    /// Number of failures since the last success.
    pub consecutive_failures: u64,
    /// When a run last succeeded (RFC 3339).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_success: Option<Timestamp>,
    /// When a run last failed (RFC 3339).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_failure: Option<Timestamp>,
    /// Why it failed then.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_error: Option<String>,
}
