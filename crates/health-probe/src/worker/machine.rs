//! The worker: decides whether to run a probe, and what the outcome means.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::{
    ATTEMPTS_MAX, Cache, ContainerState, ContainerStatus, Counted, Judgement, PodStatus,
    ProbeResult, SURVIVED, SavedWorker, judge,
};
use crate::Outcome;
use crate::spec::{Probe, ProbeType, RestartPolicy, Role};

/// The inputs of a worker's decision.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The known status of the pod.
    pub status: Option<&'a PodStatus>,
    /// The container's name.
    pub container: &'a str,
    /// The pod's restart policy.
    pub restart_policy: RestartPolicy,
    /// Time since the agent started.
    pub now: Duration,
    /// The wall clock.
    pub wall: Timestamp,
    /// The wall clock when the agent started.
    pub agent_start: Timestamp,
}

/// The next step of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Do nothing now, and check again at the next tick.
    Wait(Waiting),
    /// Probe.
    Run,
    /// Stop: the worker is no longer needed.
    Exit(Exit),
}

/// Why a worker does not probe now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The pod's status is unknown.
    NoStatus,
    /// The container does not exist yet.
    NoContainer,
    /// The verdict is final until there is a new container.
    OnHold,
    /// The container is not running.
    NotRunning,
    /// The container has not run for long enough.
    InitialDelay,
    /// The container has started, so its startup probe is done.
    Started,
    /// The container has not started, so its startup probe comes first.
    NotStarted,
}

impl Waiting {
    /// The text to display.
    pub const fn text(self) -> &'static str {
        match self {
            Self::NoStatus => "nothing is known about the pod",
            Self::NoContainer => "the container does not exist yet",
            Self::OnHold => "on hold until the container is restarted",
            Self::NotRunning => "the container is not running",
            Self::InitialDelay => "initial delay",
            Self::Started => "the container has started",
            Self::NotStarted => "the container has not started",
        }
    }
}

/// Why a worker stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// No container of the pod will run again.
    PodEnded,
    /// The container will not run again.
    ContainerEnded,
    /// The pod is being deleted, and restarts must not disturb that.
    PodDeleting,
}

/// The result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The target was probed.
    Outcome(Outcome),
    /// The attempt could not be sent or observed in time because of this node, which says nothing about the target.
    NotSent,
}

/// The consequence of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// The attempt ended in an error: retry immediately.
    Again {
        /// The number of the next attempt, from 1.
        attempt: u32,
    },
    /// The run is over.
    Done(Judgement),
}

/// One probe of one container.
#[derive(Clone, Debug)]
pub struct Worker {
    kind: ProbeType,
    role: Role,
    probe: Arc<Probe>,
    container_id: Option<Arc<str>>,
    /// When the container was first seen running, and how long it had been running by then.
    seen: Option<(Duration, Duration)>,
    cache: Cache,
    last: Option<ProbeResult>,
    run: u32,
    on_hold: bool,
    attempt: u32,
    /// An earlier agent's state, until a container is seen.
    saved: Option<SavedWorker>,
}

impl Worker {
    /// Creates a worker that has not seen a container.
    pub fn new(kind: ProbeType, role: Role, probe: Arc<Probe>, saved: Option<SavedWorker>) -> Self {
        Self {
            kind,
            role,
            probe,
            container_id: None,
            seen: None,
            cache: Cache::default(),
            last: None,
            run: 0,
            on_hold: false,
            attempt: 0,
            saved,
        }
    }

    /// Decides whether to probe now. Appends new and changed results to `news`.
    pub fn decide(
        &mut self,
        situation: &Situation<'_>,
        news: &mut Vec<(Arc<str>, ProbeResult)>,
    ) -> Decision {
        let Some(status) = situation.status else {
            return Decision::Wait(Waiting::NoStatus);
        };
        if status.phase.is_final() {
            return Decision::Exit(Exit::PodEnded);
        }
        let Some((container, id)) = status.container(situation.container) else {
            return Decision::Wait(Waiting::NoContainer);
        };
        if self.container_id.as_ref() != Some(id) {
            self.meet(container, id, situation.agent_start, news);
        }
        if self.on_hold {
            return Decision::Wait(Waiting::OnHold);
        }
        let ContainerState::Running { started_at } = container.state else {
            self.set(ProbeResult::Failure, news);
            let has_ended = matches!(container.state, ContainerState::Terminated { .. });
            let may_restart =
                situation.restart_policy != RestartPolicy::Never || self.role == Role::Sidecar;
            return if !has_ended || may_restart {
                Decision::Wait(Waiting::NotRunning)
            } else {
                Decision::Exit(Exit::ContainerEnded)
            };
        };
        if status.deleting && self.kind != ProbeType::Readiness {
            self.set(ProbeResult::Success, news);
            return Decision::Exit(Exit::PodDeleting);
        }
        if !self.is_delay_over(started_at, situation) {
            return Decision::Wait(Waiting::InitialDelay);
        }
        match (container.started == Some(true), self.kind) {
            (true, ProbeType::Startup) => Decision::Wait(Waiting::Started),
            (false, ProbeType::Readiness | ProbeType::Liveness) => {
                Decision::Wait(Waiting::NotStarted)
            }
            _ => {
                self.attempt = 1;
                Decision::Run
            }
        }
    }

    /// Decides what the report of an attempt means, after [`Decision::Run`] or [`Conclusion::Again`].
    pub fn conclude(
        &mut self,
        report: &Report,
        news: &mut Vec<(Arc<str>, ProbeResult)>,
    ) -> Conclusion {
        let outcome = match report {
            Report::Outcome(outcome) if outcome.errored && self.attempt < ATTEMPTS_MAX => {
                self.attempt += 1;
                return Conclusion::Again {
                    attempt: self.attempt,
                };
            }
            Report::Outcome(outcome) => outcome,
            Report::NotSent => {
                return Conclusion::Done(Judgement {
                    result: None,
                    counted: Counted::NotSent,
                    event: None,
                });
            }
        };
        let judgement = judge(self.kind, outcome);
        if let Some(result) = judgement.result {
            self.count(result, news);
        }
        Conclusion::Done(judgement)
    }

    fn count(&mut self, result: ProbeResult, news: &mut Vec<(Arc<str>, ProbeResult)>) {
        if self.last == Some(result) {
            self.run = self.run.saturating_add(1);
        } else {
            self.last = Some(result);
            self.run = 1;
        }
        if self.run < self.threshold(result) {
            return;
        }
        self.set(result, news);
        let holds = match self.kind {
            ProbeType::Liveness => result == ProbeResult::Failure,
            ProbeType::Startup => true,
            ProbeType::Readiness => false,
        };
        if holds {
            self.on_hold = true;
            self.run = 0;
        }
    }

    /// Switches to a container with a new ID.
    fn meet(
        &mut self,
        container: &ContainerStatus,
        id: &Arc<str>,
        agent_start: Timestamp,
        news: &mut Vec<(Arc<str>, ProbeResult)>,
    ) {
        self.container_id = Some(id.clone());
        self.cache.remove();
        self.seen = None;
        self.last = None;
        self.run = 0;
        self.on_hold = false;
        let saved = self.saved.take();
        if let Some(saved) = saved.filter(|saved| *saved.container_id == **id) {
            self.last = saved.last;
            self.run = saved.run;
            self.on_hold = saved.on_hold;
            if let Some(result) = saved.result {
                self.set(result, news);
            }
        } else if !has_survived(container.state, agent_start) {
            let is_started_sidecar = self.role == Role::Sidecar
                && self.kind == ProbeType::Startup
                && container.started == Some(true);
            self.set(
                match is_started_sidecar {
                    true => ProbeResult::Success,
                    false => ProbeResult::initial(self.kind),
                },
                news,
            );
        }
    }

    fn set(&mut self, result: ProbeResult, news: &mut Vec<(Arc<str>, ProbeResult)>) {
        if let Some(id) = &self.container_id
            && self.cache.set(id, result)
        {
            news.push((id.clone(), result));
        }
    }

    fn is_delay_over(&mut self, started_at: Option<Timestamp>, situation: &Situation<'_>) -> bool {
        let (since, ran) = *self.seen.get_or_insert_with(|| {
            let ran = started_at.map(|at| situation.wall.duration_since(at));
            let ran = ran.unwrap_or(SignedDuration::ZERO);
            // A start in the future counts as a start now.
            (situation.now, ran.try_into().unwrap_or(Duration::ZERO))
        });
        let delay = u64::try_from(self.probe.initial_delay_seconds).unwrap_or(0);
        ran + situation.now.saturating_sub(since) >= Duration::from_secs(delay)
    }

    /// The number of consecutive runs with this result that it takes to change the result.
    pub fn threshold(&self, result: ProbeResult) -> u32 {
        match result {
            ProbeResult::Success => self.probe.success_threshold,
            ProbeResult::Failure | ProbeResult::Unknown => self.probe.failure_threshold,
        }
    }

    /// The current time from one probe to the next.
    pub fn period(&self) -> Duration {
        let is_reached = match self.kind {
            ProbeType::Liveness => true,
            ProbeType::Readiness => self.cache.result() == Some(ProbeResult::Success),
            ProbeType::Startup => self.on_hold,
        };
        let fast = self.probe.period_until_ready.filter(|_| !is_reached);
        fast.unwrap_or(self.probe.period)
    }

    /// The result for the container with this ID, even if an earlier agent determined it.
    pub fn result_of(&self, container_id: &str) -> Option<ProbeResult> {
        let known = self.cache.get(container_id);
        known.or_else(|| self.saved_of(container_id)?.result)
    }

    /// The result, if any, that holds until the container with this ID is replaced, even if an earlier agent determined
    /// it.
    pub fn held(&self, container_id: &str) -> Option<ProbeResult> {
        if self.container_id.as_deref() == Some(container_id) {
            return self.cache.result().filter(|_| self.on_hold);
        }
        let saved = self.saved_of(container_id)?;
        saved.result.filter(|_| saved.on_hold)
    }

    /// An earlier agent's state for the container with this ID.
    fn saved_of(&self, container_id: &str) -> Option<&SavedWorker> {
        let saved = self.saved.as_ref();
        saved.filter(|saved| *saved.container_id == *container_id)
    }

    /// The result, for any container.
    pub fn result(&self) -> Option<ProbeResult> {
        self.cache.result()
    }

    /// The result of the last run, and the number of consecutive runs with that result.
    pub fn run(&self) -> (Option<ProbeResult>, u32) {
        (self.last, self.run)
    }

    /// Whether the worker waits for a new container.
    pub(crate) fn is_on_hold(&self) -> bool {
        self.on_hold
    }

    /// The last container that the worker has seen.
    pub fn container_id(&self) -> Option<&Arc<str>> {
        self.container_id.as_ref()
    }

    /// The type of the probe.
    pub fn kind(&self) -> ProbeType {
        self.kind
    }

    /// The probe.
    pub fn probe(&self) -> &Arc<Probe> {
        &self.probe
    }

    /// Replaces the probe. Keeps all state.
    pub(crate) fn set_probe(&mut self, probe: Arc<Probe>) {
        self.probe = probe;
    }

    /// The state to save for the next agent; `None` if there was no container yet.
    pub fn save(&self, pod_uid: &str, container: &str) -> Option<SavedWorker> {
        let Some(container_id) = &self.container_id else {
            return self.saved.clone();
        };
        Some(SavedWorker {
            pod_uid: pod_uid.to_owned(),
            container: container.to_owned(),
            kind: self.kind,
            container_id: container_id.to_string(),
            result: self.cache.result(),
            last: self.last,
            run: self.run,
            on_hold: self.on_hold,
            gone: None,
        })
    }
}

/// Whether a container is so much older than the agent ([`SURVIVED`]) that it must not be judged from scratch.
pub(super) fn has_survived(state: ContainerState, agent_start: Timestamp) -> bool {
    let ContainerState::Running {
        started_at: Some(started_at),
    } = state
    else {
        return false;
    };
    let age = Duration::try_from(agent_start.duration_since(started_at));
    age.is_ok_and(|age| age > SURVIVED)
}
