//! When to sync: on request, but not more often than a shortest interval, and at least once per longest interval
//! (`pkg/proxy/runner` of Kubernetes).
//!
//! [`Runner`] decides, and the caller passes in the time; [`Driver`] runs a job on tokio when the runner says so.

mod driver;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use driver::{Driver, Job, Trigger};

/// How often to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// From the end of a run to the start of the next, at least.
    pub min: Duration,
    /// From the end of a failed run to the next, if none is requested.
    pub retry: Duration,
    /// From the end of a run to the next, if none is requested.
    pub max: Duration,
}

/// Why a runner does not do what it is asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunnerError {
    /// The longest interval is shorter than the shortest.
    #[error(
        "cannot run at intervals of at least {min:?} and at most {max:?}: the longest must not be shorter than the shortest"
    )]
    MaxBelowMin {
        /// The shortest.
        min: Duration,
        /// The longest.
        max: Duration,
    },
    /// The runner has stopped.
    #[error("cannot request a run: the runner has stopped")]
    Stopped,
}

/// Decides when to run. Times are durations since a start that the caller chooses; they must not go backwards.
#[derive(Debug)]
pub struct Runner {
    intervals: Intervals,
    phase: Phase,
    /// Whether a run was requested and has not started.
    is_asked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Between runs.
    Idle {
        /// No run starts before this.
        earliest: Duration,
        /// A run starts at this time even if none is requested.
        due: Duration,
    },
    Running,
    Stopped,
}

impl Runner {
    /// A runner that starts now. Its first run starts on request, or after the longest interval.
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

    /// Requests a run. Several requests before it starts make one run; a request during a run makes another.
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

    /// When to poll next, unless a run is requested earlier; `None` during a run and after [`Runner::stop`].
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
