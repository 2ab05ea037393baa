//! How many probes a node sends.

use std::time::Duration;

use health_model::pace::Budget;

/// What bounds the probes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most attempts a second, in the long run.
    pub per_second: u32,
    /// Most runs at the same time.
    pub concurrent: usize,
    /// Most attempts of one pod a second, in the long run.
    pub pod_per_second: u32,
}

/// What is used of the limits.
#[derive(Debug)]
pub(super) struct Usage {
    budget: Budget,
    concurrent: usize,
    in_flight: usize,
}

impl Usage {
    /// Nothing is used.
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            budget: Budget::new(limits.per_second),
            concurrent: limits.concurrent.max(1),
            in_flight: 0,
        }
    }

    /// Whether a run may begin.
    pub(super) fn allows(&self, now: Duration) -> bool {
        self.free() > 0 && self.budget.allows(now)
    }

    /// How many more may run at the same time.
    pub(super) fn free(&self) -> usize {
        self.concurrent.saturating_sub(self.in_flight)
    }

    /// When a run may begin, unless one has to end before.
    pub(super) fn ready(&self) -> Option<Duration> {
        (self.free() > 0).then(|| self.budget.ready())
    }

    /// A run begins. Returns when it would if runs began evenly, see [`Budget::take`].
    pub(super) fn begin(&mut self, now: Duration) -> Duration {
        self.in_flight += 1;
        self.budget.take(now)
    }

    /// A further attempt of a run: it does not wait, but those that follow do.
    pub(super) fn repeat(&mut self, now: Duration) {
        self.budget.take(now);
    }

    /// A run has ended.
    pub(super) fn end(&mut self) {
        self.in_flight -= 1;
    }

    /// Runs under way.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }
}
