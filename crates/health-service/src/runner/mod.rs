//! When to sync: as often as asked for, but not more often than a shortest interval, and at least once in a longest one
//! (`pkg/proxy/runner` of Kubernetes).
//!
//! [`Runner`] decides, on times that it is given; [`Driver`] runs a job by it on tokio.

mod driver;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use driver::{Driver, Job, Trigger};

/// How often to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// From the end of a run to the begin of the next, at least.
    pub min: Duration,
    /// From the end of a run that failed to the next, if nobody asks for one.
    pub retry: Duration,
    /// From the end of a run to the next, if nobody asks for one.
    pub max: Duration,
}

/// Why a runner does not do what it is asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunnerError {
    /// Intervals that exclude each other.
    #[error(
        "cannot run at intervals of at least {min:?} and at most {max:?}: the longest must not be shorter than the shortest"
    )]
    MaxBelowMin {
        /// The shortest.
        min: Duration,
        /// The longest.
        max: Duration,
    },
    /// It has ended.
    #[error("cannot ask for a run: the runner has stopped")]
    Stopped,
}

/// Decides when to run. Times are durations since a start that the caller chooses, and must not go back.
#[derive(Debug)]
pub struct Runner {
    intervals: Intervals,
    phase: Phase,
    /// Whether somebody has asked for a run that has not begun.
    is_asked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Between runs.
    Idle {
        /// No run before.
        earliest: Duration,
        /// A run then, asked for or not.
        due: Duration,
    },
    Running,
    Stopped,
}

impl Runner {
    /// A runner that begins now. It runs when it is first asked to, or after the longest interval.
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

    /// Asks for a run. Asked for several times before it begins, it is one run; asked for during a run, it is another.
    pub fn trigger(&mut self) -> Result<(), RunnerError> {
        if let Phase::Stopped = self.phase {
            return Err(RunnerError::Stopped);
        }
        self.is_asked = true;
        Ok(())
    }

    /// Whether to run now. If so, [`Runner::finished`] must be told of the end.
    #[must_use]
    pub fn poll(&mut self, now: Duration) -> bool {
        let is_due = self.next_wake().is_some_and(|wake| wake <= now);
        if is_due {
            self.phase = Phase::Running;
            self.is_asked = false;
        }
        is_due
    }

    /// The run has ended now, well or not. Any run that ends well makes up for those that did not.
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

    /// When to poll next, if nobody asks for a run before; none during a run and after the end.
    pub fn next_wake(&self) -> Option<Duration> {
        match self.phase {
            Phase::Idle { earliest, .. } if self.is_asked => Some(earliest),
            Phase::Idle { due, .. } => Some(due),
            Phase::Running | Phase::Stopped => None,
        }
    }

    /// No run begins any more.
    pub fn stop(&mut self) {
        self.phase = Phase::Stopped;
    }
}
