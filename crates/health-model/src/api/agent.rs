//! What the agent reports about itself.

use serde::{Deserialize, Serialize};

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
