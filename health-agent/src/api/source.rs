//! What the API is answered from.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::{RttKey, RttRow};
use health_datapath::conntrack::Counts;
use health_datapath::events::{self, SubscribeError, Subscription};
use health_endpoint::enforcement::Enforcer;
use health_endpoint::manager::Manager;
use health_mesh::{HelloRequestCounts, IgnoredReplyCounts};
use health_model::api::{
    AgentState, Endpoint, HealthStatus, IdentityEntry, NodeList, NodeStatus, PathMtuEntry,
    ProbeEvent, RegistryState, TargetHistory,
};
use health_model::events::EventFilter;
use health_probe::supervisor::Supervisor;
use health_registry::config::Config;
use tokio::sync::mpsc;

use super::services::ServiceCatalog;

/// What the server reads; the agent implements it. Every call answers at once with what is known.
pub trait Source: Send + Sync + 'static {
    /// The last results.
    fn status(&self) -> HealthStatus;
    /// Writes the same as JSON, which may take less than the whole report. May take as long as `out`
    /// does.
    fn write_status(&self, out: &mut dyn io::Write) -> io::Result<()> {
        Ok(serde_json::to_writer(out, &self.status())?)
    }
    /// The same without the nodes.
    fn status_head(&self) -> HealthStatus<()> {
        self.status().head()
    }
    /// Gives the nodes of the last results to `each` one by one, which may take less than the whole
    /// report.
    fn each_node(&self, each: &mut dyn FnMut(&NodeStatus)) {
        self.status().nodes.iter().for_each(each);
    }
    /// Probes all nodes now; ends with the probe timeout at the latest, with what is known then.
    fn probe(&self) -> impl Future<Output = HealthStatus> + Send;
    /// Probes all nodes now, and tells what comes out as it comes. The last event is
    /// [`ProbeEvent::Done`], with the probe timeout at the latest.
    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent>;
    /// How large packets to the addresses of one node (`cluster/node`) or of all may be.
    fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry>;
    /// Finds that out anew; ends after 25 s at the latest, with what is known then.
    fn probe_path_mtus(&self, node: Option<&str>)
    -> impl Future<Output = Vec<PathMtuEntry>> + Send;
    /// What became of the probes of the last hour, for one node (`cluster/node`) or for all.
    fn history(&self, node: Option<&str>) -> Vec<TargetHistory>;
    /// Calls `each` with every row of round-trip times, as the kernel holds them, and ends with its
    /// first error. May take as long as `each` does.
    fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()>;
    /// The registry.
    fn nodes(&self) -> NodeList;
    /// How the node registries do.
    fn registries(&self) -> Vec<RegistryState> {
        self.nodes().registries
    }
    /// ICMP messages that were not taken for answers.
    fn ignored_replies(&self) -> IgnoredReplyCounts {
        IgnoredReplyCounts::default()
    }
    /// Requests of `GET /hello` to this agent with something wrong.
    fn hello_requests(&self) -> HelloRequestCounts {
        HelloRequestCounts::default()
    }
    /// Answers of `GET /hello` with a header that could not be read.
    fn malformed_answers(&self) -> u64 {
        0
    }
    /// What collections of conntrack entries came to.
    fn collections(&self) -> Counts {
        Counts::default()
    }
    /// What the programs tell of these events from now on; `None` while there are no programs.
    fn monitor(&self, _: EventFilter) -> Option<Result<Subscription, SubscribeError>> {
        None
    }
    /// What was read and lost of it.
    fn events(&self) -> events::Counts {
        events::Counts::default()
    }
    /// Local endpoints by id, the health endpoint among them.
    fn endpoints(&self) -> Vec<Arc<Endpoint>>;
    /// What was repaired since the start, by cause.
    fn repairs(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
    /// What keeps policy in force; `None` before it is taken over.
    fn enforcer(&self) -> Option<&Enforcer> {
        None
    }
    /// What manages the others; `None` before they are restored.
    fn manager(&self) -> Option<&Manager> {
        None
    }
    /// What probes containers; `None` if this agent does not.
    fn containers(&self) -> Option<&Supervisor> {
        None
    }
    /// What is told of services; `None` if this agent serves none.
    fn services(&self) -> Option<&ServiceCatalog> {
        None
    }
    /// All security identities, by number.
    fn identities(&self) -> Vec<IdentityEntry> {
        Vec::new()
    }
    /// The settings in force.
    fn config(&self) -> Config;
    /// What the start waits for, in words; `None` once all that the agent shows is taken over.
    fn starting(&self) -> Option<String> {
        None
    }
    /// How the agent itself does.
    fn state(&self) -> AgentState;
    /// Since when it runs.
    fn uptime(&self) -> Duration;
}
