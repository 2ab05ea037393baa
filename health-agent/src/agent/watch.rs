//! Checks what other processes can break, twice a second and whenever devices, addresses or routes change. Reports and
//! repairs faults, with growing pauses while a repair fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use health_model::causes::with_causes;
use health_net::KernelError;
use health_net::changes::Changes;
use tokio::time::sleep_until;
use tracing::{error, warn};

use super::node::NodeDatapath;
use super::state::AgentSource;

/// Time between two checks.
pub(super) const PERIOD: Duration = Duration::from_millis(500);
/// Minimum time between two checks caused by changes: some hosts' routes change all the time.
pub(super) const CHANGES_PERIOD: Duration = Duration::from_millis(100);
/// After this time without a repair, assume that no other process undoes repairs.
const CALM: Duration = Duration::from_secs(2);
/// Longest pause after failed repairs.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A completed repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CompletedRepair {
    /// A short fixed word to count by.
    pub(super) cause: &'static str,
    /// What was wrong, in words.
    pub(super) what: String,
}

/// The part of an outcome that concerns the health endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointOutcome {
    /// What was repaired, in words.
    pub(super) repaired: Vec<String>,
    /// Why its devices or their configuration are not in order.
    pub(super) connection_problem: Option<String>,
    /// What is wrong with its programs.
    pub(super) program_problem: Option<String>,
}

/// The outcome of one check.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// The part that concerns the health endpoint.
    pub(super) endpoint: EndpointOutcome,
    /// What was repaired.
    pub(super) repaired: Vec<CompletedRepair>,
    /// Workload endpoints with programs that are not attached and could not be.
    pub(super) without_programs: BTreeSet<u16>,
    /// Why something could not be repaired.
    pub(super) failure: Option<String>,
    /// Things that others removed and have to restore.
    pub(super) missing: Vec<String>,
    /// What is served without programs that would make it faster, in words.
    pub(super) slower: Option<String>,
}

impl Outcome {
    /// Records something that could not be repaired.
    pub(super) fn fail(&mut self, error: anyhow::Error) {
        let failure = self.failure.get_or_insert_default();
        let text = with_causes(error.as_ref());
        // If the same attempt is made in two places, it fails in both.
        if failure.contains(&text) {
            return;
        }
        if !failure.is_empty() {
            failure.push_str("; ");
        }
        failure.push_str(&text);
    }

    /// Everything that is not in order, in words.
    pub(super) fn problem(&self) -> Option<String> {
        let problems: Vec<&str> = self
            .missing
            .iter()
            .chain(&self.failure)
            .map(String::as_str)
            .collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }
}

/// Notifications that trigger an early check.
pub(super) struct News {
    /// `None` once no more notifications can arrive.
    changes: Option<Changes>,
    /// Minimum time between two checks.
    pause: Duration,
    not_before: tokio::time::Instant,
    last_repair: Option<tokio::time::Instant>,
}

impl News {
    /// Covers changes from now on.
    pub(super) fn new(changes: Result<Changes, KernelError>) -> Self {
        Self {
            changes: changes
                .inspect_err(|error| {
                    warn!(%error, "device changes are detected only by polling");
                })
                .ok(),
            pause: CHANGES_PERIOD,
            not_before: tokio::time::Instant::now(),
            last_repair: None,
        }
    }

    /// Waits until something has changed and the next check is allowed.
    pub(super) async fn next(&mut self) {
        sleep_until(self.not_before).await;
        let Some(changes) = &mut self.changes else {
            return std::future::pending().await;
        };
        if let Err(error) = changes.next().await {
            warn!(%error, "the kernel no longer reports device changes; they are detected only by polling");
            self.changes = None;
        }
        self.not_before = tokio::time::Instant::now() + self.pause;
    }

    /// Records the outcome of a check, whatever triggered it. If another process keeps breaking what was repaired, the
    /// pauses grow to the usual [`PERIOD`]. A repair is itself a change that triggers a check, so one check without a
    /// repair does not reset the pause.
    pub(super) fn pace(&mut self, has_repaired: bool) {
        let now = tokio::time::Instant::now();
        if has_repaired {
            self.pause = (self.pause * 2).min(PERIOD);
            self.last_repair = Some(now);
            self.not_before = now + self.pause;
        } else if self.last_repair.is_none_or(|at| now - at >= CALM) {
            self.pause = CHANGES_PERIOD;
        }
    }
}

/// Checks and repairs everything. Reports new faults of the health endpoint first: repairing them may take seconds.
pub(super) async fn repair(node: &mut NodeDatapath, source: &AgentSource) -> Outcome {
    let mut outcome = Outcome::default();
    if let Err(error) = node.look_at_uplinks(&mut outcome).await {
        outcome.fail(error);
    }
    let faults = node.endpoint_faults().await;
    if let Ok(faults) = &faults
        && let Some(problem) = node.news_of(faults)
    {
        source.note_faults(node, problem);
    }
    let repaired = match faults {
        Ok(faults) => node.repair_endpoint(faults, &mut outcome).await,
        Err(error) => Err(error),
    };
    if let Err(error) = repaired {
        outcome.endpoint.connection_problem = Some(with_causes(error.as_ref()));
        outcome.fail(error);
    }
    if let Err(error) = node.repair_datapath(&mut outcome) {
        outcome.fail(error);
    }
    let has_changed = !outcome.repaired.is_empty() || outcome.failure.is_some();
    if has_changed && let Err(error) = node.release_foreign_device().await {
        outcome.fail(error);
    }
    node.note_programs(&mut outcome);
    for CompletedRepair { cause, what } in &outcome.repaired {
        warn!(cause, "repaired: {what}");
        *node.repairs.entry((*cause).to_owned()).or_default() += 1;
    }
    outcome
}

/// Doubling pauses between failing attempts.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    pause: Option<Duration>,
    next: Option<Instant>,
    last_problem: Option<String>,
    last_slower: Option<String>,
}

impl Backoff {
    /// Whether the next check is due.
    pub(super) fn is_due(&self) -> bool {
        self.next.is_none_or(|next| Instant::now() >= next)
    }

    /// Records the outcome of a check, and logs problems that are new. Checks for missing things are not paused.
    pub(super) fn note(&mut self, outcome: &Outcome) {
        let problem = outcome.problem();
        self.pause = outcome.failure.as_ref().map(|_| {
            self.pause
                .map_or(PERIOD, |pause| (pause * 2).min(LONGEST_PAUSE))
        });
        self.next = self.pause.map(|pause| Instant::now() + pause);
        if let Some(problem) = &problem
            && self.last_problem.as_ref() != Some(problem)
        {
            let retry_in = self.pause.unwrap_or(PERIOD);
            error!(cause = problem, ?retry_in, "cannot repair");
        }
        self.last_problem = problem;
        if let Some(slower) = &outcome.slower
            && self.last_slower.as_ref() != Some(slower)
        {
            warn!("{slower}");
        }
        self.last_slower.clone_from(&outcome.slower);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_end_with_success() {
        let failed = Outcome {
            failure: Some("no".to_owned()),
            ..Outcome::default()
        };
        let mut backoff = Backoff::default();
        assert!(backoff.is_due());
        let mut pauses = Vec::new();
        for _ in 0..7 {
            backoff.note(&failed);
            pauses.push(backoff.pause.expect("a pause").as_millis());
            assert!(!backoff.is_due());
        }
        assert_eq!(pauses, [500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000]);
        backoff.note(&Outcome::default());
        assert!(backoff.is_due());
    }

    #[tokio::test(start_paused = true)]
    async fn looks_because_of_news_slow_down_while_somebody_undoes_repairs() {
        let mut news = News {
            changes: None,
            pause: CHANGES_PERIOD,
            not_before: tokio::time::Instant::now(),
            last_repair: None,
        };
        let mut pauses = Vec::new();
        for _ in 0..4 {
            news.pace(true);
            // The repair also counts as a change.
            news.pace(false);
            pauses.push(news.pause.as_millis());
        }
        assert_eq!(pauses, [200, 400, 500, 500]);
        tokio::time::advance(CALM).await;
        news.pace(false);
        assert_eq!(news.pause, CHANGES_PERIOD);
    }

    #[test]
    fn what_is_missing_is_told_and_looked_for_without_pauses() {
        let missing = Outcome {
            missing: vec!["uplink eth1 does not exist".to_owned()],
            ..Outcome::default()
        };
        let mut backoff = Backoff::default();
        backoff.note(&missing);
        assert!(backoff.is_due());
        let both = Outcome {
            failure: Some("no".to_owned()),
            ..missing
        };
        assert_eq!(
            both.problem().as_deref(),
            Some("uplink eth1 does not exist; no")
        );
        backoff.note(&both);
        assert!(!backoff.is_due());
    }
}
