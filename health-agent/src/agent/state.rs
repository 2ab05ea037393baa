//! The agent's state as the API and the metrics read it.

use std::collections::BTreeMap;
use std::io;
use std::ops::Add;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use health_common::rtt::{RttKey, RttRow};
use health_datapath::conntrack::SharedCounts;
use health_datapath::dump::Pinned;
use health_datapath::events::{Hub, SubscribeError, Subscription};
use health_endpoint::enforcement::Enforcer;
use health_endpoint::manager::Manager;
use health_mesh::hello::{Responder, ResponderState};
use health_mesh::proof::HelloKeys;
use health_mesh::{HelloRequestCounts, HelloRequests, MeshHandle};
use health_metrics::{Figures, Sample};
use health_model::activity::{self, Activity, Problem, Reporter};
use health_model::api::{
    AgentProblem, AgentState, Endpoint, HealthStatus, IdentityEntry, NodeList, NodeStatus,
    PathMtuEntry, ProbeEvent, SelfStatus, TargetHistory,
};
use health_model::duration::go_duration;
use health_model::events::EventFilter;
use health_model::settings::ServiceXdp;
use health_probe::supervisor::Supervisor;
use health_registry::identity::Identities;
use health_server::liveness::{self, Grace, Level, Liveness, Observation};
use health_server::services::ServiceCatalog;
use health_server::source::Source;
use health_settings::Settings;
use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tracing::warn;

use super::node::NodeDatapath;
use super::watch::{EndpointOutcome, Outcome, PERIOD};

/// The agent as the API shows it. Complete from the first moment, even if empty at first.
pub(super) struct AgentSource {
    /// The settings of the start.
    config: Settings,
    /// The settings in force: those of the start, and what a reload has changed.
    pub(super) in_force: RwLock<Settings>,
    /// The names of changed settings that need a restart.
    pub(super) restart_due: RwLock<Vec<String>>,
    /// Whether the mesh key in force is public.
    public_mesh_key: bool,
    started: Instant,
    mesh: OnceLock<MeshHandle>,
    /// The responders' counters.
    responders: OnceLock<[Arc<HelloRequests>; 2]>,
    responder_states: OnceLock<[ResponderState; 2]>,
    /// Reports from the agent's parts.
    parts: OnceLock<Vec<Part>>,
    /// Current problems.
    problems: watch::Sender<Vec<AgentProblem>>,
    collections: OnceLock<SharedCounts>,
    events: OnceLock<Arc<Hub>>,
    manager: OnceLock<Manager>,
    containers: OnceLock<Supervisor>,
    services: OnceLock<ServiceCatalog>,
    enforcer: OnceLock<Enforcer>,
    identities: OnceLock<watch::Receiver<Arc<Identities>>>,
    /// What the start waits for.
    waiting: RwLock<Option<String>>,
    /// Number of repairs since the start, by cause.
    repairs: RwLock<BTreeMap<String, u64>>,
    /// What is served without programs that would make it faster.
    slower: RwLock<Option<String>>,
    watch_reporter: Reporter,
    watch_activity: Activity,
    maps: Grace,
}

/// A part of the agent that reports its activity.
pub(super) struct Part {
    /// Name of its check.
    pub(super) check: &'static str,
    /// Its reports.
    pub(super) activity: Activity,
    /// Whether the agent works without it. If so, its problems are only warnings.
    pub(super) is_optional: bool,
}

impl AgentSource {
    pub(super) fn new(config: Settings, keys: &HelloKeys) -> Self {
        let (watch_reporter, watch_activity) = activity::channel();
        Self {
            in_force: RwLock::new(config.clone()),
            restart_due: RwLock::default(),
            config,
            public_mesh_key: keys.accepts_public(),
            started: Instant::now(),
            mesh: OnceLock::new(),
            responders: OnceLock::new(),
            responder_states: OnceLock::new(),
            parts: OnceLock::new(),
            problems: watch::Sender::new(Vec::new()),
            collections: OnceLock::new(),
            events: OnceLock::new(),
            identities: OnceLock::new(),
            manager: OnceLock::new(),
            containers: OnceLock::new(),
            services: OnceLock::new(),
            enforcer: OnceLock::new(),
            waiting: RwLock::default(),
            repairs: RwLock::default(),
            slower: RwLock::default(),
            watch_reporter,
            watch_activity,
            maps: Grace::default(),
        }
    }

    /// The settings in force.
    pub(super) fn settings(&self) -> &Settings {
        &self.config
    }

    /// The health of the agent itself, check by check.
    pub(super) fn liveness(&self) -> Liveness {
        let now = Timestamp::now();
        let socket = liveness::socket_problem(&self.config.location.socket());
        let mut observations = vec![Observation::now("api-socket", socket)];
        if let Some(mesh) = self.mesh.get() {
            observations.extend([
                Observation::told("prober", mesh.prober()),
                Observation::told("datapath", self.watch_activity.last()),
                self.observed_maps(),
                self.observed_responders(),
            ]);
            observations.extend(self.parts.get().into_iter().flatten().map(|part| {
                let told = Observation::told(part.check, part.activity.last());
                match part.is_optional {
                    true => told.warning(),
                    false => told,
                }
            }));
            observations.extend(
                self.manager
                    .get()
                    .map(|manager| Observation::now("endpoints", manager.problem()).warning()),
            );
            observations.extend(self.services.get().map(|catalog| match catalog.problem() {
                Some((true, problem)) => Observation::now("services", Some(problem)),
                Some((false, problem)) => Observation::now("services", Some(problem)).warning(),
                None => Observation::now("services", None),
            }));
            observations.extend(
                self.restart_due()
                    .map(|due| Observation::now("settings", Some(due)).warning()),
            );
            if self.config.services.xdp() != ServiceXdp::Off {
                let slower = self.slower.read().unwrap_or_else(PoisonError::into_inner);
                observations.push(Observation::now("service-xdp", slower.clone()).warning());
            }
            observations.extend(mesh.registries().into_iter().map(|registry| {
                let problem = registry
                    .stale
                    .map(|reason| format!("{} is stale: {reason}", registry.registry));
                let age = now.duration_since(registry.last_read);
                let age = age.try_into().unwrap_or_default();
                // The registry itself reports when it has been silent for too long.
                Observation {
                    overdue: Duration::ZERO,
                    ..Observation::aged("registry", problem, age).warning()
                }
            }));
        } else {
            observations.push(Observation::now("start", self.starting()).warning());
        }
        Liveness::judge(observations, now)
    }

    fn observed_responders(&self) -> Observation {
        let states = self.responder_states.get().into_iter().flatten();
        let problems: Vec<String> = states.filter_map(ResponderState::problem).collect();
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        Observation::now("responders", problem)
    }

    /// The problems as last published.
    pub(super) fn problems(&self) -> watch::Receiver<Vec<AgentProblem>> {
        self.problems.subscribe()
    }

    /// Publishes the problems periodically, until it is dropped.
    pub(super) async fn tell_problems(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let source = self.clone();
            let looked = tokio::task::spawn_blocking(move || source.liveness().problems());
            let problems = match looked.await {
                Ok(problems) => problems,
                Err(error) => {
                    warn!(%error, "cannot inspect the state of the agent");
                    continue;
                }
            };
            self.problems.send_if_modified(|known| {
                let is_news = *known != problems;
                *known = problems;
                is_news
            });
        }
    }

    fn observed_maps(&self) -> Observation {
        let read = Pinned::open(&self.config.location).and_then(|pinned| pinned.metrics());
        let problem = read.err().map(|error| error.to_string());
        self.maps.observe("maps", problem, Instant::now())
    }

    pub(super) fn mesh(&self) -> Option<&MeshHandle> {
        self.mesh.get()
    }

    pub(super) fn set_mesh(&self, mesh: MeshHandle) {
        // Set once in the agent's life.
        let _ = self.mesh.set(mesh);
    }

    pub(super) fn set_responders(&self, responders: [&Responder; 2]) {
        // Set once, like the mesh.
        let _ = self.responders.set(responders.map(Responder::requests));
        let _ = self.responder_states.set(responders.map(Responder::state));
    }

    pub(super) fn set_parts(&self, parts: Vec<Part>) {
        // Set once, like the mesh.
        let _ = self.parts.set(parts);
    }

    pub(super) fn set_collections(&self, counts: SharedCounts) {
        // Set once, like the mesh.
        let _ = self.collections.set(counts);
    }

    pub(super) fn set_events(&self, hub: Arc<Hub>) {
        // Set once, like the mesh.
        let _ = self.events.set(hub);
    }

    pub(super) fn set_identities(&self, identities: watch::Receiver<Arc<Identities>>) {
        // Set once, like the mesh.
        let _ = self.identities.set(identities);
    }

    /// Sets what the start waits for, in words.
    pub(super) fn set_waiting(&self, waiting: Option<String>) {
        *self.waiting.write().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    pub(super) fn set_manager(&self, manager: Manager, enforcer: Enforcer) {
        // Set once, like the mesh.
        let _ = self.enforcer.set(enforcer);
        let _ = self.manager.set(manager);
    }

    pub(super) fn set_containers(&self, supervisor: Supervisor) {
        // Set once, like the mesh.
        let _ = self.containers.set(supervisor);
    }

    pub(super) fn set_services(&self, catalog: ServiceCatalog) {
        // Set once, like the mesh.
        let _ = self.services.set(catalog);
    }

    /// Marks the start of a check of the endpoint and the datapath.
    pub(super) fn begin_look(&self) {
        self.watch_reporter.begin();
    }

    /// Records faults of the health endpoint that are about to be repaired.
    pub(super) fn note_faults(&self, node: &NodeDatapath, problem: String) {
        let being_repaired = format!("{problem}; it is being repaired");
        self.watch_reporter
            .end(Some(Problem::warning(being_repaired)), Some(PERIOD));
        let found = EndpointOutcome {
            connection_problem: Some(problem),
            program_problem: node.left_program_problem(),
            ..EndpointOutcome::default()
        };
        self.note_endpoint(node, &found);
        self.begin_look();
    }

    fn note_endpoint(&self, node: &NodeDatapath, found: &EndpointOutcome) {
        if let (Some(manager), Some(report)) = (self.manager.get(), node.health_report(found))
            && let Err(error) = manager.note_health(report)
        {
            warn!(%error, "the health endpoint has an address outside this node's pod CIDRs");
        }
    }

    /// Records the outcome of a check of the endpoint and the datapath.
    pub(super) fn note_repairs(&self, node: &NodeDatapath, outcome: &Outcome) {
        self.note_endpoint(node, &outcome.endpoint);
        self.repairs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&node.repairs);
        self.slower
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&outcome.slower);
        let problem = outcome.problem().map(Problem::failure);
        self.watch_reporter.end(problem, Some(PERIOD));
    }

    /// Number of repairs since the start, by cause.
    fn repairs(&self) -> BTreeMap<String, u64> {
        let repairs = self.repairs.read().unwrap_or_else(PoisonError::into_inner);
        let mut repairs = repairs.clone();
        for (cause, count) in self.manager.get().map(Manager::repairs).unwrap_or_default() {
            *repairs.entry(cause).or_default() += count;
        }
        repairs
    }
}

impl Source for AgentSource {
    fn status(&self) -> HealthStatus {
        self.mesh.get().map_or_else(
            || HealthStatus {
                probe_interval: go_duration(
                    self.config
                        .mesh
                        .probe_interval
                        .as_nanos()
                        .try_into()
                        .unwrap_or(i64::MAX),
                ),
                local: SelfStatus {
                    name: self.config.node.full_name(),
                    diagnosis: None,
                    public_mesh_key: self.public_mesh_key,
                    hosts_only_reason: None,
                    full_maps: Vec::new(),
                    policy_lag: None,
                    problems: self.liveness().problems(),
                },
                ..HealthStatus::default()
            },
            MeshHandle::report,
        )
    }

    fn write_status(&self, out: &mut dyn io::Write) -> io::Result<()> {
        match self.mesh.get() {
            Some(mesh) => mesh.write_report(out),
            None => Ok(serde_json::to_writer(out, &self.status())?),
        }
    }

    async fn probe(&self) -> HealthStatus {
        match self.mesh.get() {
            Some(mesh) => mesh.probe_now().await,
            None => self.status(),
        }
    }

    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent> {
        match self.mesh.get() {
            Some(mesh) => mesh.probe_events(),
            None => {
                let (events, receiver) = mpsc::channel(1);
                // The channel has capacity for one event, and the receiver exists.
                let _ = events.try_send(ProbeEvent::Done(Box::new(self.status())));
                receiver
            }
        }
    }

    fn history(&self, node: Option<&str>) -> Vec<TargetHistory> {
        self.mesh
            .get()
            .map_or_else(Vec::new, |mesh| mesh.history(node))
    }

    fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()> {
        let mut taken = Ok(());
        Pinned::open(&self.config.location)
            .and_then(|pinned| {
                pinned.each_rtt(&mut |key, row| {
                    if taken.is_ok() {
                        taken = each(key, row);
                    }
                })
            })
            .map_err(io::Error::other)?;
        taken
    }

    fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        let mesh = self.mesh.get();
        mesh.map_or_else(Vec::new, |mesh| mesh.path_mtus(node))
    }

    async fn probe_path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        match self.mesh.get() {
            Some(mesh) => mesh.probe_path_mtus(node).await,
            None => Vec::new(),
        }
    }

    fn nodes(&self) -> NodeList {
        self.mesh
            .get()
            .map_or_else(NodeList::default, MeshHandle::nodes)
    }

    fn monitor(&self, filter: EventFilter) -> Option<Result<Subscription, SubscribeError>> {
        self.events.get().map(|hub| hub.subscribe(filter))
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        let mut all = self
            .manager
            .get()
            .map(Manager::endpoints)
            .unwrap_or_default();
        all.sort_unstable_by_key(|endpoint| endpoint.id);
        all
    }

    fn containers(&self) -> Option<&Supervisor> {
        self.containers.get()
    }

    fn services(&self) -> Option<&ServiceCatalog> {
        self.services.get()
    }

    fn enforcer(&self) -> Option<&Enforcer> {
        self.enforcer.get()
    }

    fn manager(&self) -> Option<&Manager> {
        self.manager.get()
    }

    fn identities(&self) -> Vec<IdentityEntry> {
        let known = self.identities.get();
        known.map_or_else(Vec::new, |known| identity_entries(&known.borrow()))
    }

    fn settings(&self) -> Settings {
        let in_force = self.in_force.read();
        in_force.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn starting(&self) -> Option<String> {
        // The mesh is set last.
        if self.mesh.get().is_some() {
            return None;
        }
        let waiting = self.waiting.read().unwrap_or_else(PoisonError::into_inner);
        let waiting = waiting.clone();
        Some(waiting.unwrap_or_else(|| "the agent is starting".to_owned()))
    }

    fn state(&self) -> AgentState {
        let Liveness { state, msg, .. } = self.liveness();
        AgentState {
            state: state.text().to_owned(),
            msg,
        }
    }

    fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

impl health_metrics::Source for AgentSource {
    fn figures(&self) -> Figures {
        let mesh = self.mesh.get();
        let settings = Source::settings(self);
        let responders = self.responders.get().into_iter().flatten();
        Figures {
            report: mesh.map_or_else(|| self.status().head(), MeshHandle::report_head),
            per_target: settings.api.metrics_per_target,
            registries: mesh.map(MeshHandle::registries).unwrap_or_default(),
            ignored_replies: mesh.map(MeshHandle::ignored_replies).unwrap_or_default(),
            hello_requests: responders
                .map(|requests| requests.counts())
                .fold(HelloRequestCounts::default(), Add::add),
            malformed_answers: mesh.map_or(0, MeshHandle::malformed_headers),
            healthy: self.liveness().state != Level::Failure,
            configured_interval: settings.mesh.probe_interval,
            probe_rate: settings.mesh.probe_rate,
            repairs: self.repairs(),
            collections: self
                .collections
                .get()
                .map(SharedCounts::counts)
                .unwrap_or_default(),
            endpoints: self.manager.get().map(Manager::counts),
            policy_lag: self.enforcer.get().and_then(Enforcer::lag),
            events: self
                .events
                .get()
                .map(|hub| hub.counts())
                .unwrap_or_default(),
            containers: self.containers.get().map(Sample::from),
            uptime: self.started.elapsed(),
        }
    }

    fn each_node(&self, each: &mut dyn FnMut(&NodeStatus)) {
        if let Some(mesh) = self.mesh.get() {
            mesh.each_node(each);
        }
    }
}

fn identity_entries(identities: &Identities) -> Vec<IdentityEntry> {
    identities
        .labels
        .iter()
        .map(|(identity, labels)| IdentityEntry {
            id: identity.0,
            labels: labels.iter().map(ToString::to_string).collect(),
            references: identity.is_of_cluster().then(|| {
                identities
                    .references
                    .get(identity)
                    .cloned()
                    .unwrap_or_default()
            }),
        })
        .collect()
}
