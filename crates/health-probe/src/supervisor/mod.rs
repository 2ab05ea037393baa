//! The supervisor: has the pods of its sources probed, and acts on what comes of it.
//!
//! A source says which pods there are, the container runtime (or else the source, or else the pod's endpoint) how their
//! containers do. The [`Prober`] probes them. A container that fails its liveness or startup probe is ended through the
//! runtime; one that has ended is started again, by the pod's restart policy and the kubelet's back-off. Readiness goes to
//! the pod's endpoint. What is known survives a restart of the agent in a file.

mod acting;
mod containers;
mod ends;
mod events;
mod moment;
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
use self::pods::Pods;
use self::saved::SavedState;
use self::task::Task;
use crate::prober::{NewsReceiver, Prober, ProberOptions, Stats};
use crate::runtime::Runtime;
use crate::source::PodSet;
use crate::spec::PodSpec;
use crate::worker::{Limits, ManagerOptions};

/// What a supervisor begins with.
pub struct SupervisorOptions {
    /// The pods.
    pub pods: watch::Receiver<Arc<PodSet>>,
    /// The container runtime, if there is one.
    pub runtime: Option<Runtime>,
    /// Which containers are ended and started again; of others it is only told that they should be.
    pub restarts: Restarts,
    /// The endpoints of this node.
    pub endpoints: Arc<dyn Endpoints>,
    /// The addresses of pods that use the host's network.
    pub node_addresses: Vec<IpAddr>,
    /// How many probes are sent.
    pub limits: Limits,
    /// The folder of the certificates and keys that annotations name.
    pub certificates: PathBuf,
    /// The file of what survives a restart of the agent.
    pub state_file: PathBuf,
}

/// Which containers are ended and started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restarts {
    /// None.
    None,
    /// Those that no kubelet runs.
    Own,
    /// All.
    All,
}

/// The endpoints of a node, as far as pods have to do with them.
pub trait Endpoints: Send + Sync {
    /// The endpoint of a pod: the one with one of its addresses, or with its name where the pod has none.
    fn find(&self, pod: &PodSpec) -> Option<LocalEndpoint>;

    /// Whether the containers behind an endpoint can serve; `None` if they are not probed.
    fn set_ready(&self, id: u16, ready: Option<bool>);

    /// Changes whenever an endpoint does.
    fn changes(&self) -> watch::Receiver<u64>;
}

/// Of a node that has none.
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
    /// Its number.
    pub id: u16,
    /// Its addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// The file of its network namespace.
    pub netns: PathBuf,
}

/// Has pods probed, and acts. Clones share it.
#[derive(Clone)]
pub struct Supervisor(Arc<Shared>);

/// What the task and those who read have in common.
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

/// What there is to read.
#[derive(Default)]
struct State {
    pods: Pods,
    events: EventLog,
    /// By subject.
    problems: Vec<PodProblem>,
}

impl Supervisor {
    /// Begins. Must be called in a tokio runtime. An error is one of the prober's thread.
    pub fn start(options: SupervisorOptions) -> io::Result<Self> {
        Self::start_with(options, Prober::start_on_thread)
    }

    /// Begins, with a prober that `start_prober` starts.
    fn start_with(
        options: SupervisorOptions,
        start_prober: impl FnOnce(ProberOptions) -> io::Result<(Prober, NewsReceiver)>,
    ) -> io::Result<Self> {
        let SupervisorOptions {
            pods,
            runtime,
            restarts,
            endpoints,
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
            task::Parts {
                pods,
                runtime,
                restarts,
                endpoints,
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

    /// All probes, by pod, container and type.
    pub fn probes(&self) -> Vec<ContainerProbe> {
        view::probes(&self.0.prober, &self.0.beginning)
    }

    /// All pods, by name.
    pub fn pods(&self) -> Vec<ProbedPod> {
        self.0.state().pods.shown()
    }

    /// Whether the pod that has an address can serve, as far as that is known. Left out are the addresses of the node,
    /// and those that several pods have: one pod must not speak for the others.
    pub fn readiness(&self) -> HashMap<IpAddr, bool> {
        self.0.state().pods.readiness(&self.0.node_addresses)
    }

    /// What happened, or happened again, since the event of this number; the oldest first.
    pub fn events_since(&self, number: u64) -> Vec<ContainerEvent> {
        self.0.state().events.since(number)
    }

    /// What keeps pods from being probed.
    pub fn problems(&self) -> Vec<PodProblem> {
        self.0.state().problems.clone()
    }

    /// All in all.
    pub fn summary(&self) -> ContainerProbeSummary {
        let mut summary = view::summary(&self.0.prober);
        let state = self.0.state();
        (summary.pods, summary.ready_pods) = state.pods.counts();
        summary.problems.clone_from(&state.problems);
        summary
    }

    /// Changes whenever something of this does, but for the times and counts of single runs.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// What probes came to, and how long they took.
    pub fn statistics(&self) -> Stats {
        self.0.prober.statistics()
    }

    /// How often containers were started again, by pod and container.
    pub fn restarts(&self) -> Vec<(Arc<PodSpec>, Arc<str>, u64)> {
        self.0.state().pods.restarts()
    }

    /// How it does.
    pub fn activity(&self) -> Activity {
        self.0.activity.clone()
    }

    /// Stops, and writes down what the next agent is to know. Containers stay as they are.
    pub async fn shutdown(&self) {
        self.0.stop.send_replace(true);
        let task = self
            .0
            .task
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(task) = task {
            // A task that panicked has said so.
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
