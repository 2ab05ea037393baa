//! The agent's state as the API and the metrics read it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use health_common::rtt::{RttKey, RttRow};
use health_datapath::dump::{DumpError, Pinned};
use health_datapath::events::{SubscribeError, Subscription};
use health_datapath::features;
use health_endpoint::enforcement::Enforcer;
use health_endpoint::manager::Manager;
use health_mesh::MeshHandle;
use health_mesh::proof::HelloKeys;
use health_metrics::Figures;
use health_model::activity::{self, Controller, Problem, Reporter};
use health_model::api::{
    AgentProblem, AgentReport, AgentState, ControllerStatus, Endpoint, HealthStatus, IdentityEntry,
    NodeList, NodeStatus, PathMtuEntry, ProbeEvent, ProgramStatus, SelfStatus, TargetHistory,
};
use health_model::duration::{duration_text, go_duration};
use health_model::events::EventFilter;
use health_model::settings::ServiceXdp;
use health_probe::supervisor::Supervisor;
use health_server::liveness::{self, Grace, Level, Liveness, Observation};
use health_server::services::ServiceCatalog;
use health_server::source::Source;
use health_settings::Settings;
use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tracing::warn;

use super::check_schedule::PERIOD;
use super::outcome::Outcome;
use super::settings_in_force::SettingsInForce;
use super::started_parts::StartedParts;

/// The agent as the API shows it: first a starting agent, then a started one.
pub(super) struct AgentSource {
    pub(super) settings: SettingsInForce,
    /// Whether the mesh key in force is public.
    public_mesh_key: bool,
    begun: Instant,
    /// What the start waits for.
    waiting: watch::Sender<Option<String>>,
    /// Empty while the agent starts.
    started: OnceLock<StartedParts>,
    /// Current problems.
    problems: watch::Sender<Vec<AgentProblem>>,
    /// Number of repairs since the start, by cause.
    repairs: RwLock<BTreeMap<String, u64>>,
    /// Why an optional program that would make serving faster is not attached.
    slower: RwLock<Option<String>>,
    repair_reporter: Reporter,
    /// The parts that talk to something outside, or repair something, except those of the started agent.
    controllers: RwLock<Vec<Controller>>,
    maps: Grace,
}

impl AgentSource {
    pub(super) fn new(config: Settings, keys: &HelloKeys) -> Self {
        Self {
            settings: SettingsInForce::new(config),
            public_mesh_key: keys.accepts_public(),
            begun: Instant::now(),
            waiting: watch::Sender::default(),
            started: OnceLock::new(),
            problems: watch::Sender::new(Vec::new()),
            repairs: RwLock::default(),
            slower: RwLock::default(),
            repair_reporter: activity::channel().0,
            controllers: RwLock::default(),
            maps: Grace::default(),
        }
    }

    /// Sets what the start waits for, in words.
    pub(super) fn set_waiting(&self, waiting: Option<String>) {
        self.waiting.send_replace(waiting);
    }

    /// Waits until the start is waiting for something.
    pub(super) async fn until_waiting(&self) {
        // The channel closes only with this source.
        let _ = self.waiting.subscribe().wait_for(Option::is_some).await;
    }

    /// Lists more controllers in reports.
    pub(super) fn list_controllers(&self, more: impl IntoIterator<Item = Controller>) {
        let listed = self.controllers.write();
        listed.unwrap_or_else(PoisonError::into_inner).extend(more);
    }

    /// All controllers, sorted by name.
    fn controllers(&self) -> Vec<ControllerStatus> {
        let now = Timestamp::now();
        let listed = self.controllers.read();
        let listed = listed.unwrap_or_else(PoisonError::into_inner);
        let repair = Controller::new("datapath", self.repair_reporter.activity());
        let started = self.started.get();
        let reporting = started.into_iter().flat_map(StartedParts::controllers);
        let all = listed.iter().cloned().chain([repair]).chain(reporting);
        let mut all: Vec<_> = all.map(|controller| controller.status(now)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The pinned programs, sorted by name.
    fn programs(&self) -> Result<Vec<ProgramStatus>, DumpError> {
        let pinned = Pinned::open(&self.settings.at_start().location)?;
        let mut programs: Vec<_> = pinned
            .programs()?
            .into_iter()
            .map(|program| ProgramStatus {
                name: program.name,
                attached: program.attached,
            })
            .collect();
        programs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(programs)
    }

    /// Publishes the parts of the started agent.
    pub(super) fn publish(&self, parts: StartedParts) {
        // An agent starts only once.
        let _ = self.started.set(parts);
    }

    fn mesh(&self) -> Option<&MeshHandle> {
        self.started.get().map(|started| &started.mesh)
    }

    /// The health of the agent itself, check by check.
    pub(super) fn liveness(&self) -> Liveness {
        let now = Timestamp::now();
        Liveness::judge(self.observations(now), now)
    }

    /// Whether a part of the agent hangs, check by check.
    pub(super) fn hangs(&self) -> Liveness {
        let now = Timestamp::now();
        let observations = self.observations(now).into_iter();
        Liveness::judge(observations.map(Observation::of_hang).collect(), now)
    }

    /// Why the agent is not ready, if it is not: it is starting, refuses endpoints, or a check fails.
    pub(super) fn unready(&self) -> Option<String> {
        Source::starting(self).or_else(|| self.failing())
    }

    /// Why an agent that has started does not do all its work, if so: it refuses endpoints, or a check fails. Peers do not
    /// count.
    pub(super) fn failing(&self) -> Option<String> {
        let unknown = self.enforcer().and_then(Enforcer::unknown_policies);
        unknown.or_else(|| {
            let liveness = self.liveness();
            (liveness.state == Level::Failure).then_some(liveness.msg)
        })
    }

    /// What is known about each part at `now`.
    fn observations(&self, now: Timestamp) -> Vec<Observation> {
        let config = self.settings.at_start();
        let socket = liveness::socket_problem(&config.location.socket());
        let mut observations = vec![Observation::now("api-socket", socket)];
        let settings = self.settings.problem();
        let settings = settings.map(|what| Observation::now("settings", Some(what)).warning());
        let Some(started) = self.started.get() else {
            observations.push(Observation::now("start", self.starting()).warning());
            observations.extend(settings);
            return observations;
        };
        observations.extend([
            Observation::reported("prober", started.mesh.prober()),
            Observation::reported("datapath", self.repair_reporter.activity().last()),
            self.observed_maps(),
            started.responders.observation(),
        ]);
        observations.extend(started.observations());
        observations.extend(settings);
        if config.services.xdp() != ServiceXdp::Off {
            let slower = self.slower.read().unwrap_or_else(PoisonError::into_inner);
            observations.push(Observation::now("service-xdp", slower.clone()).warning());
        }
        observations.extend(started.observed_registries(now));
        observations
    }

    fn observed_maps(&self) -> Observation {
        let location = &self.settings.at_start().location;
        let read = Pinned::open(location).and_then(|pinned| pinned.metrics());
        let problem = read.err().map(|error| error.to_string());
        self.maps.observe("maps", problem, Instant::now())
    }

    /// The most recently published problems.
    pub(super) fn problems(&self) -> watch::Receiver<Vec<AgentProblem>> {
        self.problems.subscribe()
    }

    /// Publishes the problems periodically, until it is dropped.
    pub(super) async fn report_problems(self: Arc<Self>) {
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

    /// Marks the start of a check of the endpoint and the datapath.
    pub(super) fn begin_look(&self) {
        self.repair_reporter.begin();
    }

    /// Records faults of the health endpoint that are about to be repaired.
    pub(super) fn note_faults(&self, problem: &str) {
        let being_repaired = format!("{problem}; it is being repaired");
        self.repair_reporter
            .end(Some(Problem::warning(being_repaired)), Some(PERIOD));
    }

    /// Records the outcome of a check of the endpoint and the datapath, and all repairs since the start.
    pub(super) fn note_repairs(&self, repairs: &BTreeMap<String, u64>, outcome: &Outcome) {
        self.repairs
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(repairs);
        self.slower
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&outcome.slower);
        let problem = outcome.problem().map(Problem::failure);
        self.repair_reporter.end(problem, Some(PERIOD));
    }

    /// Number of repairs since the start, by cause.
    fn repairs(&self) -> BTreeMap<String, u64> {
        let repairs = self.repairs.read().unwrap_or_else(PoisonError::into_inner);
        let mut repairs = repairs.clone();
        for (cause, count) in self.manager().map(Manager::repairs).unwrap_or_default() {
            *repairs.entry(cause).or_default() += count;
        }
        repairs
    }
}

impl Source for AgentSource {
    fn status(&self) -> HealthStatus {
        let config = self.settings.at_start();
        self.mesh().map_or_else(
            || HealthStatus {
                probe_interval: go_duration(
                    config
                        .mesh
                        .probe_interval
                        .as_nanos()
                        .try_into()
                        .unwrap_or(i64::MAX),
                ),
                local: SelfStatus {
                    name: config.node.full_name(),
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
        match self.mesh() {
            Some(mesh) => mesh.write_report(out),
            None => Ok(serde_json::to_writer(out, &self.status())?),
        }
    }

    async fn probe(&self) -> HealthStatus {
        match self.mesh() {
            Some(mesh) => mesh.probe_now().await,
            None => self.status(),
        }
    }

    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent> {
        match self.mesh() {
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
        self.mesh().map_or_else(Vec::new, |mesh| mesh.history(node))
    }

    fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()> {
        let mut taken = Ok(());
        Pinned::open(&self.settings.at_start().location)
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
        self.mesh()
            .map_or_else(Vec::new, |mesh| mesh.path_mtus(node))
    }

    async fn probe_path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        match self.mesh() {
            Some(mesh) => mesh.probe_path_mtus(node).await,
            None => Vec::new(),
        }
    }

    fn nodes(&self) -> NodeList {
        self.mesh()
            .map_or_else(NodeList::default, MeshHandle::nodes)
    }

    fn monitor(&self, filter: EventFilter) -> Option<Result<Subscription, SubscribeError>> {
        let started = self.started.get()?;
        Some(started.events.subscribe(filter))
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        let mut all = self.manager().map(Manager::endpoints).unwrap_or_default();
        all.sort_unstable_by_key(|endpoint| endpoint.id);
        all
    }

    fn containers(&self) -> Option<&Supervisor> {
        self.started.get()?.containers.as_ref()
    }

    fn services(&self) -> Option<&ServiceCatalog> {
        self.started.get()?.services.as_ref()
    }

    fn enforcer(&self) -> Option<&Enforcer> {
        self.started.get().map(|started| &started.enforcer)
    }

    fn manager(&self) -> Option<&Manager> {
        self.started.get().map(|started| &started.manager)
    }

    fn identities(&self) -> Vec<IdentityEntry> {
        self.started
            .get()
            .map_or_else(Vec::new, StartedParts::identity_entries)
    }

    fn settings(&self) -> Settings {
        self.settings.now()
    }

    fn starting(&self) -> Option<String> {
        if self.started.get().is_some() {
            return None;
        }
        let waiting = self.waiting.borrow().clone();
        Some(waiting.unwrap_or_else(|| "the agent is starting".to_owned()))
    }

    fn agent(&self) -> AgentReport {
        let (programs, programs_error) = match self.programs() {
            Ok(programs) => (programs, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        AgentReport {
            state: self.state(),
            starting: self.starting(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime: duration_text(Duration::from_secs(self.uptime().as_secs())),
            kernel: features::release(),
            registries: self.mesh().map(MeshHandle::registries).unwrap_or_default(),
            programs,
            programs_error,
            controllers: self.controllers(),
        }
    }

    fn state(&self) -> AgentState {
        let Liveness { state, msg, .. } = self.liveness();
        AgentState {
            state: state.text().to_owned(),
            msg,
        }
    }

    fn uptime(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl health_metrics::Source for AgentSource {
    fn figures(&self) -> Figures {
        let settings = self.settings.now();
        let started = self.started.get();
        Figures {
            report: self
                .mesh()
                .map_or_else(|| self.status().head(), MeshHandle::report_head),
            per_target: settings.api.metrics_per_target,
            healthy: self.liveness().state != Level::Failure,
            configured_interval: settings.mesh.probe_interval,
            probe_rate: settings.mesh.probe_rate,
            repairs: self.repairs(),
            reloads: self.settings.reloads(),
            controllers: self.controllers(),
            uptime: self.begun.elapsed(),
            ..started.map(StartedParts::figures).unwrap_or_default()
        }
    }

    fn each_node(&self, each: &mut dyn FnMut(&NodeStatus)) {
        if let Some(mesh) = self.mesh() {
            mesh.each_node(each);
        }
    }
}
