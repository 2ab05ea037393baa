//! The displayed state of workers.

use std::sync::Arc;
use std::time::Duration;

use super::{Counted, Delay, FRESH_MIN, FRESH_PERIODS, ProbeResult, Waiting};
use crate::spec::{PodSpec, Probe, ProbeType};

/// The result of a worker's last run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRun {
    /// When the run ended, since the agent started.
    pub at: Duration,
    /// How the run was counted.
    pub counted: Counted,
    /// The message that the mechanism reported.
    pub message: String,
}

/// The current state of one probe of one container.
#[derive(Clone, Copy, Debug)]
pub struct WorkerView<'a> {
    /// The pod.
    pub pod: &'a Arc<PodSpec>,
    /// The container's name.
    pub container: &'a Arc<str>,
    /// The probed container; `None` if there was none yet.
    pub container_id: Option<&'a Arc<str>>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The probe.
    pub probe: &'a Arc<Probe>,
    /// The probe's result; `None` if there was no container yet.
    pub result: Option<ProbeResult>,
    /// The result of the last conclusive run.
    pub last: Option<ProbeResult>,
    /// How many consecutive runs had that result.
    pub run: u32,
    /// How many consecutive runs it takes to change the result.
    pub threshold: u32,
    /// Whether probing is suspended until there is a new container.
    pub on_hold: bool,
    /// Why the container was not probed at the last opportunity; `None` if it was.
    pub waiting: Option<Waiting>,
    /// Whether a run is under way.
    pub in_flight: bool,
    /// When the worker checks next, since the agent started; `None` while a run is under way.
    pub next: Option<Duration>,
    /// Why the probe has not started although it is due; `None` if it is not due, or has started.
    pub delay: Option<Delay>,
    /// The current time from one run to the next.
    pub period: Duration,
    /// Since when the container should be probed but no run has learned anything, since the agent started.
    pub fresh: Duration,
    /// When the first run after `fresh` started; `None` if none has.
    pub begun: Option<Duration>,
    /// The last run.
    pub last_run: Option<&'a LastRun>,
}

impl WorkerView<'_> {
    /// How long no run has learned anything about a container that should be probed; `None` if no result can be
    /// expected yet. A run must start within a few periods, and end within its timeout.
    pub fn overdue(&self, now: Duration) -> Option<Duration> {
        let is_probed = self.waiting.is_none() && !self.on_hold && self.container_id.is_some();
        let longest = self.period.saturating_mul(FRESH_PERIODS).max(FRESH_MIN);
        let mut due = self.fresh.saturating_add(longest);
        // A run that started too late stays overdue until it ends.
        if let Some(begun) = self.begun.filter(|begun| *begun <= due) {
            let slack = self.period.max(FRESH_MIN);
            let end = begun.saturating_add(self.probe.timeout);
            due = due.max(end.saturating_add(slack));
        }
        (is_probed && now > due).then(|| now.saturating_sub(self.fresh))
    }
}
