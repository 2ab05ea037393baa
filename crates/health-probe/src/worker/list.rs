//! What is shown of workers.

use std::sync::Arc;
use std::time::Duration;

use super::{Counted, Delay, FRESH_MIN, FRESH_PERIODS, ProbeResult, Waiting};
use crate::spec::{PodSpec, Probe, ProbeType};

/// What the last run of a worker came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRun {
    /// When it ended, since the agent began.
    pub at: Duration,
    /// What it counted as.
    pub counted: Counted,
    /// What its mechanism said.
    pub message: String,
}

/// One probe of one container, as it stands.
#[derive(Clone, Copy, Debug)]
pub struct WorkerView<'a> {
    /// The pod.
    pub pod: &'a Arc<PodSpec>,
    /// The container's name.
    pub container: &'a Arc<str>,
    /// The container that is probed; none before there was one.
    pub container_id: Option<&'a Arc<str>>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The probe.
    pub probe: &'a Arc<Probe>,
    /// Its result; none before there was a container.
    pub result: Option<ProbeResult>,
    /// What its last run came to that told something.
    pub last: Option<ProbeResult>,
    /// How many in a row came to that.
    pub run: u32,
    /// How many in a row it takes to be the result.
    pub threshold: u32,
    /// Whether it is not probed until there is a new container.
    pub on_hold: bool,
    /// Why it was not probed when it last could have been; none if it was.
    pub waiting: Option<Waiting>,
    /// Whether a run is under way.
    pub in_flight: bool,
    /// When it is looked at next, since the agent began; none while a run is under way.
    pub next: Option<Duration>,
    /// Why it has not begun although it is due; none if it is not, or has.
    pub delay: Option<Delay>,
    /// From one run to the next, as things are.
    pub period: Duration,
    /// Since when it is to be probed and no run has found anything out, since the agent began.
    pub fresh: Duration,
    /// When the first run since then began; none if none has.
    pub begun: Option<Duration>,
    /// Its last run.
    pub last_run: Option<&'a LastRun>,
}

impl WorkerView<'_> {
    /// How long no run has found anything out about a container that is to be probed, if a result should be there by now: a
    /// run has to begin within some periods, and to end within its timeout.
    pub fn overdue(&self, now: Duration) -> Option<Duration> {
        let is_probed = self.waiting.is_none() && !self.on_hold && self.container_id.is_some();
        let longest = self.period.saturating_mul(FRESH_PERIODS).max(FRESH_MIN);
        let mut due = self.fresh.saturating_add(longest);
        // One that began too late stays overdue until it ends.
        if let Some(begun) = self.begun.filter(|begun| *begun <= due) {
            let slack = self.period.max(FRESH_MIN);
            let end = begun.saturating_add(self.probe.timeout);
            due = due.max(end.saturating_add(slack));
        }
        (is_probed && now > due).then(|| now.saturating_sub(self.fresh))
    }
}
