//! Decides when a target's verdict changes: one lost probe is loss, several in a row are an outage. Pure: time is
//! passed in as the duration since the start.
//!
//! If a reachable target does not answer a probe within its patience, or answers with an error, it is probed again a
//! few times. Any answer to these probes, or a late answer to the first one, clears it. The target becomes unreachable
//! only if no answer has arrived by the end of the window, shortly before the first probe's time-out. An unreachable
//! target that answers must answer another probe before it counts as reachable again. A new target takes the verdict of
//! its first result.

use std::collections::BTreeSet;
use std::time::Duration;

use health_model::pace::Budget;
use slotmap::SecondaryMap;

use super::failure::Failure;
use super::target::TargetId;

/// Maximum number of probes that confirm one change.
const REPROBES: u32 = 4;
/// Maximum time between two confirming probes. Four such gaps outlast a short burst of losses, and the restart of an
/// agent.
const REPROBE_GAP: Duration = Duration::from_millis(200);
/// Pause between an unreachable target's first answer and the probe that confirms its recovery.
const RECOVERY_PAUSE: Duration = Duration::from_millis(100);
/// Minimum patience, however short the round trips are: hosts can be busy.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// Fraction of a probe's time-out within which a failure is confirmed.
const WINDOW: (u32, u32) = (9, 10);
/// Time to confirm a change that was not raised by a waiting probe.
const FREE_WINDOW: Duration = Duration::from_millis(900);
/// If very many targets fail at once and the budget delays probes by more than this, the second and later reprobes of a
/// target are dropped in favour of the first reprobes of others.
const MAX_LAG: Duration = Duration::from_millis(100);

/// What a probe's result means for its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// The target is reachable.
    Reachable,
    /// The target is unreachable.
    Unreachable,
    /// The reported verdict stays: a change is being confirmed, or the result is outdated.
    Unchanged,
}

/// An action that is due now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Send a probe, and report it with [`Confirmation::sent`].
    Reprobe(TargetId),
    /// The failure is confirmed.
    Unreachable {
        id: TargetId,
        /// When the last probe to the target was sent.
        sent: Duration,
        /// The last error received; a time-out if there was only silence.
        failure: Failure,
    },
    /// An unreachable target answered once, but not again.
    NotRecovered(TargetId),
}

/// The verdicts on all targets, and the changes being confirmed.
#[derive(Debug, Default)]
pub(super) struct Confirmation {
    targets: SecondaryMap<TargetId, Target>,
    /// When the next confirming probe may be sent, if the budget allows.
    reprobes: Timers,
    /// When the patience or the confirmation window ends.
    deadlines: Timers,
}

#[derive(Debug, Default)]
struct Target {
    /// `None` before the first result.
    reachable: Option<bool>,
    phase: Phase,
    rtt: Option<SmoothedRtt>,
    /// When the latest answered probe was sent.
    answered: Option<Duration>,
    /// Probes sent since the last answer.
    unanswered: u32,
    /// When the first unanswered probe was sent.
    unanswered_since: Duration,
    /// When the last probe was sent.
    sent: Option<Duration>,
}

#[derive(Debug, Default)]
enum Phase {
    /// Nothing is pending.
    #[default]
    Steady,
    /// A probe to a reachable target has not been answered yet.
    Waiting {
        sent: Duration,
        /// Time since then within which a failure is confirmed.
        window: Duration,
    },
    /// A change is being confirmed.
    Doubt(Box<Doubt>),
}

/// A change that is being confirmed: the failure of a reachable target, or the recovery of an unreachable one.
#[derive(Debug)]
struct Doubt {
    /// Results of earlier probes are ignored.
    since: Duration,
    /// When the last probe was sent.
    last_sent: Duration,
    /// Confirming probes sent so far.
    reprobes: u32,
    /// When the last of them was sent.
    last_reprobe: Duration,
    gap: Duration,
    /// When the change is decided if no answer arrives, provided that a confirming probe was sent by then.
    ends: Duration,
    patience: Duration,
    /// Probes that were answered with an error.
    errors: u32,
    failure: Failure,
}

impl Confirmation {
    /// Reserves capacity for `targets` targets in total.
    pub(super) fn reserve(&mut self, targets: usize) {
        self.targets.set_capacity(targets);
    }

    /// Adds a new target.
    pub(super) fn insert(&mut self, id: TargetId) {
        self.targets.insert(id, Target::default());
    }

    /// Removes a target.
    pub(super) fn remove(&mut self, id: TargetId) {
        self.targets.remove(id);
        self.reprobes.cancel(id);
        self.deadlines.cancel(id);
    }

    /// Records that a probe was sent that waits for an answer until `expires`.
    pub(super) fn sent(&mut self, id: TargetId, now: Duration, expires: Duration) {
        let Some(target) = self.targets.get_mut(id) else {
            return;
        };
        if target.unanswered == 0 {
            target.unanswered_since = now;
        }
        target.unanswered = target.unanswered.saturating_add(1);
        target.sent = Some(now);
        match &mut target.phase {
            Phase::Steady if target.reachable == Some(true) => {
                let (part, whole) = WINDOW;
                let window = expires.saturating_sub(now) * part / whole;
                self.deadlines.set(id, now + target.patience(window));
                target.phase = Phase::Waiting { sent: now, window };
            }
            Phase::Steady | Phase::Waiting { .. } => {}
            Phase::Doubt(doubt) => doubt.last_sent = now,
        }
    }

    /// Records that a requested probe was not sent because of a local problem. A confirming probe becomes due again at
    /// `retry`.
    pub(super) fn withdrawn(&mut self, id: TargetId, retry: Duration) {
        let Some(target) = self.targets.get_mut(id) else {
            return;
        };
        target.unanswered = target.unanswered.saturating_sub(1);
        match &mut target.phase {
            Phase::Steady => {}
            Phase::Waiting { .. } => {
                target.phase = Phase::Steady;
                self.deadlines.cancel(id);
            }
            Phase::Doubt(doubt) => {
                doubt.reprobes = doubt.reprobes.saturating_sub(1);
                self.reprobes.set(id, retry);
                if doubt.reprobes == 0 {
                    self.deadlines.cancel(id);
                }
            }
        }
    }

    /// Records the answer to a probe sent at `sent`.
    pub(super) fn answered(
        &mut self,
        id: TargetId,
        sent: Duration,
        rtt: Duration,
        now: Duration,
    ) -> Judgement {
        let Some(target) = self.targets.get_mut(id) else {
            return Judgement::Unchanged;
        };
        target.unanswered = 0;
        target.answered = target.answered.max(Some(sent));
        SmoothedRtt::update(&mut target.rtt, rtt);
        let (settled, judgement) = match (target.reachable, &target.phase) {
            (Some(false), Phase::Doubt(doubt)) if sent < doubt.since => {
                (false, Judgement::Unchanged)
            }
            (Some(false), Phase::Steady | Phase::Waiting { .. }) => {
                let patience = target.patience(FREE_WINDOW);
                target.phase = Phase::Doubt(Box::new(Doubt {
                    since: now,
                    last_sent: sent,
                    reprobes: 0,
                    last_reprobe: now,
                    gap: REPROBE_GAP,
                    ends: now + FREE_WINDOW,
                    patience,
                    errors: 0,
                    failure: Failure::TimedOut,
                }));
                self.reprobes.set(id, now + RECOVERY_PAUSE);
                (false, Judgement::Unchanged)
            }
            (Some(true), Phase::Waiting { sent: since, .. }) => {
                (sent >= *since, Judgement::Reachable)
            }
            (Some(true), Phase::Doubt(doubt)) => (sent >= doubt.since, Judgement::Reachable),
            _ => (true, Judgement::Reachable),
        };
        if settled {
            self.settle(id, true);
        }
        judgement
    }

    /// Records the failure of a probe sent at `sent`.
    pub(super) fn failed(
        &mut self,
        id: TargetId,
        sent: Duration,
        failure: &Failure,
        now: Duration,
    ) -> Judgement {
        let error = !failure.is_silence();
        let Some(target) = self.targets.get_mut(id) else {
            return Judgement::Unchanged;
        };
        match (target.reachable, &mut target.phase) {
            (None, _) => {
                self.settle(id, false);
                Judgement::Unreachable
            }
            (Some(true), Phase::Steady) => {
                if error && Some(sent) > target.answered {
                    self.begin_doubt(id, sent, FREE_WINDOW, now, Some(failure));
                }
                Judgement::Unchanged
            }
            (
                Some(true),
                &mut Phase::Waiting {
                    sent: since,
                    window,
                },
            ) => {
                if sent >= since {
                    self.begin_doubt(id, sent, window, now, Some(failure));
                }
                Judgement::Unchanged
            }
            (Some(true), Phase::Doubt(doubt)) => {
                if sent < doubt.since {
                    return Judgement::Unchanged;
                }
                if !doubt.failure.outlives(failure) {
                    doubt.failure = failure.clone();
                }
                doubt.errors += u32::from(error);
                // Decides early only if no pending probe can still be answered. Errors of regular probes count too, but
                // do not shorten the wait.
                let last = doubt.reprobes == REPROBES && sent >= doubt.last_reprobe;
                if !last || doubt.errors <= REPROBES {
                    return Judgement::Unchanged;
                }
                self.settle(id, false);
                Judgement::Unreachable
            }
            (Some(false), Phase::Doubt(doubt)) if !error || sent < doubt.since => {
                Judgement::Unchanged
            }
            (Some(false), _) => {
                self.settle(id, false);
                Judgement::Unreachable
            }
        }
    }

    /// Number of probes sent to a target since its last answer.
    pub(super) fn unanswered(&self, id: TargetId) -> u32 {
        self.targets.get(id).map_or(0, |target| target.unanswered)
    }

    /// When the first unanswered probe was sent.
    pub(super) fn unanswered_since(&self, id: TargetId) -> Duration {
        let since = self.targets.get(id).map(|target| target.unanswered_since);
        since.unwrap_or_default()
    }

    /// Returns since when a reachable target has not answered, if its failure is being confirmed and only the first
    /// confirming probe was sent.
    pub(super) fn first_doubt(&self, id: TargetId) -> Option<Duration> {
        let target = self.targets.get(id)?;
        match &target.phase {
            Phase::Doubt(doubt) if target.reachable == Some(true) && doubt.reprobes == 1 => {
                Some(doubt.since)
            }
            _ => None,
        }
    }

    /// Whether no probe was sent to the target since `since`.
    pub(super) fn not_probed_since(&self, id: TargetId, since: Duration) -> bool {
        let sent = self.targets.get(id).and_then(|target| target.sent);
        sent.is_none_or(|sent| sent < since)
    }

    /// Whether a change of the target's verdict is being confirmed.
    pub(super) fn in_doubt(&self, id: TargetId) -> bool {
        self.targets
            .get(id)
            .is_some_and(|target| matches!(target.phase, Phase::Doubt(_)))
    }

    /// When the next action is due.
    pub(super) fn next_due(&self, budget: &Budget) -> Option<Duration> {
        let reprobe = self.reprobes.first().map(|at| at.max(budget.ready()));
        let deadline = self.deadlines.first();
        reprobe.into_iter().chain(deadline).min()
    }

    /// Returns the next action that is due, `None` if there are no more. Confirming probes are taken from `budget`.
    pub(super) fn poll(&mut self, now: Duration, budget: &mut Budget) -> Option<Due> {
        while let Some((_, id)) = self.deadlines.pop_due(now) {
            let Some(target) = self.targets.get_mut(id) else {
                continue;
            };
            match &target.phase {
                Phase::Steady => {}
                &Phase::Waiting { sent, window } => self.begin_doubt(id, sent, window, now, None),
                Phase::Doubt(doubt) => {
                    let due = match target.reachable {
                        Some(true) => Due::Unreachable {
                            id,
                            sent: doubt.last_sent,
                            failure: doubt.failure.clone(),
                        },
                        _ => Due::NotRecovered(id),
                    };
                    self.settle(id, false);
                    return Some(due);
                }
            }
        }
        while budget.allows(now)
            && let Some((at, id)) = self.reprobes.pop_due(now)
        {
            let target = self.targets.get_mut(id);
            if let Some(Phase::Doubt(doubt)) = target.map(|target| &mut target.phase) {
                if doubt.reprobes > 0 && now > at + MAX_LAG {
                    continue;
                }
                budget.take(now);
                doubt.reprobes += 1;
                doubt.last_reprobe = now;
                // Each probe gets the full time for an answer, even if the budget delayed it.
                doubt.ends = doubt.ends.max(now + doubt.patience);
                self.deadlines.set(id, doubt.ends);
                let next = now + doubt.gap;
                if doubt.reprobes < REPROBES && next < doubt.ends {
                    self.reprobes.set(id, next);
                }
                return Some(Due::Reprobe(id));
            }
        }
        None
    }

    /// Starts to confirm a failure of the probe sent at `since`.
    fn begin_doubt(
        &mut self,
        id: TargetId,
        since: Duration,
        window: Duration,
        now: Duration,
        failure: Option<&Failure>,
    ) {
        let Some(target) = self.targets.get_mut(id) else {
            return;
        };
        let patience = target.patience(window);
        let first = now.max(since + patience);
        // Counts from the time of the first reprobe as if that probe were sent on time: the agent may be delayed.
        let ends = first + (window - patience);
        target.phase = Phase::Doubt(Box::new(Doubt {
            since,
            last_sent: since,
            reprobes: 0,
            last_reprobe: since,
            gap: (ends.saturating_sub(first + patience) / REPROBES).min(REPROBE_GAP),
            ends,
            patience,
            errors: u32::from(failure.is_some_and(|failure| !failure.is_silence())),
            failure: failure.cloned().unwrap_or(Failure::TimedOut),
        }));
        self.deadlines.cancel(id);
        self.reprobes.set(id, first);
    }

    fn settle(&mut self, id: TargetId, reachable: bool) {
        if let Some(target) = self.targets.get_mut(id) {
            target.reachable = Some(reachable);
            target.phase = Phase::Steady;
        }
        self.reprobes.cancel(id);
        self.deadlines.cancel(id);
    }
}

impl Target {
    /// How long to wait for an answer before probing the target again, if failures are confirmed within `window`. At
    /// most a third of the window: the confirming probes and their answers need time.
    fn patience(&self, window: Duration) -> Duration {
        let usual = self.rtt.as_ref().map_or(Duration::ZERO, SmoothedRtt::limit);
        usual.max(LEAST_PATIENCE).min(window / 3)
    }
}

/// The smoothed round-trip time and its variation, as in TCP (RFC 6298).
#[derive(Debug)]
struct SmoothedRtt {
    mean: Duration,
    deviation: Duration,
}

impl SmoothedRtt {
    fn update(smoothed: &mut Option<Self>, rtt: Duration) {
        *smoothed = Some(match smoothed.take() {
            None => Self {
                mean: rtt,
                deviation: rtt / 2,
            },
            Some(before) => Self {
                mean: (before.mean * 7 + rtt) / 8,
                deviation: (before.deviation * 3 + before.mean.abs_diff(rtt)) / 4,
            },
        });
    }

    /// Upper bound that round trips rarely exceed.
    fn limit(&self) -> Duration {
        self.mean + self.deviation * 4
    }
}

/// One timer per target.
#[derive(Debug, Default)]
struct Timers {
    by_target: SecondaryMap<TargetId, Duration>,
    by_time: BTreeSet<(Duration, TargetId)>,
}

impl Timers {
    fn set(&mut self, id: TargetId, at: Duration) {
        self.cancel(id);
        self.by_target.insert(id, at);
        self.by_time.insert((at, id));
    }

    fn cancel(&mut self, id: TargetId) {
        if let Some(at) = self.by_target.remove(id) {
            self.by_time.remove(&(at, id));
        }
    }

    fn first(&self) -> Option<Duration> {
        self.by_time.first().map(|&(at, _)| at)
    }

    fn pop_due(&mut self, now: Duration) -> Option<(Duration, TargetId)> {
        let &(at, id) = self.by_time.first()?;
        if at > now {
            return None;
        }
        self.cancel(id);
        Some((at, id))
    }
}

#[cfg(test)]
mod tests;
