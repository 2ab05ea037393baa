//! Tests of the supervisor with a test runtime, on a clock that only advances when a test advances it.

mod probing;
mod restarting;

use std::net::IpAddr;
use std::sync::mpsc;
use std::time::Duration;

use health_model::api::ProbedContainer;
use tempfile::TempDir;
use tokio::task::spawn_blocking;
use tokio::time::{advance, timeout};

use super::*;
use crate::runtime::testing::{Call, FakeRuntime, Fault};
use crate::source::{Keeper, SourcedPod};
use crate::spec;

/// Real time within which every awaited event happens, however busy the machine is. Virtual time has no limit: it runs
/// ahead of blocking tasks.
const PATIENCE: Duration = Duration::from_secs(120);

/// A supervisor and its runtime. Tokio's clock must be paused.
struct Stand {
    runtime: FakeRuntime,
    pods: watch::Sender<Arc<PodSet>>,
    supervisor: Supervisor,
    _folder: TempDir,
    _clock: mpsc::Sender<()>,
}

impl Stand {
    /// Starts a supervisor for pods, see [`pods`].
    fn start(runtime: FakeRuntime, restarts: Restarts, specs: &[(&str, &str)]) -> Self {
        let (clock, released) = mpsc::channel::<()>();
        // A paused clock advances by itself whenever all tasks are waiting, even if they wait for data on a socket. It
        // does not advance while a blocking task runs.
        spawn_blocking(move || released.recv_timeout(2 * PATIENCE));
        let folder = tempfile::tempdir().unwrap();
        let (sender, receiver) = watch::channel(pods(specs));
        let options = SupervisorOptions {
            pods: receiver,
            runtime: Some(runtime.runtime()),
            restarts,
            endpoints: Arc::new(NoEndpoints),
            pod_events: Arc::new(NoPodEvents),
            node_addresses: vec![IpAddr::from([127, 0, 0, 1])],
            limits: Limits {
                per_second: 1000,
                concurrent: 100,
                pod_per_second: 1000,
            },
            certificates: PathBuf::new(),
            state_file: folder.path().join("probes.json"),
        };
        // Runs on the test's paused clock.
        let supervisor =
            Supervisor::start_with(options, |options| Ok(Prober::start(options))).unwrap();
        Self {
            runtime,
            pods: sender,
            supervisor,
            _folder: folder,
            _clock: clock,
        }
    }

    /// Sets the list of all pods.
    fn set_pods(&self, specs: &[(&str, &str)]) {
        self.pods.send_replace(pods(specs));
    }

    /// Lets time pass. In each second, the supervisor checks the runtime again, unless it is waiting for a response
    /// that never comes.
    async fn pass(&self, seconds: u64) {
        for _ in 0..seconds {
            let before = self.runtime.calls().len();
            advance(Duration::from_secs(1)).await;
            let looked = self.runtime.wait_for(|calls| {
                let mut new = calls[before..].iter();
                new.any(|call| call.method == "ListPodSandbox") || is_stuck(calls)
            });
            // The clock stands still, so this timeout only ends when the clock is released.
            let looked = timeout(Duration::from_secs(3600), looked).await;
            looked.expect("the runtime to be looked at");
        }
    }

    /// Lets time pass until a condition holds.
    async fn wait<T>(&self, what: &str, find: impl Fn(&Self) -> Option<T>) -> T {
        let start = std::time::Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(found) = find(self) {
                return found;
            }
            self.pass(1).await;
        }
        let (pods, calls) = (self.supervisor.pods(), self.runtime.calls());
        panic!("{what} did not come to be: {pods:?} {calls:?}");
    }

    /// Waits until a method was called on a container.
    async fn wait_call(&self, method: &str, subject: &str) -> Call {
        let what = format!("{method} of {subject}");
        self.wait(&what, |stand| {
            let calls = stand.runtime.calls();
            let mut calls = calls.into_iter();
            calls.find(|call| call.method == method && call.subject == subject)
        })
        .await
    }

    /// All calls of a method, oldest first.
    fn tries(&self, method: &str) -> Vec<Call> {
        let mut calls = self.runtime.calls();
        calls.retain(|call| call.method == method);
        calls
    }

    /// Returns which containers were created, started, stopped and removed, in order: methods and subjects.
    fn changes(&self) -> Vec<(String, String)> {
        let calls = self.runtime.calls().into_iter();
        let changes = calls.filter(|call| !call.method.contains("List") && !is_question(call));
        changes.map(|call| (call.method, call.subject)).collect()
    }

    /// Returns a container of a pod in the namespace `default`.
    fn container(&self, pod: &str, name: &str) -> Option<ProbedContainer> {
        let pod = format!("default/{pod}");
        let pods = self.supervisor.pods();
        let pod = pods.into_iter().find(|one| one.pod == pod)?;
        pod.containers.into_iter().find(|one| one.name == name)
    }

    /// Waits until the supervisor knows a container to be in a state such as `running`, and returns the container.
    async fn wait_state(&self, pod: &str, name: &str, state: &str) -> ProbedContainer {
        let what = format!("{name} of {pod} in state {state}");
        self.wait(&what, |stand| {
            let container = stand.container(pod, name);
            container.filter(|container| container.state == state)
        })
        .await
    }

    /// Returns the events with this reason about a pod in the namespace `default`.
    fn events(&self, pod: &str, reason: &str) -> Vec<ContainerEvent> {
        let pod = format!("default/{pod}");
        let mut events = self.supervisor.events_since(0);
        events.retain(|event| event.pod == pod && event.reason == reason);
        events
    }
}

/// Pods without a kubelet, from their names and the fields of their specs in YAML's flow style.
fn pods(specs: &[(&str, &str)]) -> Arc<PodSet> {
    let pods = specs.iter().map(|(name, fields)| {
        let text =
            format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{{fields}}}\n");
        let mut read = spec::read(&text);
        assert!(read.errors.is_empty(), "{:?}", read.errors);
        SourcedPod {
            spec: Arc::new(read.pods.remove(0)),
            status: None,
            source: Arc::from("test"),
            keeper: Keeper::Agent,
        }
    });
    Arc::new(PodSet {
        pods: pods.collect(),
        problems: Vec::new(),
        is_complete: true,
    })
}

fn is_question(call: &Call) -> bool {
    call.method.ends_with("Status") || call.method == "ExecSync"
}

/// Whether the supervisor is waiting for a response about a container that never comes.
fn is_stuck(calls: &[Call]) -> bool {
    let mut calls = calls.iter();
    calls.any(|call| call.method == "ContainerStatus" && call.is_awaited())
}
