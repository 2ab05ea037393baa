//! How a part of the agent reports on its own work: the outcome of its last turn, the time of that turn, and counts of
//! turns. The part holds the [`Reporter`]; its observers hold the [`Activity`]. A [`Controller`] is a part that talks to
//! something outside the agent, or repairs something, under the name by which reports list it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::api::ControllerStatus;
use crate::duration::duration_text;

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The part works, and found something wrong in what it was given.
    Finding,
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
    /// Something wrong in what a part was given. The turn succeeded.
    pub fn finding(reason: impl ToString) -> Self {
        Self {
            severity: Severity::Finding,
            reason: reason.to_string(),
        }
    }

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
    /// Time since the last turn that succeeded, if any.
    pub succeeded: Option<Duration>,
    /// Problem in the last finished turn.
    pub problem: Option<Problem>,
}

/// What is known about a part. Clones share the same state.
#[derive(Clone, Debug)]
pub struct Activity(Arc<Mutex<Turns>>);

/// A part of the agent with the name by which reports list it.
#[derive(Clone, Debug)]
pub struct Controller {
    /// Name, unique in the agent: `node-registry`.
    pub name: String,
    /// What is known about the part.
    pub activity: Activity,
}

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
    /// The pause announced at the end of the last turn.
    interval: Option<Duration>,
    successes: u64,
    failures: u64,
    /// Failures since the last success.
    consecutive_failures: u64,
    /// The last failure, which later successes leave.
    last_failure: Option<(Instant, String)>,
}

/// Creates both ends for a part that is about to start.
pub fn channel() -> (Reporter, Activity) {
    let turns = Turns {
        heard: Instant::now(),
        silence: Some(Duration::ZERO),
        succeeded: None,
        problem: None,
        interval: None,
        successes: 0,
        failures: 0,
        consecutive_failures: 0,
        last_failure: None,
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

impl Controller {
    /// Names a part.
    pub fn new(name: impl Into<String>, activity: Activity) -> Self {
        Self {
            name: name.into(),
            activity,
        }
    }

    /// The part's turns so far, as reported at the time `now`.
    pub fn status(&self, now: Timestamp) -> ControllerStatus {
        let Turns {
            succeeded,
            interval,
            successes,
            failures,
            consecutive_failures,
            ref last_failure,
            ..
        } = *self.activity.turns();
        // If the clock was set back past the machine's start, this time cannot be represented.
        let time = |at: Instant| now.checked_sub(at.elapsed()).unwrap_or(now);
        ControllerStatus {
            name: self.name.clone(),
            interval: interval.map(duration_text),
            successes,
            failures,
            consecutive_failures,
            last_success: succeeded.map(time),
            last_failure: last_failure.as_ref().map(|(at, _)| time(*at)),
            last_error: last_failure.as_ref().map(|(_, reason)| reason.clone()),
        }
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
        turns.interval = pause;
        let failure = problem.as_ref();
        match failure.filter(|problem| problem.severity > Severity::Finding) {
            None => {
                turns.succeeded = Some(turns.heard);
                turns.successes += 1;
                turns.consecutive_failures = 0;
            }
            Some(problem) => {
                turns.last_failure = Some((turns.heard, problem.reason.clone()));
                turns.failures += 1;
                turns.consecutive_failures += 1;
            }
        }
        turns.problem = problem;
    }

    /// Ends a turn that succeeded. The next one starts when there is work.
    pub fn succeeded(&self) {
        self.end(None, None);
    }

    /// Ends a turn that failed. The part keeps what it has, and tries again.
    pub fn failed(&self, reason: impl ToString) {
        self.end(Some(Problem::warning(reason)), None);
    }

    /// What observers know about the part.
    pub fn activity(&self) -> Activity {
        self.0.clone()
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
    fn a_controller_counts_turns_and_keeps_the_last_failure() {
        let (reporter, activity) = channel();
        let controller = Controller::new("node-registry", activity);
        let now = Timestamp::now();
        let before = controller.status(now);
        assert_eq!((before.successes, before.last_success), (0, None));
        reporter.failed("connection refused");
        reporter.failed("no route to host");
        let failing = controller.status(now);
        assert_eq!((failing.failures, failing.consecutive_failures), (2, 2));
        assert_eq!(failing.last_error.as_deref(), Some("no route to host"));
        reporter.end(None, Some(HOUR));
        let well = controller.status(now);
        assert_eq!((well.successes, well.failures), (1, 2));
        assert_eq!(well.consecutive_failures, 0);
        assert_eq!(well.interval.as_deref(), Some("1h0m0s"));
        assert!(well.last_success >= well.last_failure);
        assert_eq!(well.last_error.as_deref(), Some("no route to host"));
    }

    #[test]
    fn a_finding_is_a_problem_but_no_failure() {
        let (reporter, activity) = channel();
        let controller = Controller::new("kubernetes-policies", activity.clone());
        reporter.end(Some(Problem::finding("1 policy is refused")), None);
        let status = controller.status(Timestamp::now());
        assert_eq!((status.successes, status.failures), (1, 0));
        assert_eq!(status.last_error, None);
        let last = activity.last();
        assert_eq!(last.problem, Some(Problem::finding("1 policy is refused")));
        assert!(last.succeeded.is_some());
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
