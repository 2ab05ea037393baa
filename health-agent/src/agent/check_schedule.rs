//! Schedules checks of everything that other processes can break: periodically, soon after changes, and with growing
//! pauses while repairs fail.

use std::time::{Duration, Instant};

use health_net::KernelError;
use health_net::changes::Changes;
use tokio::time::sleep_until;
use tracing::{error, warn};

use super::outcome::Outcome;

/// Time between two checks.
pub(super) const PERIOD: Duration = Duration::from_millis(500);
/// Minimum time between two checks triggered by changes, because routes on some hosts change all the time.
pub(super) const CHANGES_PERIOD: Duration = Duration::from_millis(100);
/// After this time without a repair, assume that no other process undoes repairs.
const CALM: Duration = Duration::from_secs(2);
/// Longest pause after failed repairs.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Notifications that trigger an early check.
pub(super) struct ChangeTrigger {
    /// `None` once no more notifications can arrive.
    changes: Option<Changes>,
    /// Minimum time between two checks.
    pause: Duration,
    not_before: tokio::time::Instant,
    last_repair: Option<tokio::time::Instant>,
}

impl ChangeTrigger {
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

    /// Records the outcome of a check, whatever triggered it. If another process keeps undoing repairs, the pauses grow
    /// to the usual [`PERIOD`]. A repair is itself a change that triggers a check, so one check without a repair does
    /// not reset the pause.
    pub(super) fn note_outcome(&mut self, has_repaired: bool) {
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

/// Pauses between failing attempts, each twice as long as the one before.
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

    /// Records the outcome of a check and logs new problems. Missing objects alone do not delay the next check.
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
        let mut trigger = ChangeTrigger {
            changes: None,
            pause: CHANGES_PERIOD,
            not_before: tokio::time::Instant::now(),
            last_repair: None,
        };
        let mut pauses = Vec::new();
        for _ in 0..4 {
            trigger.note_outcome(true);
            // The repair also counts as a change.
            trigger.note_outcome(false);
            pauses.push(trigger.pause.as_millis());
        }
        assert_eq!(pauses, [200, 400, 500, 500]);
        tokio::time::advance(CALM).await;
        trigger.note_outcome(false);
        assert_eq!(trigger.pause, CHANGES_PERIOD);
    }

    #[test]
    fn what_is_missing_is_reported_and_looked_for_without_pauses() {
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
