//! One run of one probe, outside of any schedule: its outcome, and what that would mean.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Containers;
use super::attempt::{Attempt, Commands};
use crate::spec::{PodSpec, Probe, ProbeType};
use crate::worker::{ATTEMPTS_MAX, Judgement, Report, Start, WorkerId, judge};
use crate::{Outcome, RawResult};

/// A probe to try.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The pod.
    pub pod: Arc<PodSpec>,
    /// The container's name.
    pub container: Arc<str>,
    /// The container's ID, if known; passed to [`Containers`].
    pub container_id: Arc<str>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The probe.
    pub probe: Arc<Probe>,
}

/// The result of a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The outcome of the last attempt; `None` if this host did not check in time.
    pub outcome: Option<Outcome>,
    /// The meaning of the outcome, before any threshold; `None` if this host did not check in time.
    pub judgement: Option<Judgement>,
    /// The number of attempts: as in any run, an attempt that ends in an error is repeated.
    pub attempts: u32,
    /// How long the last attempt took.
    pub took: Duration,
}

impl Tried {
    /// Whether the target is healthy.
    pub fn is_success(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| {
            !outcome.errored && matches!(outcome.result, RawResult::Success | RawResult::Warning)
        })
    }
}

impl Trial {
    /// Returns every probe of a pod, in the order of its containers.
    pub fn all(pod: &Arc<PodSpec>) -> Vec<Self> {
        let mut trials = Vec::new();
        for container in &pod.containers {
            for kind in ProbeType::ALL {
                if let Some(probe) = container.probe(kind) {
                    trials.push(Self {
                        pod: pod.clone(),
                        container: container.name.clone(),
                        container_id: Arc::default(),
                        kind,
                        probe: probe.clone(),
                    });
                }
            }
        }
        trials
    }

    /// Makes one run, as the prober does when the probe is due.
    pub async fn run(self, containers: &dyn Containers, certificates: &Path) -> Tried {
        let commands = Commands::default();
        let mut start = Start {
            worker: WorkerId::default(),
            pod: self.pod,
            container: self.container,
            container_id: self.container_id,
            kind: self.kind,
            probe: self.probe,
            attempt: 1,
            due: Duration::ZERO,
        };
        loop {
            let begun = Instant::now();
            let attempt = Attempt {
                start: &start,
                containers,
                certificates,
                commands: &commands,
            };
            let report = attempt.make().await;
            let took = begun.elapsed();
            let attempts = start.attempt;
            match report {
                Report::Outcome(outcome) if outcome.errored && attempts < ATTEMPTS_MAX => {
                    start.attempt += 1;
                }
                Report::Outcome(outcome) => {
                    return Tried {
                        judgement: Some(judge(start.kind, &outcome)),
                        outcome: Some(outcome),
                        attempts,
                        took,
                    };
                }
                Report::NotSent => {
                    return Tried {
                        outcome: None,
                        judgement: None,
                        attempts,
                        took,
                    };
                }
            }
        }
    }
}
