//! Serves the API.

use std::future::Future;

use super::types::{AgentState, Endpoint, HealthStatus, NodeList};
use crate::config::Config;

/// What the server reads; the agent implements it. Every call answers at once with what is known.
pub trait Source: Send + Sync + 'static {
    /// The last results.
    fn status(&self) -> HealthStatus;
    /// Probes all nodes now; ends with the probe timeout at the latest, with what is known then.
    fn probe(&self) -> impl Future<Output = HealthStatus> + Send;
    /// The registry.
    fn nodes(&self) -> NodeList;
    /// Local endpoints.
    fn endpoints(&self) -> Vec<Endpoint>;
    /// The settings in force.
    fn config(&self) -> Config;
    /// How the agent itself does.
    fn state(&self) -> AgentState;
    /// Since when it runs.
    fn uptime(&self) -> std::time::Duration;
}
