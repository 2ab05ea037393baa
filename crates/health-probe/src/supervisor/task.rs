//! The supervisor's task: receives what the source, runtime, endpoints and probes report, and acts on it.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{Problem, Reporter};
use health_model::api::PodProblem;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::containers::KnownContainers;
use super::ends::Ends;
use super::events::Level;
use super::moment::Moment;
use super::pods::TrackedPod;
use super::restarts::Actions;
use super::view::Overdue;
use super::{Endpoints, PodEvents, Restarts, Shared, saved};
use crate::prober::{News, NewsReceiver};
use crate::runtime::{Observation, Runtime, RuntimeError};
use crate::source::{PodSet, SourcedPod};
use crate::spec::PodSpec;
use crate::worker::Event;
use crate::worker::restart::Backoffs;

/// How often the runtime is queried; same as the kubelet.
pub(super) const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Delay before a change is saved, together with all further changes until then.
const SAVE_DELAY: Duration = Duration::from_millis(500);
/// How often counts that have not led to a result are saved.
const SAVE_PERIOD: Duration = Duration::from_secs(10);

/// The parts that a task is built from.
pub(super) struct TaskParts {
    pub(super) pods: watch::Receiver<Arc<PodSet>>,
    pub(super) runtime: Option<Runtime>,
    pub(super) restarts: Restarts,
    pub(super) endpoints: Arc<dyn Endpoints>,
    pub(super) pod_events: Arc<dyn PodEvents>,
    pub(super) node_addresses: Vec<IpAddr>,
    pub(super) containers: Arc<KnownContainers>,
    pub(super) state_file: PathBuf,
    pub(super) were_ready: BTreeSet<String>,
    pub(super) backoffs: Backoffs,
    pub(super) reporter: Reporter,
}

pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) parts: TaskParts,
    pub(super) began: Instant,
    pub(super) observation: Arc<Observation>,
    /// Whether the runtime has responded yet.
    pub(super) is_observed: bool,
    runtime_problem: Option<String>,
    /// How many probes were overdue at the last look.
    overdue: u64,
    save_problem: Option<String>,
    observing: Option<JoinHandle<Result<Observation, RuntimeError>>>,
    pub(super) next_look: Instant,
    /// When the runtime was last queried, since `began`.
    asked: Duration,
    pub(super) ends: Ends,
    next_save: Instant,
    /// Whether the source has listed all its initial pods.
    is_complete: bool,
    pub(super) actions: Actions,
}

impl Task {
    pub(super) fn new(shared: Arc<Shared>, parts: TaskParts) -> Self {
        let now = Instant::now();
        Self {
            shared,
            parts,
            began: now,
            observation: Arc::default(),
            is_observed: false,
            runtime_problem: None,
            overdue: 0,
            save_problem: None,
            observing: None,
            next_look: now,
            asked: Duration::ZERO,
            ends: Ends::default(),
            next_save: now + SAVE_PERIOD,
            is_complete: false,
            actions: Actions::default(),
        }
    }

    pub(super) async fn run(mut self, mut news: NewsReceiver) {
        let mut stopped = self.shared.stop.subscribe();
        let mut endpoints = self.parts.endpoints.changes();
        self.follow_pods();
        loop {
            if let Some(runtime) = self.parts.runtime.clone() {
                self.actions.begin(&runtime, Instant::now());
            }
            let timer = self.next_timer();
            tokio::select! {
                _ = stopped.wait_for(|stop| *stop) => break,
                reported = news.recv() => {
                    let Some(reported) = reported else { break };
                    self.take(reported);
                    while let Some(reported) = news.try_recv() {
                        self.take(reported);
                    }
                    self.shared.note_change();
                }
                Ok(()) = self.parts.pods.changed() => self.follow_pods(),
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

    /// Queries the runtime. Without a runtime, only reports that the task is alive.
    fn look(&mut self) {
        let Some(runtime) = self.parts.runtime.clone() else {
            self.report(None);
            return;
        };
        self.asked = self.began.elapsed();
        let known = self.observation.clone();
        self.observing = Some(tokio::spawn(async move { runtime.observe(&known).await }));
    }

    /// Reports the supervisor's health: runtime problems and overdue probes.
    fn report(&mut self, runtime: Option<String>) {
        let overdue = Overdue::of(&self.shared.prober);
        let count = overdue.as_ref().map_or(0, |overdue| overdue.count);
        if self.overdue != count {
            self.overdue = count;
            self.shared.note_change();
        }
        let overdue = overdue.map(|overdue| overdue.to_string());
        let problems: Vec<String> = runtime.into_iter().chain(overdue).collect();
        let problem = (!problems.is_empty()).then(|| Problem::warning(problems.join("; ")));
        self.parts.reporter.end(problem, Some(LOOK_PERIOD));
    }

    fn observed(&mut self, observed: Result<Observation, String>) {
        let problem = match &observed {
            Ok(observation) => combined_problem(&observation.problems),
            Err(problem) => Some(problem.clone()),
        };
        if self.runtime_problem != problem {
            if let Some(problem) = &problem {
                warn!(
                    problem,
                    "cannot query the container runtime; keeping the last known containers"
                );
            }
            self.runtime_problem = problem.clone();
            self.note_problems();
        }
        self.report(problem);
        let Ok(observation) = observed else {
            return;
        };
        let (now, wall) = (self.began.elapsed(), Timestamp::now());
        self.ends.note(&observation, self.asked, now, wall);
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
        // Includes containers that failed before they were known to be running.
        for kill in self.shared.prober.kills() {
            self.kill(&kill);
        }
        self.find_ended();
    }

    /// Takes over the source's pods.
    fn follow_pods(&mut self) {
        let set = self.parts.pods.borrow_and_update().clone();
        let mut pods: HashMap<Arc<str>, SourcedPod> = HashMap::new();
        for pod in &set.pods {
            pods.entry(pod.spec.uid.clone())
                .or_insert_with(|| pod.clone());
        }
        self.is_complete |= set.is_complete;
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
                        let mut tracked = TrackedPod::new(pod, was_ready);
                        tracked.restarts = self.parts.backoffs.restarts(&uid);
                        state.pods.insert(tracked);
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
            let now = self.began.elapsed();
            let is_there = |uid: &str| uids.contains(uid);
            self.parts.backoffs.forget_gone(now, is_there);
        }
        self.note_problems();
        self.save_soon();
        self.find_ended();
        self.shared.note_change();
    }

    fn remove(&mut self, uid: &str) {
        self.shared.prober.remove_pod(uid);
        self.actions.forget_pod(uid);
        let removed = self.shared.state().pods.remove(uid);
        if let Some(endpoint) = removed.and_then(|pod| pod.endpoint) {
            self.parts.endpoints.set_ready(endpoint, None);
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Result(update, kill) => {
                self.save_soon();
                self.note_result(&update);
                if let Some(kill) = kill {
                    self.kill(&kill);
                }
            }
            News::Status(uid, status) => {
                if let Some(pod) = self.shared.state().pods.get_mut(&uid) {
                    pod.status = Some(status);
                }
                self.save_soon();
                self.notify_endpoint(&uid);
            }
            News::Event {
                pod,
                container,
                kind,
                event,
            } => {
                self.note_failing(&pod, &container, kind, &event);
                let Event { reason, message } = event;
                self.note_event(&pod, &container, Level::Warning, reason, message);
            }
        }
    }

    pub(super) fn note_event(
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

    pub(super) fn spec(&self, uid: &str) -> Option<Arc<PodSpec>> {
        Some(self.shared.state().pods.get(uid)?.spec.clone())
    }

    fn note_problems(&self) {
        let mut problems = self.parts.pods.borrow().problems.clone();
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

    pub(super) fn save_soon(&mut self) {
        self.next_save = self.next_save.min(Instant::now() + SAVE_DELAY);
    }

    /// Saves the state for the next agent.
    fn save(&mut self) {
        self.next_save = Instant::now() + SAVE_PERIOD;
        let now = Moment::now();
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
        let written = saved::write(&self.parts.state_file, now, snapshot, ready);
        let problem = written
            .err()
            .map(|error| format!("cannot be written: {error}"));
        if self.save_problem != problem {
            if let Some(problem) = &problem {
                warn!(file = %self.parts.state_file.display(), problem, "probe states would not survive an agent restart");
            }
            self.save_problem = problem;
            self.note_problems();
        }
    }
}

/// The first problem, and the number of further ones.
fn combined_problem(problems: &[RuntimeError]) -> Option<String> {
    let (first, others) = problems.split_first()?;
    Some(match others.len() {
        0 => first.to_string(),
        others => format!("{first}; and {others} more"),
    })
}

/// Waits for the runtime's response; forever while no query is under way.
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
