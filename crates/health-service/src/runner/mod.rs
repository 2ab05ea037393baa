//! When to sync: on request, but no more often than the minimum interval allows, and at least once per maximum interval
//! (`pkg/proxy/runner` of Kubernetes).
//!
//! [`Runner`] makes the decisions, with the time passed in by the caller; [`Driver`] runs a job on tokio accordingly.

mod driver;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use driver::{Driver, Job, Trigger};

/// How often to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// Minimum time from the end of a run to the start of the next.
    pub min: Duration,
    /// Time from the end of a failed run to the next run, if none is requested.
    pub retry: Duration,
    /// Time from the end of a run to the next run, if none is requested.
    pub max: Duration,
}

/// Errors of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunnerError {
    /// The maximum interval is shorter than the minimum interval.
    #[error(
        "cannot run at intervals of at least {min:?} and at most {max:?}: the longest must not be shorter than the shortest"
    )]
    MaxBelowMin {
        /// The minimum interval.
        min: Duration,
        /// The maximum interval.
        max: Duration,
    },
    /// The runner has stopped.
    #[error("cannot request a run: the runner has stopped")]
    Stopped,
}

/// Decides when to run. Times are relative to a start that the caller chooses, and must not go backwards.
#[derive(Debug)]
pub struct Runner {
    intervals: Intervals,
    phase: Phase,
    /// Whether a run was requested and has not started yet.
    is_asked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Between runs.
    Idle {
        /// No run starts before this time.
        earliest: Duration,
        /// A run starts at this time even if none is requested.
        due: Duration,
    },
    Running,
    Stopped,
}

impl Runner {
    /// Creates a runner that starts now. The first run starts on request, or after the maximum interval.
    pub fn new(intervals: Intervals, now: Duration) -> Result<Self, RunnerError> {
        let Intervals { min, max, .. } = intervals;
        if max < min {
            return Err(RunnerError::MaxBelowMin { min, max });
        }
        Ok(Self {
            intervals,
            phase: Phase::Idle {
                earliest: now,
                due: now + max,
            },
            is_asked: false,
        })
    }

    /// Requests a run. Several requests before the run starts cause one run; a request during a run causes another.
    pub fn trigger(&mut self) -> Result<(), RunnerError> {
        if let Phase::Stopped = self.phase {
            return Err(RunnerError::Stopped);
        }
        self.is_asked = true;
        Ok(())
    }

    /// Whether to run now. If so, the caller must call [`Runner::finished`] at the end.
    #[must_use]
    pub fn poll(&mut self, now: Duration) -> bool {
        let is_due = self.next_wake().is_some_and(|wake| wake <= now);
        if is_due {
            self.phase = Phase::Running;
            self.is_asked = false;
        }
        is_due
    }

    /// Records that the run has ended now. A successful run makes up for earlier failed ones.
    pub fn finished(&mut self, now: Duration, is_success: bool) {
        if let Phase::Running = self.phase {
            let Intervals { min, retry, max } = self.intervals;
            let wait = if is_success { max } else { retry.min(max) };
            self.phase = Phase::Idle {
                earliest: now + min,
                due: now + wait.max(min),
            };
        }
    }

    /// Returns when to poll next, unless a run is requested earlier; `None` during a run and after [`Runner::stop`].
    pub fn next_wake(&self) -> Option<Duration> {
        match self.phase {
            Phase::Idle { earliest, .. } if self.is_asked => Some(earliest),
            Phase::Idle { due, .. } => Some(due),
            Phase::Running | Phase::Stopped => None,
        }
    }

    /// Prevents further runs.
    pub fn stop(&mut self) {
        self.phase = Phase::Stopped;
    }
}
