//! The reports on the agent itself: one line per check, and the worst check as the overall state. Peers and registries
//! never cause a failure.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use health_model::activity::{LastTurn, Severity};
use health_model::api::AgentProblem;
use health_model::duration::duration_text;
use hyper::StatusCode;
use jiff::Timestamp;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockAddr, Socket, Type};

use super::page_server::Answer;

/// A check becomes a warning after this time without news.
const WARN_AFTER: Duration = Duration::from_secs(15);
/// A check fails after this time without news.
const FAIL_AFTER: Duration = Duration::from_secs(60);
/// The checks whose problem is that a part of the agent does not answer. The problems of others come from the kernel or
/// the host, and may outlast any restart.
const HANGS: [&str; 3] = ["api-socket", "responders", "services"];
/// Time allowed for repairing a fault before it counts as a failure.
const REPAIR_TIME: Duration = Duration::from_secs(2);

/// The state of a check or of all checks, ordered from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// No problem.
    Ok,
    /// Something is wrong, but it does not call for replacing the agent.
    Warning,
    /// The agent does not do its job.
    Failure,
}

impl Level {
    /// The name in reports.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ok => "Ok",
            Self::Warning => "Warning",
            Self::Failure => "Failure",
        }
    }
}

/// The last observation of one part of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Name of the check.
    pub check: &'static str,
    /// The problem, if any.
    pub problem: Option<String>,
    /// The level of the problem.
    pub severity: Level,
    /// Maximum level, both for the problem and for a lack of news.
    pub limit: Level,
    /// Time since the observation.
    pub age: Duration,
    /// How long news has been overdue; part of `age`.
    pub overdue: Duration,
    /// Time since the last success, if known.
    pub succeeded: Option<Duration>,
}

impl Observation {
    /// An observation made just now; a problem is a failure.
    pub fn now(check: &'static str, problem: Option<String>) -> Self {
        Self::aged(check, problem, Duration::ZERO)
    }

    /// An observation made some time ago; a problem is a failure.
    pub fn aged(check: &'static str, problem: Option<String>, age: Duration) -> Self {
        Self {
            check,
            succeeded: problem.is_none().then_some(age),
            problem,
            severity: Level::Failure,
            limit: Level::Failure,
            age,
            overdue: age,
        }
    }

    /// An observation from a part's own report on its turns.
    pub fn reported(check: &'static str, last: LastTurn) -> Self {
        let severity = last.problem.as_ref().map(|problem| problem.severity);
        Self {
            check,
            severity: match severity {
                Some(Severity::Finding | Severity::Warning) => Level::Warning,
                Some(Severity::Failure) | None => Level::Failure,
            },
            limit: Level::Failure,
            problem: last.problem.map(|problem| problem.reason),
            age: last.age,
            overdue: last.overdue,
            succeeded: last.succeeded,
        }
    }

    /// The same observation, limited to a warning.
    pub fn warning(self) -> Self {
        Self {
            limit: Level::Warning,
            ..self
        }
    }

    /// Keeps only those problems of the observation that show that the agent hangs: overdue reports, and the problems
    /// of the checks in [`HANGS`].
    #[must_use]
    pub fn of_hang(self) -> Self {
        let problem = self.problem.filter(|_| HANGS.contains(&self.check));
        Self { problem, ..self }
    }

    fn judged(self, now: Timestamp) -> Check {
        let stale = match self.overdue {
            age if age >= FAIL_AFTER => Level::Failure,
            age if age >= WARN_AFTER => Level::Warning,
            _ => Level::Ok,
        };
        let severity = self.problem.as_ref().map_or(Level::Ok, |_| self.severity);
        let silence = (stale > Level::Ok)
            .then(|| format!("no news for {}", duration_text(whole_seconds(self.age))));
        let said: Vec<String> = self.problem.into_iter().chain(silence).collect();
        Check {
            name: self.check.to_owned(),
            state: severity.max(stale).min(self.limit),
            msg: said.join("; "),
            // If the clock was set back past the machine's start, this time cannot be represented.
            last_updated: now.checked_sub(self.age).unwrap_or(now),
            last_success: self.succeeded.and_then(|age| now.checked_sub(age).ok()),
        }
    }
}

const fn whole_seconds(age: Duration) -> Duration {
    Duration::from_secs(age.as_secs())
}

/// Body of `GET /healthz` and `GET /livez`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Liveness {
    /// The worst of all checks.
    pub state: Level,
    /// Names of the failing checks.
    pub failing: Vec<String>,
    /// The problems of the worst checks, if any.
    pub msg: String,
    /// Time of the report (RFC 3339).
    pub current_time: Timestamp,
    /// All checks.
    pub checks: Vec<Check>,
}

/// One check of [`Liveness`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Check {
    /// Name of the check.
    pub name: String,
    /// State of the check.
    pub state: Level,
    /// The problem, if any.
    pub msg: String,
    /// When the check was last observed (RFC 3339).
    pub last_updated: Timestamp,
    /// When the check last succeeded, if known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_success: Option<Timestamp>,
}

impl Liveness {
    /// Computes the overall result of these observations at `now`.
    pub fn judge(observations: Vec<Observation>, now: Timestamp) -> Self {
        let checks: Vec<Check> = observations
            .into_iter()
            .map(|observation| observation.judged(now))
            .collect();
        let state = checks
            .iter()
            .map(|check| check.state)
            .max()
            .unwrap_or(Level::Ok);
        let worst = || checks.iter().filter(|check| check.state == state);
        let messages: Vec<String> = worst()
            .filter(|check| !check.msg.is_empty())
            .map(|check| format!("{}: {}", check.name, check.msg))
            .collect();
        Self {
            state,
            failing: worst()
                .filter(|check| check.state == Level::Failure)
                .map(|check| check.name.clone())
                .collect(),
            msg: messages.join("; "),
            current_time: now,
            checks,
        }
    }

    /// The checks that report a warning or a failure.
    pub fn problems(&self) -> Vec<AgentProblem> {
        let checks = self.checks.iter().filter(|check| check.state > Level::Ok);
        checks
            .map(|check| AgentProblem {
                check: check.name.clone(),
                is_failure: check.state == Level::Failure,
                message: check.msg.clone(),
            })
            .collect()
    }

    /// The response: 503 for a failure, otherwise 200.
    pub fn answer(&self) -> Answer {
        match serde_json::to_string(self) {
            Ok(body) => {
                let status = match self.state {
                    Level::Failure => StatusCode::SERVICE_UNAVAILABLE,
                    Level::Ok | Level::Warning => StatusCode::OK,
                };
                Answer::of_text(status, "application/json", body)
            }
            Err(error) => Answer::of_text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "text/plain",
                error.to_string(),
            ),
        }
    }
}

/// Treats a problem as a warning until there has been time to repair it.
#[derive(Debug, Default)]
pub struct Grace(Mutex<Option<Instant>>);

impl Grace {
    /// An observation of `check`, made at `now`.
    pub fn observe(
        &self,
        check: &'static str,
        problem: Option<String>,
        now: Instant,
    ) -> Observation {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = problem.as_ref().map(|_| since.unwrap_or(now));
        let observation = Observation::now(check, problem);
        match *since {
            Some(since) if now.saturating_duration_since(since) < REPAIR_TIME => {
                observation.warning()
            }
            _ => observation,
        }
    }
}

/// The problem with the API's socket at `path`, if it is gone or belongs to another process.
pub fn socket_problem(path: &Path) -> Option<String> {
    let shown = path.display();
    match listening_pid(path) {
        Ok(Some(pid)) if pid == std::process::id().cast_signed() => None,
        Ok(Some(pid)) => Some(format!(
            "the socket {shown} belongs to another process, pid {pid}"
        )),
        // A full backlog hides the listener's pid, but the waiting clients are being served.
        Ok(None) => None,
        Err(error) => Some(format!(
            "cannot connect to the socket {shown}: {error}; restart the agent"
        )),
    }
}

/// The process that listens at `path`; `None` if its backlog is full.
fn listening_pid(path: &Path) -> io::Result<Option<i32>> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        Ok(()) => Ok(Some(getsockopt(&socket, PeerCredentials)?.pid())),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use health_model::activity::Problem;

    use super::*;

    fn judged(observations: Vec<Observation>) -> (Liveness, StatusCode) {
        let liveness = Liveness::judge(observations, Timestamp::from_second(1_000).unwrap());
        let answer = liveness.answer();
        let mut written = Vec::new();
        (answer.body)(&mut written).unwrap();
        let body: Liveness = serde_json::from_slice(&written).unwrap();
        assert_eq!(body, liveness);
        (liveness, answer.status)
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_a_failure_is_unhealthy_and_the_check_is_named() {
        let fine = || Observation::now("maps", None);
        let broken = || Observation::now("datapath", Some("no device".to_owned()));
        let (liveness, status) = judged(vec![fine()]);
        assert_eq!((liveness.state, status), (Level::Ok, StatusCode::OK));
        assert_eq!(liveness.msg, "");

        let (liveness, status) = judged(vec![fine(), broken().warning()]);
        assert_eq!((liveness.state, status), (Level::Warning, StatusCode::OK));
        assert!(liveness.failing.is_empty());
        assert_eq!(liveness.msg, "datapath: no device");

        let other = Observation::now("registry", Some("gone".to_owned())).warning();
        let (liveness, status) = judged(vec![fine(), other, broken()]);
        assert_eq!(liveness.state, Level::Failure);
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(liveness.failing, ["datapath"]);
        assert_eq!(liveness.msg, "datapath: no device");
        assert_eq!(liveness.checks.len(), 3);
    }

    #[test]
    fn a_check_without_news_warns_and_then_fails() {
        for (age, level) in [
            (SECOND * 14, Level::Ok),
            (SECOND * 15, Level::Warning),
            (SECOND * 59, Level::Warning),
            (SECOND * 60, Level::Failure),
        ] {
            let (liveness, _) = judged(vec![Observation::aged("prober", None, age)]);
            assert_eq!(liveness.state, level, "{age:?}");
            let seen = liveness.checks[0].last_updated.as_second();
            assert_eq!(seen, 1_000 - age.as_secs() as i64);
            let (liveness, _) = judged(vec![Observation::aged("registry", None, age).warning()]);
            assert_eq!(liveness.state, level.min(Level::Warning), "{age:?}");
        }
        let (liveness, _) = judged(vec![Observation::aged("prober", None, SECOND * 75)]);
        assert_eq!(liveness.msg, "prober: no news for 1m15s");
    }

    #[test]
    fn only_what_does_not_answer_is_a_hang() {
        let problem = || Some("why".to_owned());
        for (observation, is_hang) in [
            (Observation::now("datapath", problem()), false),
            (Observation::aged("prober", problem(), SECOND * 59), false),
            (Observation::aged("prober", None, SECOND * 60), true),
            (Observation::now("api-socket", problem()), true),
            (Observation::now("responders", problem()), true),
            (Observation::now("services", problem()).warning(), false),
        ] {
            let named = format!("{observation:?}");
            let (liveness, _) = judged(vec![observation.of_hang()]);
            assert_eq!(liveness.state == Level::Failure, is_hang, "{named}");
        }
    }

    #[test]
    fn what_a_part_says_of_its_turns_is_its_check() {
        let reported = |problem, overdue| {
            let last = LastTurn {
                age: SECOND * 100,
                overdue,
                succeeded: Some(SECOND * 200),
                problem,
            };
            judged(vec![Observation::reported("routes", last)]).0
        };
        let fine = reported(None, Duration::ZERO);
        assert_eq!((fine.state, fine.problems()), (Level::Ok, Vec::new()));
        assert_eq!(fine.checks[0].last_updated.as_second(), 900);
        let succeeded = fine.checks[0].last_success.unwrap();
        assert_eq!(succeeded.as_second(), 800);
        // A part without a problem may still be overdue.
        assert_eq!(reported(None, SECOND * 15).state, Level::Warning);
        assert_eq!(reported(None, SECOND * 60).state, Level::Failure);
        for (problem, level) in [
            (Problem::finding("why"), Level::Warning),
            (Problem::warning("why"), Level::Warning),
            (Problem::failure("why"), Level::Failure),
        ] {
            let hanging = reported(Some(problem.clone()), SECOND * 60);
            assert_eq!(hanging.state, Level::Failure);
            assert_eq!(hanging.msg, "routes: why; no news for 1m40s");
            let reported = reported(Some(problem), Duration::ZERO);
            assert_eq!(
                (reported.state, reported.msg.as_str()),
                (level, "routes: why")
            );
            let problem = AgentProblem {
                check: "routes".to_owned(),
                is_failure: level == Level::Failure,
                message: "why".to_owned(),
            };
            assert_eq!(reported.problems(), [problem]);
        }
    }

    #[test]
    fn what_is_soon_put_right_is_no_failure() {
        let grace = Grace::default();
        let start = Instant::now();
        let problem = || Some("gone".to_owned());
        let worst = |problem, after| grace.observe("maps", problem, start + after).limit;
        assert_eq!(worst(problem(), Duration::ZERO), Level::Warning);
        assert_eq!(worst(problem(), SECOND), Level::Warning);
        assert_eq!(grace.observe("maps", None, start + SECOND).problem, None);
        assert_eq!(worst(problem(), SECOND * 3), Level::Warning);
        assert_eq!(worst(problem(), SECOND * 5), Level::Failure);
    }

    #[test]
    fn a_socket_is_ours_as_long_as_we_listen_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let gone = socket_problem(&path).unwrap();
        assert!(gone.contains(&path.display().to_string()), "{gone}");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(socket_problem(&path), None);
        drop(listener);
        assert!(socket_problem(&path).is_some());
    }
}
