//! Limits on the number of probes that a node sends.

use std::time::Duration;

use health_model::pace::Budget;

/// The limits on a node's probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of attempts per second, in the long run.
    pub per_second: u32,
    /// Maximum number of concurrent runs.
    pub concurrent: usize,
    /// Maximum number of attempts per second for one pod, in the long run.
    pub pod_per_second: u32,
}

/// The used part of the limits.
#[derive(Debug)]
pub(super) struct Usage {
    budget: Budget,
    concurrent: usize,
    in_flight: usize,
}

impl Usage {
    /// Starts with nothing used.
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            budget: Budget::new(limits.per_second),
            concurrent: limits.concurrent.max(1),
            in_flight: 0,
        }
    }

    /// Whether a run may start.
    pub(super) fn allows(&self, now: Duration) -> bool {
        self.free() > 0 && self.budget.allows(now)
    }

    /// How many more runs may start at the same time.
    pub(super) fn free(&self) -> usize {
        self.concurrent.saturating_sub(self.in_flight)
    }

    /// When a run may start; `None` if another run has to end first.
    pub(super) fn ready(&self) -> Option<Duration> {
        (self.free() > 0).then(|| self.budget.ready())
    }

    /// Records the start of a run. Returns when it would start if runs were evenly spaced, see [`Budget::take`].
    pub(super) fn begin(&mut self, now: Duration) -> Duration {
        self.in_flight += 1;
        self.budget.take(now)
    }

    /// Records a further attempt of a run. The attempt does not wait, but later runs do.
    pub(super) fn repeat(&mut self, now: Duration) {
        self.budget.take(now);
    }

    /// Records that a run has ended.
    pub(super) fn end(&mut self) {
        self.in_flight -= 1;
    }

    /// The number of runs under way.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }
}
