//! The task of the supervisor: takes in what sources, runtime, endpoints and probes say, and does what follows.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{Problem, Reporter};
use health_model::api::PodProblem;
use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::containers::{Known, KnownContainers};
use super::events::Level;
use super::pods::TrackedPod;
use super::restarts::{Acted, Actions, Restart};
use super::{Endpoints, LocalEndpoint, Shared, saved};
use crate::prober::News;
use crate::runtime::{Observation, Runtime, RuntimeContainer, RuntimeError, RuntimePod};
use crate::source::{PodSet, SourcedPod};
use crate::spec::{PodSpec, Role};
use crate::worker::restart::{Backoffs, Kill, restarts};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// How often the runtime is asked, as the kubelet does.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// What changed is written down after so long, with all that changed meanwhile.
const SAVE_DELAY: Duration = Duration::from_millis(500);
/// Counts that no result came of are written down this often.
const SAVE_PERIOD: Duration = Duration::from_secs(10);

/// What the task works with.
pub(super) struct Parts {
    pub(super) sources: Vec<watch::Receiver<Arc<PodSet>>>,
    pub(super) runtime: Option<Runtime>,
    pub(super) restarts: bool,
    pub(super) endpoints: Arc<dyn Endpoints>,
    pub(super) node_addresses: Vec<IpAddr>,
    pub(super) containers: Arc<KnownContainers>,
    pub(super) state_file: PathBuf,
    pub(super) were_ready: BTreeSet<String>,
    pub(super) backoffs: Backoffs,
    pub(super) reporter: Reporter,
}

pub(super) struct Task {
    shared: Arc<Shared>,
    parts: Parts,
    began: Instant,
    observation: Arc<Observation>,
    /// Whether the runtime has answered yet.
    is_observed: bool,
    runtime_problem: Option<String>,
    save_problem: Option<String>,
    observing: Option<JoinHandle<Result<Observation, RuntimeError>>>,
    next_look: Instant,
    next_save: Instant,
    /// Whether sources have told all that they had at first.
    is_complete: bool,
    actions: Actions,
}

impl Task {
    pub(super) fn new(shared: Arc<Shared>, parts: Parts) -> Self {
        let now = Instant::now();
        Self {
            shared,
            parts,
            began: now,
            observation: Arc::default(),
            is_observed: false,
            runtime_problem: None,
            save_problem: None,
            observing: None,
            next_look: now,
            next_save: now + SAVE_PERIOD,
            is_complete: false,
            actions: Actions::default(),
        }
    }

    pub(super) async fn run(mut self, mut news: mpsc::UnboundedReceiver<News>) {
        let mut stopped = self.shared.stop.subscribe();
        let mut endpoints = self.parts.endpoints.changes();
        self.follow_sources();
        loop {
            if let Some(runtime) = self.parts.runtime.clone() {
                self.actions.begin(&runtime, Instant::now());
            }
            let timer = self.next_timer();
            tokio::select! {
                _ = stopped.wait_for(|stop| *stop) => break,
                told = news.recv() => {
                    let Some(told) = told else { break };
                    self.take(told);
                    while let Ok(told) = news.try_recv() {
                        self.take(told);
                    }
                    self.shared.note_change();
                }
                () = changed(&mut self.parts.sources) => self.follow_sources(),
                Ok(()) = endpoints.changed() => self.refresh_all(),
                observed = observed(&mut self.observing) => self.observed(observed),
                acted = self.actions.acted() => self.acted(acted),
                () = sleep_until(timer) => self.on_time(),
            }
        }
        self.save();
    }

    fn next_timer(&self) -> Instant {
        let look = self.observing.is_none().then_some(self.next_look);
        let times = [look, Some(self.next_save), self.actions.next()];
        times.into_iter().flatten().min().unwrap_or(self.next_save)
    }

    fn on_time(&mut self) {
        let now = Instant::now();
        if now >= self.next_look && self.observing.is_none() {
            self.next_look = now + LOOK_PERIOD;
            self.look();
        }
        if now >= self.next_save {
            self.save();
        }
    }

    /// Asks the runtime; without one, that the task lives is all there is to report.
    fn look(&mut self) {
        let Some(runtime) = self.parts.runtime.clone() else {
            self.parts.reporter.end(None, Some(LOOK_PERIOD));
            return;
        };
        let known = self.observation.clone();
        self.observing = Some(tokio::spawn(async move { runtime.observe(&known).await }));
    }

    fn observed(&mut self, observed: Result<Observation, String>) {
        let problem = observed.as_ref().err().cloned();
        if self.runtime_problem != problem {
            if let Some(problem) = &problem {
                warn!(
                    problem,
                    "the container runtime cannot be asked; what is known of containers stays"
                );
            }
            self.runtime_problem = problem.clone();
            self.note_problems();
        }
        let report = problem.map(Problem::warning);
        self.parts.reporter.end(report, Some(LOOK_PERIOD));
        let Ok(observation) = observed else {
            return;
        };
        if !self.is_observed || *self.observation != observation {
            self.is_observed = true;
            self.observation = Arc::new(observation);
            self.refresh_all();
            let there: BTreeSet<&str> = self
                .observation
                .pods
                .iter()
                .flat_map(|pod| &pod.containers)
                .map(|container| &*container.id)
                .collect();
            self.actions.retain(|id| there.contains(id));
        }
        // Those too that failed before the container was known to run.
        for kill in self.shared.prober.kills() {
            self.kill(&kill);
        }
        self.find_ended();
    }

    /// Takes over what the sources have.
    fn follow_sources(&mut self) {
        let mut pods: HashMap<Arc<str>, SourcedPod> = HashMap::new();
        let mut is_complete = true;
        for source in &mut self.parts.sources {
            let set = source.borrow_and_update();
            is_complete &= set.is_complete;
            for pod in &set.pods {
                pods.entry(pod.spec.uid.clone())
                    .or_insert_with(|| pod.clone());
            }
        }
        self.is_complete |= is_complete;
        let known = self.shared.state().pods.uids();
        for uid in known.iter().filter(|uid| !pods.contains_key(*uid)) {
            self.remove(uid);
        }
        for (uid, pod) in pods {
            let is_same = {
                let mut state = self.shared.state();
                match state.pods.get_mut(&uid) {
                    Some(tracked) => {
                        let is_same = tracked.sourced == pod;
                        tracked.sourced = pod;
                        is_same
                    }
                    None => {
                        let was_ready = self.parts.were_ready.contains(&*uid);
                        state.pods.insert(TrackedPod::new(pod, was_ready));
                        false
                    }
                }
            };
            if !is_same {
                self.refresh(&uid, true);
            }
        }
        if self.is_complete {
            let state = self.shared.state();
            let uids: BTreeSet<Arc<str>> = state.pods.uids().into_iter().collect();
            drop(state);
            self.shared.prober.cleanup_pods(|uid| uids.contains(uid));
            self.parts.containers.retain(|uid| uids.contains(uid));
        }
        self.note_problems();
        self.save_soon();
        self.find_ended();
        self.shared.note_change();
    }

    fn remove(&mut self, uid: &str) {
        self.shared.prober.remove_pod(uid);
        self.parts.backoffs.remove_pod(uid);
        let removed = self.shared.state().pods.remove(uid);
        if let Some(endpoint) = removed.and_then(|pod| pod.endpoint) {
            self.parts.endpoints.set_ready(endpoint, None);
        }
    }

    fn refresh_all(&mut self) {
        let uids = self.shared.state().pods.uids();
        for uid in uids {
            self.refresh(&uid, false);
        }
        self.shared.note_change();
    }

    /// Brings what is probed of a pod, and what is told of its containers, in line with what is known.
    fn refresh(&mut self, uid: &Arc<str>, is_changed: bool) {
        let Some((sourced, spec, told, was_ready)) = self.shared.state().pods.get(uid).map(|pod| {
            let was_ready = pod.ready().unwrap_or(pod.was_ready);
            (
                pod.sourced.clone(),
                pod.spec.clone(),
                pod.told.clone(),
                was_ready,
            )
        }) else {
            return;
        };
        let observation = self.observation.clone();
        let running = observed_pod(&observation, &sourced.spec);
        let endpoint = self.endpoint(&sourced.spec, running);
        let ips = self.addresses(&sourced.spec, running, endpoint.as_ref());
        let wanted = match ips == sourced.spec.ips {
            true => sourced.spec.clone(),
            false => Arc::new(PodSpec {
                ips,
                ..PodSpec::clone(&sourced.spec)
            }),
        };
        let mut known = running.map(Known::of).unwrap_or_default();
        known.netns = endpoint.as_ref().map(|endpoint| endpoint.netns.clone());
        self.parts.containers.set(uid, known);
        if is_changed || *wanted != *spec {
            self.shared.prober.add_pod(wanted.clone());
        }
        let mut status = self.status(&sourced, running, endpoint.as_ref());
        if let Some(status) = &mut status {
            status.ready = was_ready;
        }
        let is_like = |told: &PodStatus, now: &PodStatus| {
            PodStatus {
                ready: now.ready,
                ..told.clone()
            } == *now
        };
        let is_news = match (&told, &status) {
            (Some(told), Some(status)) => !is_like(told, status),
            (None, Some(_)) => true,
            // Nothing is known any more: what was known stays.
            (_, None) => false,
        };
        let former = {
            let mut state = self.shared.state();
            let Some(pod) = state.pods.get_mut(uid) else {
                return;
            };
            pod.spec = wanted;
            if is_news {
                pod.told.clone_from(&status);
            }
            std::mem::replace(&mut pod.endpoint, endpoint.as_ref().map(|one| one.id))
        };
        if let Some(status) = status.filter(|_| is_news) {
            self.shared.prober.set_status(uid, status);
        }
        let now = endpoint.map(|endpoint| endpoint.id);
        if let Some(former) = former.filter(|former| now != Some(*former)) {
            self.parts.endpoints.set_ready(former, None);
        }
        self.tell_endpoint(uid);
    }

    /// Tells a pod's endpoint whether it can serve.
    fn tell_endpoint(&self, uid: &str) {
        let told = {
            let state = self.shared.state();
            let pod = state.pods.get(uid);
            pod.and_then(|pod| Some((pod.endpoint?, pod.ready().unwrap_or(pod.was_ready))))
        };
        if let Some((endpoint, ready)) = told {
            self.parts.endpoints.set_ready(endpoint, Some(ready));
        }
    }

    fn endpoint(&self, spec: &PodSpec, running: Option<&RuntimePod>) -> Option<LocalEndpoint> {
        let with_addresses = running.filter(|_| spec.ips.is_empty());
        match with_addresses {
            Some(running) => self.parts.endpoints.find(&PodSpec {
                ips: running.ips.clone(),
                ..spec.clone()
            }),
            None => self.parts.endpoints.find(spec),
        }
    }

    /// What the runtime says comes first: a manifest may be older than the pod.
    fn addresses(
        &self,
        spec: &PodSpec,
        running: Option<&RuntimePod>,
        endpoint: Option<&LocalEndpoint>,
    ) -> Vec<IpAddr> {
        match (running, endpoint) {
            (Some(running), _) if !running.ips.is_empty() => running.ips.clone(),
            _ if !spec.ips.is_empty() => spec.ips.clone(),
            (_, Some(endpoint)) => endpoint.ips.clone(),
            // It has none of its own: it uses the host's network.
            (Some(_), None) => self.parts.node_addresses.clone(),
            (None, None) => Vec::new(),
        }
    }

    /// How the containers do; `None` if nobody says it.
    fn status(
        &self,
        sourced: &SourcedPod,
        running: Option<&RuntimePod>,
        endpoint: Option<&LocalEndpoint>,
    ) -> Option<PodStatus> {
        if self.parts.runtime.is_some() {
            return match running {
                Some(running) => Some(running.status(&sourced.spec)),
                None => self.is_observed.then(PodStatus::default),
            };
        }
        if let Some(status) = &sourced.status {
            return Some(status.clone());
        }
        // All that is known is that there is an endpoint: then its containers run.
        let endpoint = endpoint?;
        let containers = sourced.spec.containers.iter();
        let regular = containers.filter(|container| container.role == Role::Regular);
        Some(PodStatus {
            phase: Phase::Running,
            containers: regular
                .map(|container| ContainerStatus {
                    name: container.name.clone(),
                    id: Some(Arc::from(format!("endpoint:{}", endpoint.id))),
                    state: ContainerState::Running { started_at: None },
                    ready: false,
                    started: None,
                })
                .collect(),
            ..PodStatus::default()
        })
    }

    fn take(&mut self, news: News) {
        match news {
            News::Result(_, kill) => {
                self.save_soon();
                if let Some(kill) = kill {
                    self.kill(&kill);
                }
            }
            News::Status(uid, status) => {
                if let Some(pod) = self.shared.state().pods.get_mut(&uid) {
                    pod.status = Some(status);
                }
                self.save_soon();
                self.tell_endpoint(&uid);
            }
            News::Event {
                pod,
                container,
                event,
                ..
            } => self.note_event(
                &pod,
                &container,
                Level::Warning,
                event.reason,
                event.message,
            ),
        }
    }

    fn kill(&mut self, kill: &Kill) {
        if !self.actions.kill(kill, Instant::now()) {
            return;
        }
        let Some(pod) = self.spec(&kill.pod_uid) else {
            return;
        };
        let container = &kill.container;
        let obstacle = match (&self.parts.runtime, self.parts.restarts) {
            (Some(_), true) => None,
            (Some(_), false) => Some("this agent does not restart containers"),
            (None, _) => Some("this agent knows no container runtime"),
        };
        match obstacle {
            None => self.note_event(&pod, container, Level::Normal, "Killing", kill.message()),
            Some(why) => {
                let message = format!("{}: {why}", kill.message());
                self.note_event(
                    &pod,
                    container,
                    Level::Warning,
                    "FailedKillContainer",
                    message,
                );
            }
        }
    }

    /// Has containers started again that have ended.
    fn find_ended(&mut self) {
        if self.parts.runtime.is_none() || !self.parts.restarts || !self.is_observed {
            return;
        }
        let observation = self.observation.clone();
        let uids = self.shared.state().pods.uids();
        for uid in uids {
            let Some(spec) = self.spec(&uid) else {
                continue;
            };
            let Some(running) = observed_pod(&observation, &spec).filter(|pod| pod.is_ready) else {
                continue;
            };
            for container in &running.containers {
                self.consider(&spec, container);
            }
        }
    }

    /// Has a container started again if it has ended and is to run.
    fn consider(&mut self, pod: &Arc<PodSpec>, ended: &RuntimeContainer) {
        let ContainerState::Terminated { exit_code } = ended.state else {
            return;
        };
        let Some(spec) = pod.container(&ended.name) else {
            return;
        };
        let is_wanted = match self.actions.killed(&ended.id) {
            Some(kill) => kill.restart,
            None => spec.role != Role::Init && restarts(pod, spec.role, exit_code),
        };
        if !is_wanted {
            return;
        }
        let now = self.began.elapsed();
        let ago = ended
            .finished_at
            .and_then(|at| Duration::try_from(Timestamp::now().duration_since(at)).ok());
        let at = now.saturating_sub(ago.unwrap_or_default());
        let ready = self.parts.backoffs.ready(&pod.uid, &ended.name, at);
        let restart = Restart {
            pod_uid: pod.uid.clone(),
            container: spec.name.clone(),
            container_id: Arc::from(&*ended.id),
            ended: at,
        };
        let is_news = self.actions.restart(restart, self.began + ready);
        if !is_news || ready <= now {
            return;
        }
        let wait = ready - now;
        if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
            let at = Timestamp::now().checked_add(wait);
            tracked
                .restart_at
                .insert(spec.name.clone(), at.unwrap_or(Timestamp::MAX));
        }
        let message = format!(
            "Back-off {} restarting failed container {}",
            health_model::duration::duration_text(Duration::from_secs(
                wait.as_secs_f64().ceil() as u64
            )),
            spec.name
        );
        self.note_event(pod, &spec.name, Level::Warning, "BackOff", message);
        self.shared.note_change();
    }

    fn acted(&mut self, acted: Acted) {
        // What came of it is to be seen at once.
        self.next_look = Instant::now();
        match acted {
            Acted::Killed(_, Ok(())) => {}
            Acted::Killed(kill, Err(error)) => {
                if let Some(pod) = self.spec(&kill.pod_uid) {
                    let message = format!("cannot end container {}: {error}", kill.container);
                    let reason = "FailedKillContainer";
                    self.note_event(&pod, &kill.container, Level::Warning, reason, message);
                }
            }
            Acted::Restarted(restart, result) => {
                let Some(pod) = self.spec(&restart.pod_uid) else {
                    return;
                };
                let name = &restart.container;
                if let Err(error) = result {
                    let message = format!("cannot start container {name} again: {error}");
                    self.note_event(&pod, name, Level::Warning, "FailedRestart", message);
                    return;
                }
                let now = self.began.elapsed();
                self.parts
                    .backoffs
                    .restarted(&pod.uid, name, restart.ended, now);
                if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
                    *tracked.restarts.entry(name.clone()).or_default() += 1;
                    tracked.restart_at.remove(name);
                }
                let message = format!("Started container {name}");
                self.note_event(&pod, name, Level::Normal, "Started", message);
                self.save_soon();
            }
        }
        self.shared.note_change();
    }

    fn note_event(
        &self,
        pod: &PodSpec,
        container: &Arc<str>,
        level: Level,
        reason: &'static str,
        message: String,
    ) {
        let mut state = self.shared.state();
        state.events.note(pod, container, level, reason, message);
    }

    fn spec(&self, uid: &str) -> Option<Arc<PodSpec>> {
        Some(self.shared.state().pods.get(uid)?.spec.clone())
    }

    fn note_problems(&self) {
        let mut problems: Vec<PodProblem> = Vec::new();
        for source in &self.parts.sources {
            problems.extend(source.borrow().problems.iter().cloned());
        }
        let socket = self.parts.runtime.as_ref().map(Runtime::socket);
        let of_runtime = self.runtime_problem.iter().map(|problem| PodProblem {
            subject: socket
                .unwrap_or(std::path::Path::new(""))
                .display()
                .to_string(),
            problem: problem.clone(),
        });
        let of_file = self.save_problem.iter().map(|problem| PodProblem {
            subject: self.parts.state_file.display().to_string(),
            problem: problem.clone(),
        });
        problems.extend(of_runtime.chain(of_file));
        self.shared.state().problems = problems;
        self.shared.note_change();
    }

    fn save_soon(&mut self) {
        self.next_save = self.next_save.min(Instant::now() + SAVE_DELAY);
    }

    /// Writes down what the next agent is to know.
    fn save(&mut self) {
        self.next_save = Instant::now() + SAVE_PERIOD;
        let mut snapshot = self.shared.prober.snapshot();
        snapshot.backoffs = self.parts.backoffs.save(self.began.elapsed());
        let ready = {
            let state = self.shared.state();
            let mut ready: BTreeSet<String> = state
                .pods
                .iter()
                .filter(|pod| pod.ready().unwrap_or(pod.was_ready))
                .map(|pod| pod.spec.uid.to_string())
                .collect();
            if !self.is_complete {
                ready.extend(self.parts.were_ready.iter().cloned());
            }
            ready
        };
        let written = saved::write(&self.parts.state_file, snapshot, ready);
        let problem = written
            .err()
            .map(|error| format!("cannot be written: {error}"));
        if self.save_problem != problem {
            if let Some(problem) = &problem {
                warn!(file = %self.parts.state_file.display(), problem, "what is known of probes would not survive a restart of the agent");
            }
            self.save_problem = problem;
            self.note_problems();
        }
    }
}

/// Waits until a source changes. A source that has ended says nothing more.
async fn changed(sources: &mut [watch::Receiver<Arc<PodSet>>]) {
    let mut waiting: Vec<_> = sources
        .iter_mut()
        .map(|source| {
            Box::pin(async move {
                if source.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        })
        .collect();
    std::future::poll_fn(|context| {
        let is_ready = waiting
            .iter_mut()
            .any(|one| one.as_mut().poll(context).is_ready());
        match is_ready {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

/// Waits for the runtime's answer; forever while it is not asked.
async fn observed(
    observing: &mut Option<JoinHandle<Result<Observation, RuntimeError>>>,
) -> Result<Observation, String> {
    let Some(running) = observing else {
        return std::future::pending().await;
    };
    let answer = running.await;
    *observing = None;
    match answer {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(broken_off) => Err(broken_off.to_string()),
    }
}

/// The pod as the runtime has it: by UID, or by name where the manifest has no UID of its own.
fn observed_pod<'a>(observation: &'a Observation, spec: &PodSpec) -> Option<&'a RuntimePod> {
    let mut pods = observation.pods.iter();
    let by_uid = pods.clone().find(|pod| *pod.uid == *spec.uid);
    by_uid.or_else(|| {
        pods.find(|pod| {
            *spec.uid == format!("{}/{}", spec.namespace, spec.name)
                && pod.namespace == spec.namespace
                && pod.name == spec.name
        })
    })
}
