//! The supervisor: probes the pods of its sources, and acts on the results.
//!
//! A source says which pods exist. The container runtime, or else the source, or else the pod's endpoint, says which
//! state their containers are in. The [`Prober`] probes them. Through the runtime, the supervisor stops containers that
//! fail their liveness or startup probe, and restarts containers that have exited, according to the pod's restart
//! policy and the kubelet's back-off. It passes readiness on to the pod's endpoint. A file preserves its state across
//! restarts of the agent.

mod acting;
mod containers;
mod ends;
mod events;
mod moment;
mod pod_events;
mod pods;
mod refresh;
mod restarts;
mod saved;
mod task;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use health_model::activity::{self, Activity};
use health_model::api::{
    ContainerEvent, ContainerProbe, ContainerProbeSummary, PodProblem, ProbedPod,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::containers::KnownContainers;
use self::events::EventLog;
use self::moment::Moment;
pub use self::pod_events::{NoPodEvents, PodEvent, PodEvents};
use self::pods::Pods;
use self::saved::SavedState;
use self::task::Task;
use crate::prober::{NewsReceiver, Prober, ProberOptions, Stats};
use crate::runtime::Runtime;
use crate::source::PodSet;
use crate::spec::PodSpec;
use crate::worker::{Limits, ManagerOptions};

/// The options of a supervisor.
pub struct SupervisorOptions {
    /// The pods.
    pub pods: watch::Receiver<Arc<PodSet>>,
    /// The container runtime, if any.
    pub runtime: Option<Runtime>,
    /// Which containers to stop and restart. For all other containers, the supervisor only reports that it should
    /// happen.
    pub restarts: Restarts,
    /// The endpoints of this node.
    pub endpoints: Arc<dyn Endpoints>,
    /// Takes the events of pods from Kubernetes.
    pub pod_events: Arc<dyn PodEvents>,
    /// The addresses of pods that use the host's network.
    pub node_addresses: Vec<IpAddr>,
    /// Limits on the number of probes.
    pub limits: Limits,
    /// The folder of the certificates and keys that annotations name.
    pub certificates: PathBuf,
    /// The file with the state that survives a restart of the agent.
    pub state_file: PathBuf,
}

/// Which containers to stop and restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restarts {
    /// No containers.
    None,
    /// Containers that no kubelet runs.
    Own,
    /// All containers.
    All,
}

/// The endpoints of a node.
pub trait Endpoints: Send + Sync {
    /// Finds a pod's endpoint: the one with one of the pod's addresses, or with the pod's name if the pod has no
    /// address.
    fn find(&self, pod: &PodSpec) -> Option<LocalEndpoint>;

    /// Sets whether the containers behind an endpoint can serve; `None` if they are not probed.
    fn set_ready(&self, id: u16, ready: Option<bool>);

    /// Changes whenever an endpoint changes.
    fn changes(&self) -> watch::Receiver<u64>;
}

/// A node without endpoints.
#[derive(Clone, Copy, Debug)]
pub struct NoEndpoints;

impl Endpoints for NoEndpoints {
    fn find(&self, _: &PodSpec) -> Option<LocalEndpoint> {
        None
    }

    fn set_ready(&self, _: u16, _: Option<bool>) {}

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// An endpoint of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalEndpoint {
    /// The endpoint's ID.
    pub id: u16,
    /// The endpoint's addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// The file of the endpoint's network namespace.
    pub netns: PathBuf,
}

/// Probes pods and acts on the results. Clones share state.
#[derive(Clone)]
pub struct Supervisor(Arc<Shared>);

/// State shared by the task and the readers.
struct Shared {
    prober: Prober,
    node_addresses: Vec<IpAddr>,
    beginning: view::Beginning,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    stop: watch::Sender<bool>,
    activity: Activity,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// The state that readers see.
#[derive(Default)]
struct State {
    pods: Pods,
    events: EventLog,
    /// The problems, sorted by subject.
    problems: Vec<PodProblem>,
}

impl Supervisor {
    /// Starts the supervisor. Must be called in a tokio runtime. Fails if the prober's thread cannot start.
    pub fn start(options: SupervisorOptions) -> io::Result<Self> {
        Self::start_with(options, Prober::start_on_thread)
    }

    /// Starts the supervisor with the prober that `start_prober` returns.
    fn start_with(
        options: SupervisorOptions,
        start_prober: impl FnOnce(ProberOptions) -> io::Result<(Prober, NewsReceiver)>,
    ) -> io::Result<Self> {
        let SupervisorOptions {
            pods,
            runtime,
            restarts,
            endpoints,
            pod_events,
            node_addresses,
            limits,
            certificates,
            state_file,
        } = options;
        let now = Moment::now();
        let saved = SavedState::read(&state_file, &now);
        let containers = Arc::new(KnownContainers::new(runtime.clone()));
        let (prober, news) = start_prober(ProberOptions {
            manager: ManagerOptions {
                limits,
                agent_start: now.wall,
                snapshot: saved.snapshot,
            },
            containers: containers.clone(),
            certificates,
        })?;
        let (reporter, activity) = activity::channel();
        let shared = Arc::new(Shared {
            prober,
            node_addresses: node_addresses.clone(),
            beginning: view::Beginning::default(),
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            stop: watch::Sender::new(false),
            activity,
            task: Mutex::default(),
        });
        let task = Task::new(
            shared.clone(),
            task::TaskParts {
                pods,
                runtime,
                restarts,
                endpoints,
                pod_events,
                node_addresses,
                containers,
                state_file,
                were_ready: saved.ready,
                backoffs: saved.backoffs,
                reporter,
            },
        );
        let running = tokio::spawn(task.run(news));
        *shared.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(Self(shared))
    }

    /// Returns all probes, sorted by pod, container and type.
    pub fn probes(&self) -> Vec<ContainerProbe> {
        view::probes(&self.0.prober, &self.0.beginning)
    }

    /// Returns all pods, sorted by name.
    pub fn pods(&self) -> Vec<ProbedPod> {
        self.0.state().pods.shown()
    }

    /// Whether the pod at each address can serve, as far as known. Leaves out the node's addresses, and addresses that
    /// several pods share: one pod must not speak for the others.
    pub fn readiness(&self) -> HashMap<IpAddr, bool> {
        self.0.state().pods.readiness(&self.0.node_addresses)
    }

    /// Returns events that happened for the first time or again since the event with this number, oldest first.
    pub fn events_since(&self, number: u64) -> Vec<ContainerEvent> {
        self.0.state().events.since(number)
    }

    /// Problems that keep pods from being probed.
    pub fn problems(&self) -> Vec<PodProblem> {
        self.0.state().problems.clone()
    }

    /// A summary of probes and pods.
    pub fn summary(&self) -> ContainerProbeSummary {
        let mut summary = view::summary(&self.0.prober);
        let state = self.0.state();
        (summary.pods, summary.ready_pods) = state.pods.counts();
        summary.problems.clone_from(&state.problems);
        summary
    }

    /// Changes whenever any of the above changes, except for the times and counts of single runs.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Returns the results and durations of probes.
    pub fn statistics(&self) -> Stats {
        self.0.prober.statistics()
    }

    /// How often each container was restarted, by pod and container.
    pub fn restarts(&self) -> Vec<(Arc<PodSpec>, Arc<str>, u64)> {
        self.0.state().pods.restarts()
    }

    /// The supervisor's activity.
    pub fn activity(&self) -> Activity {
        self.0.activity.clone()
    }

    /// Stops the supervisor, and saves the state for the next agent. Containers are left alone.
    pub async fn shutdown(&self) {
        self.0.stop.send_replace(true);
        let task = self
            .0
            .task
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(task) = task {
            // If the task panicked, the panic was already reported.
            let _ = task.await;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_change(&self) {
        self.changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }
}
