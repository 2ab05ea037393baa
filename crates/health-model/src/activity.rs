//! How a part of the agent reports on its own work: the outcome of its last turn and the time of that turn. The part
//! holds the [`Reporter`]; its observers hold the [`Activity`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The part still works, with what it has.
    Warning,
    /// The part does not work.
    Failure,
}

/// What was wrong in a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// Human-readable description.
    pub reason: String,
}

impl Problem {
    /// A problem that leaves the part working.
    pub fn warning(reason: impl ToString) -> Self {
        Self {
            severity: Severity::Warning,
            reason: reason.to_string(),
        }
    }

    /// A problem that stops the part from working.
    pub fn failure(reason: impl ToString) -> Self {
        Self {
            severity: Severity::Failure,
            reason: reason.to_string(),
        }
    }
}

/// The last turn of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastTurn {
    /// Time since the part last reported.
    pub age: Duration,
    /// By how much `age` exceeds the pause that the part announced.
    pub overdue: Duration,
    /// Time since the last turn without a problem, if any.
    pub succeeded: Option<Duration>,
    /// Problem in the last finished turn.
    pub problem: Option<Problem>,
}

/// What is known about a part. Clones share the same state.
#[derive(Clone, Debug)]
pub struct Activity(Arc<Mutex<Turns>>);

/// Reports what a part does. Dropping it means that the part has stopped, which is a failure.
#[derive(Debug)]
pub struct Reporter(Activity);

#[derive(Debug)]
struct Turns {
    heard: Instant,
    /// The pause that the part announced; `None` means until there is work.
    silence: Option<Duration>,
    succeeded: Option<Instant>,
    problem: Option<Problem>,
}

/// Creates both ends for a part that is about to start.
pub fn channel() -> (Reporter, Activity) {
    let turns = Turns {
        heard: Instant::now(),
        silence: Some(Duration::ZERO),
        succeeded: None,
        problem: None,
    };
    let activity = Activity(Arc::new(Mutex::new(turns)));
    (Reporter(activity.clone()), activity)
}

impl Activity {
    /// The last turn.
    pub fn last(&self) -> LastTurn {
        let now = Instant::now();
        let turns = self.turns();
        let since = |at: Instant| now.saturating_duration_since(at);
        let age = since(turns.heard);
        LastTurn {
            age,
            overdue: turns
                .silence
                .map_or(Duration::ZERO, |silence| age.saturating_sub(silence)),
            succeeded: turns.succeeded.map(since),
            problem: turns.problem.clone(),
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reporter {
    /// Starts a turn. The previous result is valid until this turn ends.
    pub fn begin(&self) {
        self.due_within(Duration::ZERO);
    }

    /// Announces that the next turn starts within `pause`. The previous result stands.
    pub fn due_within(&self, pause: Duration) {
        let mut turns = self.0.turns();
        turns.heard = Instant::now();
        turns.silence = Some(pause);
    }

    /// Ends a turn. The next one starts within `pause`, or, if that is `None`, when there is work.
    pub fn end(&self, problem: Option<Problem>, pause: Option<Duration>) {
        let mut turns = self.0.turns();
        turns.heard = Instant::now();
        turns.silence = pause;
        if problem.is_none() {
            turns.succeeded = Some(turns.heard);
        }
        turns.problem = problem;
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        let mut turns = self.0.turns();
        let ended = "it has stopped; restart the agent";
        let reason = match &turns.problem {
            Some(problem) => format!("{}; {ended}", problem.reason),
            None => ended.to_owned(),
        };
        turns.problem = Some(Problem::failure(reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_last_turn_stands_with_the_last_success() {
        let (reporter, activity) = channel();
        let before = activity.last();
        assert_eq!((before.problem, before.succeeded), (None, None));
        reporter.end(None, Some(HOUR));
        let well = activity.last();
        assert_eq!((well.problem, well.overdue), (None, Duration::ZERO));
        assert!(well.succeeded.is_some());
        reporter.end(Some(Problem::warning("no room")), Some(HOUR));
        reporter.begin();
        let failed = activity.last();
        assert_eq!(failed.problem, Some(Problem::warning("no room")));
        assert!(failed.succeeded >= well.succeeded);
    }

    #[test]
    fn silence_is_too_long_only_while_something_is_to_be_done() {
        let (reporter, activity) = channel();
        let overdue = || {
            std::thread::sleep(Duration::from_millis(2));
            activity.last().overdue > Duration::ZERO
        };
        assert!(overdue(), "it never began");
        reporter.end(None, None);
        assert!(!overdue(), "it waits");
        reporter.begin();
        assert!(overdue(), "it hangs");
        reporter.end(None, Some(HOUR));
        assert!(!overdue(), "it pauses");
        reporter.end(None, Some(Duration::ZERO));
        assert!(overdue(), "its pause is over");
    }

    #[test]
    fn a_part_that_has_ended_has_failed() {
        let (reporter, activity) = channel();
        reporter.end(Some(Problem::warning("no room")), None);
        drop(reporter);
        let problem = activity.last().problem.unwrap();
        assert_eq!(problem.severity, Severity::Failure);
        assert!(problem.reason.starts_with("no room; it has stopped"));
    }
}
