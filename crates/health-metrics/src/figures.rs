//! The data that a scrape needs from the agent.

use std::collections::BTreeMap;
use std::time::Duration;

use health_datapath::conntrack;
use health_datapath::events;
use health_endpoint::manager;
use health_mesh::{HelloRequestCounts, IgnoredReplyCounts};
use health_model::api::{ControllerStatus, HealthStatus, NodeStatus, PolicyLag, RegistryState};

use crate::containers::Sample;

/// The data that scrapes read besides the maps. The agent implements it. Every call returns at once with the latest
/// known data.
pub trait Source: Send + Sync + 'static {
    /// Everything except the nodes.
    fn figures(&self) -> Figures;
    /// Passes the nodes of the latest results to `each` one by one, which may need less memory than the whole report.
    fn each_node(&self, each: &mut dyn FnMut(&NodeStatus));
}

/// Number of settings reloads since the start, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReloadCounts {
    /// Reloads whose new settings took effect or wait for a restart.
    pub succeeded: u64,
    /// Reloads that left the former settings in force.
    pub failed: u64,
}

/// The agent's own counts, settings and state.
#[derive(Debug, Default)]
pub struct Figures {
    /// The latest results without the nodes.
    pub report: HealthStatus<()>,
    /// Whether every target has its own series, not only failing targets.
    pub per_target: bool,
    /// The state of the node registries.
    pub registries: Vec<RegistryState>,
    /// ICMP messages that were not accepted as answers.
    pub ignored_replies: IgnoredReplyCounts,
    /// `GET /hello` requests to this agent that had an error.
    pub hello_requests: HelloRequestCounts,
    /// `GET /hello` answers with an unreadable header.
    pub malformed_answers: u64,
    /// Whether `/healthz` reports the agent as healthy.
    pub healthy: bool,
    /// The configured time between two probes of a target.
    pub configured_interval: Duration,
    /// Maximum number of probes per second.
    pub probe_rate: u32,
    /// Number of repairs since the start, by cause.
    pub repairs: BTreeMap<String, u64>,
    /// Settings reloads.
    pub reloads: ReloadCounts,
    /// The agent's controllers.
    pub controllers: Vec<ControllerStatus>,
    /// The results of conntrack garbage collections.
    pub collections: conntrack::Counts,
    /// `None` before the endpoints are restored.
    pub endpoints: Option<manager::Counts>,
    /// The endpoints on which the current policy is not in force; `None` if there are none.
    pub policy_lag: Option<PolicyLag>,
    /// How many events were read and lost.
    pub events: events::Counts,
    /// `None` if no containers are probed.
    pub containers: Option<Sample>,
    /// Time since the agent started.
    pub uptime: Duration,
}
