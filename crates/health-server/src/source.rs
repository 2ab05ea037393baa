//! The data source of the API.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::{RttKey, RttRow};
use health_datapath::events::{SubscribeError, Subscription};
use health_endpoint::enforcement::Enforcer;
use health_endpoint::manager::Manager;
use health_model::api::{
    AgentReport, AgentState, Endpoint, HealthStatus, IdentityEntry, NodeList, PathMtuEntry,
    ProbeEvent, TargetHistory,
};
use health_model::events::EventFilter;
use health_probe::supervisor::Supervisor;
use health_settings::Settings;
use tokio::sync::mpsc;

use super::services::ServiceCatalog;

#[cfg(test)]
pub(crate) mod testing;

/// What the server reads from the agent, which implements this. Every call returns at once with what is known.
pub trait Source: Send + Sync + 'static {
    /// The latest results.
    fn status(&self) -> HealthStatus;
    /// Writes the results as JSON, which may need less memory than building the whole report. May block for as long as
    /// `out` does.
    fn write_status(&self, out: &mut dyn io::Write) -> io::Result<()> {
        Ok(serde_json::to_writer(out, &self.status())?)
    }
    /// Probes all nodes now. Returns what is known after the probe timeout at the latest.
    fn probe(&self) -> impl Future<Output = HealthStatus> + Send;
    /// Probes all nodes now, and reports results as they arrive. The last event is [`ProbeEvent::Done`], after the
    /// probe timeout at the latest.
    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent>;
    /// The path MTUs to the addresses of one node (`cluster/node`) or of all nodes.
    fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry>;
    /// Probes the path MTUs again. Returns what is known after 25 s at the latest.
    fn probe_path_mtus(&self, node: Option<&str>)
    -> impl Future<Output = Vec<PathMtuEntry>> + Send;
    /// The results of the last hour's probes, for one node (`cluster/node`) or for all.
    fn history(&self, node: Option<&str>) -> Vec<TargetHistory>;
    /// Calls `each` with every row of round-trip times in the kernel, and stops at its first error. May block for as
    /// long as `each` does.
    fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()>;
    /// The nodes in the registries.
    fn nodes(&self) -> NodeList;
    /// The programs' events that match the filter, from now on; `None` while there are no programs.
    fn monitor(&self, _: EventFilter) -> Option<Result<Subscription, SubscribeError>> {
        None
    }
    /// Local endpoints by id, including the health endpoint.
    fn endpoints(&self) -> Vec<Arc<Endpoint>>;
    /// The policy enforcer; `None` until policy has been taken over.
    fn enforcer(&self) -> Option<&Enforcer> {
        None
    }
    /// The manager of all endpoints except the health endpoint; `None` until they have been restored.
    fn manager(&self) -> Option<&Manager> {
        None
    }
    /// The supervisor of container probes; `None` if this agent has no container probes.
    fn containers(&self) -> Option<&Supervisor> {
        None
    }
    /// The service catalog; `None` if this agent serves no services.
    fn services(&self) -> Option<&ServiceCatalog> {
        None
    }
    /// All security identities, sorted by number.
    fn identities(&self) -> Vec<IdentityEntry> {
        Vec::new()
    }
    /// The settings in force.
    fn settings(&self) -> Settings;
    /// What the agent is waiting for while it starts; `None` once everything that the API shows has been taken over.
    fn starting(&self) -> Option<String> {
        None
    }
    /// The agent's own part of `status`. Reads the pinned programs.
    fn agent(&self) -> AgentReport;
    /// The agent's own state.
    fn state(&self) -> AgentState;
    /// Time since the agent started.
    fn uptime(&self) -> Duration;
}
