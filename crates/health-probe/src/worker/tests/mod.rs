//! Tests of the engine, with time passed in. Names start with the scenario that they cover.

mod manager;
mod model;
mod restart;
mod scenarios;
mod schedule;
mod shares;
mod survival;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::*;
use crate::spec::{
    ContainerSpec, Handler, Origin, PodSpec, Port, Probe, ProbeType, RestartPolicy, Role,
};
use crate::{Outcome, RawResult};

use ProbeResult::{Failure, Success, Unknown};
use ProbeType::{Liveness, Readiness, Startup};

/// The wall clock when the agent starts.
const START: i64 = 1_800_000_000;

fn agent_start() -> Timestamp {
    Timestamp::from_second(START).unwrap()
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn probe() -> Probe {
    Probe {
        handler: Handler::Tcp {
            host: None,
            port: Port::Number(80),
        },
        initial_delay_seconds: 0,
        period: secs(10),
        period_until_ready: None,
        timeout: secs(1),
        success_threshold: 1,
        failure_threshold: 3,
        termination_grace: None,
        origin: Origin::Node,
    }
}

fn thresholds(success_threshold: u32, failure_threshold: u32) -> Probe {
    Probe {
        success_threshold,
        failure_threshold,
        ..probe()
    }
}

fn outcome(result: RawResult) -> Outcome {
    Outcome {
        result,
        message: "a message".to_owned(),
        errored: false,
    }
}

fn error() -> Outcome {
    Outcome {
        errored: true,
        ..outcome(RawResult::Unknown)
    }
}

fn success() -> Report {
    Report::Outcome(outcome(RawResult::Success))
}

fn failure() -> Report {
    Report::Outcome(outcome(RawResult::Failure))
}

/// A container that has been running since the agent started.
fn running(name: &str, id: &str) -> ContainerStatus {
    ContainerStatus {
        name: name.into(),
        id: Some(id.into()),
        state: ContainerState::Running {
            started_at: Some(agent_start()),
        },
        ready: false,
        started: None,
    }
}

fn status(containers: Vec<ContainerStatus>) -> PodStatus {
    PodStatus {
        phase: Phase::Running,
        containers,
        ..PodStatus::default()
    }
}

fn container(name: &str, role: Role, probes: &[(ProbeType, Probe)]) -> ContainerSpec {
    let probe = |kind| {
        let found = probes.iter().find(|(of, _)| *of == kind);
        found.map(|(_, probe)| Arc::new(probe.clone()))
    };
    ContainerSpec {
        name: name.into(),
        role,
        image: String::new(),
        env: Default::default(),
        ports: Vec::new(),
        startup: probe(Startup),
        readiness: probe(Readiness),
        liveness: probe(Liveness),
    }
}

fn pod(uid: &str, containers: Vec<ContainerSpec>) -> PodSpec {
    PodSpec {
        uid: uid.into(),
        mirrored_uid: None,
        namespace: "default".to_owned(),
        name: uid.to_owned(),
        ips: vec!["10.0.0.1".parse().unwrap()],
        restart_policy: RestartPolicy::Always,
        termination_grace: secs(30),
        containers,
    }
}

/// A manager with its own clock.
struct Bed {
    manager: Manager,
    now: Duration,
}

impl Bed {
    fn new() -> Self {
        Self::with(Limits {
            per_second: 1_000_000,
            concurrent: 1_000_000,
            pod_per_second: 1_000_000,
        })
    }

    fn with(limits: Limits) -> Self {
        Self::after(limits, None)
    }

    fn after(limits: Limits, snapshot: Option<Snapshot>) -> Self {
        let manager = Manager::new(ManagerOptions {
            limits,
            agent_start: agent_start(),
            snapshot,
        });
        let now = Duration::ZERO;
        Self { manager, now }
    }

    fn add(&mut self, pod: PodSpec) {
        self.manager.add_pod(self.now, Arc::new(pod));
    }

    fn set_status(&mut self, uid: &str, status: PodStatus) {
        self.manager.set_status(self.now, uid, status);
    }

    fn poll(&mut self) -> Option<Start> {
        let wall = agent_start() + jiff::SignedDuration::try_from(self.now).unwrap();
        self.manager.poll(self.now, wall)
    }

    fn finish(&mut self, id: WorkerId, report: Report) -> Finished {
        self.manager.finish(self.now, id, report)
    }

    /// Makes all runs up to `end`, each reported at once with the result of `answer`. Returns when each run was made.
    fn run_until(
        &mut self,
        end: Duration,
        mut answer: impl FnMut(&Start) -> Report,
    ) -> Vec<(Duration, Arc<str>, ProbeType)> {
        let mut runs = Vec::new();
        loop {
            while let Some(start) = self.poll() {
                runs.push((self.now, start.pod.uid.clone(), start.kind));
                let report = answer(&start);
                self.finish(start.worker, report);
            }
            match self.manager.next_wake().filter(|at| *at <= end) {
                Some(at) => self.now = self.now.max(at),
                None => break,
            }
        }
        self.now = end;
        runs
    }

    /// Returns the types of a pod's workers, by container.
    fn workers(&self, uid: &str) -> Vec<(String, ProbeType)> {
        let views = self.manager.list().filter(|view| *view.pod.uid == *uid);
        let mut workers: Vec<_> = views
            .map(|view| (view.container.to_string(), view.kind))
            .collect();
        workers.sort();
        workers
    }

    /// Returns `started` and `ready` of the pod's only container.
    fn reported(&self, uid: &str) -> (Option<bool>, bool) {
        let status = self.manager.status(uid).unwrap();
        let all: Vec<_> = status
            .containers
            .iter()
            .chain(&status.init_containers)
            .collect();
        assert_eq!(all.len(), 1);
        (all[0].started, all[0].ready)
    }
}
