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
/// Maximum time between two of them. Four of them outlast a short burst of losses, and the restart of an agent.
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
    /// The shown verdict stays: a change is being confirmed, or the result is outdated.
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
    /// A reachable target was sent a probe.
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
    /// When it is decided if no answer arrives, provided a confirming probe was sent by then.
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

    /// Records that a probe was sent, which waits for its answer until `expires`.
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
                // No pending probe could still be answered. Errors of regular probes count too, but do not shorten the
                // wait.
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

    /// When the first of them was sent.
    pub(super) fn unanswered_since(&self, id: TargetId) -> Duration {
        let since = self.targets.get(id).map(|target| target.unanswered_since);
        since.unwrap_or_default()
    }

    /// Whether a failure of a target that was reachable is being confirmed by its first probe; if so, since when it has
    /// not answered.
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
        // Counted from the first reprobe as if that was sent on time: the agent may have been delayed.
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
mod tests {
    use nix::errno::Errno;
    use proptest::prelude::*;
    use slotmap::KeyData;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);
    const RTT: Duration = Duration::from_millis(1);

    fn target(number: u32) -> TargetId {
        KeyData::from_ffi((1 << 32) | u64::from(number)).into()
    }

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn refused() -> Failure {
        Failure::Os(Errno::ECONNREFUSED)
    }

    /// The fate of a probe.
    #[derive(Clone, Debug)]
    enum Fate {
        Answered,
        Refused,
        Lost,
    }

    /// A target, its network, and a clock that stops at every event.
    struct Bed {
        confirmation: Confirmation,
        budget: Budget,
        now: Duration,
        /// Probes in flight, with the time at which their outcome arrives.
        waiting: Vec<(Duration, Duration, Fate)>,
        sent: Vec<Duration>,
        /// Verdicts with their times, newest first.
        verdicts: Vec<(Duration, bool)>,
    }

    impl Bed {
        fn reachable() -> Self {
            let mut confirmation = Confirmation::default();
            confirmation.insert(target(1));
            let mut bed = Self {
                confirmation,
                budget: Budget::new(1000),
                now: Duration::ZERO,
                waiting: Vec::new(),
                sent: Vec::new(),
                verdicts: Vec::new(),
            };
            bed.probe(Fate::Answered);
            bed.run_until(millis(10), || Fate::Answered);
            assert_eq!(bed.verdicts, [(RTT, true)]);
            bed.verdicts.clear();
            bed.sent.clear();
            bed
        }

        fn unreachable() -> Self {
            let mut bed = Self::reachable();
            bed.probe(Fate::Lost);
            bed.run_until(millis(3000), || Fate::Lost);
            assert!(!bed.verdicts[0].1);
            bed.verdicts.clear();
            bed.sent.clear();
            bed
        }

        fn probe(&mut self, fate: Fate) {
            let heard = match fate {
                Fate::Answered | Fate::Refused => self.now + RTT,
                Fate::Lost => self.now + TIMEOUT,
            };
            self.waiting.push((heard, self.now, fate));
            self.sent.push(self.now);
            self.confirmation
                .sent(target(1), self.now, self.now + TIMEOUT);
        }

        fn judged(&mut self, judgement: Judgement) {
            let reachable = match judgement {
                Judgement::Reachable => true,
                Judgement::Unreachable => false,
                Judgement::Unchanged => return,
            };
            if self.verdicts.first().is_none_or(|last| last.1 != reachable) {
                self.verdicts.insert(0, (self.now, reachable));
            }
        }

        fn run_until(&mut self, end: Duration, mut fate: impl FnMut() -> Fate) {
            loop {
                let heard = self.waiting.iter().map(|&(heard, ..)| heard).min();
                let due = self.confirmation.next_due(&self.budget);
                let next = heard.into_iter().chain(due).min();
                let Some(next) = next.filter(|&at| at <= end) else {
                    self.now = end;
                    return;
                };
                self.now = self.now.max(next);
                let now = self.now;
                let heard: Vec<_> = self
                    .waiting
                    .extract_if(.., |probe| probe.0 <= now)
                    .collect();
                for (_, sent, fate) in heard {
                    let judgement = match fate {
                        Fate::Answered => self.confirmation.answered(target(1), sent, RTT, now),
                        Fate::Refused => self.confirmation.failed(target(1), sent, &refused(), now),
                        Fate::Lost => {
                            let failure = Failure::TimedOut;
                            self.confirmation.failed(target(1), sent, &failure, now)
                        }
                    };
                    self.judged(judgement);
                }
                while let Some(due) = self.confirmation.poll(now, &mut self.budget) {
                    match due {
                        Due::Reprobe(_) => self.probe(fate()),
                        Due::Unreachable { .. } => self.judged(Judgement::Unreachable),
                        Due::NotRecovered(_) => {}
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_result_of_a_new_target_is_its_verdict() {
        let mut confirmation = Confirmation::default();
        confirmation.insert(target(1));
        confirmation.sent(target(1), Duration::ZERO, TIMEOUT);
        assert_eq!(confirmation.next_due(&Budget::new(1000)), None);
        let failed = confirmation.failed(target(1), Duration::ZERO, &Failure::TimedOut, TIMEOUT);
        assert_eq!(failed, Judgement::Unreachable);
        assert_eq!(confirmation.unanswered(target(1)), 1);
    }

    #[test]
    fn the_first_probe_that_confirms_a_failure_is_told_from_the_next() {
        let mut bed = Bed::reachable();
        let lost = bed.now;
        assert!(bed.confirmation.not_probed_since(target(1), lost));
        bed.probe(Fate::Lost);
        assert!(!bed.confirmation.not_probed_since(target(1), lost));
        assert_eq!(bed.confirmation.first_doubt(target(1)), None);
        bed.run_until(lost + millis(60), || Fate::Lost);
        assert_eq!(bed.sent, [lost, lost + LEAST_PATIENCE]);
        assert_eq!(bed.confirmation.first_doubt(target(1)), Some(lost));
        bed.run_until(lost + millis(300), || Fate::Lost);
        assert_eq!(bed.confirmation.first_doubt(target(1)), None);
        assert_eq!(bed.confirmation.unanswered_since(target(1)), lost);
    }

    #[test]
    fn silence_is_confirmed_within_a_second_of_the_first_lost_probe() {
        let mut bed = Bed::reachable();
        let lost = bed.now;
        bed.probe(Fate::Lost);
        bed.run_until(millis(3000), || Fate::Lost);
        assert_eq!(bed.verdicts, [(lost + millis(900), false)]);
        let sent: Vec<_> = bed.sent.iter().map(|&at| at - lost).collect();
        assert_eq!(sent, [0, 50, 250, 450, 650].map(millis));
        assert_eq!(bed.confirmation.unanswered(target(1)), 5);
    }

    #[test]
    fn refusals_are_confirmed_as_soon_as_all_probes_are_refused() {
        let mut bed = Bed::reachable();
        let lost = bed.now;
        bed.probe(Fate::Refused);
        bed.run_until(millis(3000), || Fate::Refused);
        assert_eq!(bed.verdicts, [(lost + millis(650) + RTT, false)]);
    }

    #[test]
    fn an_answer_that_may_still_come_is_waited_for_whatever_is_refused_meanwhile() {
        let mut bed = Bed::reachable();
        let lost = bed.now;
        bed.probe(Fate::Lost);
        bed.run_until(millis(3000), || Fate::Refused);
        assert_eq!(bed.verdicts, [(lost + millis(900), false)]);
    }

    #[test]
    fn an_error_about_an_earlier_probe_than_was_answered_raises_no_doubt() {
        let mut confirmation = Confirmation::default();
        confirmation.insert(target(1));
        confirmation.answered(target(1), Duration::ZERO, RTT, RTT);
        let sent = [10, 20, 30, 40].map(millis);
        for at in &sent[..3] {
            confirmation.sent(target(1), *at, *at + TIMEOUT);
        }
        // The answers overtake each other.
        confirmation.answered(target(1), sent[2], RTT, millis(31));
        confirmation.answered(target(1), sent[0], RTT, millis(32));
        confirmation.failed(target(1), sent[1], &refused(), millis(33));
        assert!(!confirmation.in_doubt(target(1)));
        confirmation.sent(target(1), sent[3], sent[3] + TIMEOUT);
        confirmation.failed(target(1), sent[3], &refused(), millis(41));
        assert!(confirmation.in_doubt(target(1)));
    }

    #[test]
    fn an_agent_may_restart_unnoticed() {
        let mut bed = Bed::reachable();
        bed.probe(Fate::Refused);
        let mut refusals = 2;
        bed.run_until(millis(3000), || {
            refusals -= 1;
            if refusals > 0 {
                Fate::Refused
            } else {
                Fate::Answered
            }
        });
        assert_eq!(bed.verdicts, [(bed.sent[2] + RTT, true)]);
        assert_eq!(bed.sent.len(), 3);
        assert_eq!(bed.confirmation.next_due(&bed.budget), None);
        assert_eq!(bed.confirmation.unanswered(target(1)), 0);
    }

    #[test]
    fn a_late_answer_to_the_first_probe_ends_the_doubt() {
        let mut bed = Bed::reachable();
        bed.probe(Fate::Lost);
        bed.waiting[0].0 = bed.now + millis(880);
        bed.waiting[0].2 = Fate::Answered;
        bed.run_until(millis(5000), || Fate::Lost);
        assert!(
            bed.verdicts.iter().all(|verdict| verdict.1),
            "{:?}",
            bed.verdicts
        );
        assert_eq!(bed.confirmation.next_due(&bed.budget), None);
    }

    #[test]
    fn patience_grows_with_the_round_trips() {
        let mut target = Target::default();
        let window = millis(900);
        assert_eq!(target.patience(window), LEAST_PATIENCE);
        for _ in 0..100 {
            SmoothedRtt::update(&mut target.rtt, millis(200));
        }
        let patience = target.patience(window);
        assert!(
            (millis(200)..millis(210)).contains(&patience),
            "{patience:?}"
        );
        SmoothedRtt::update(&mut target.rtt, millis(900));
        assert_eq!(target.patience(window), window / 3);
    }

    #[test]
    fn a_recovery_takes_two_answers() {
        let mut bed = Bed::unreachable();
        let back = bed.now;
        bed.probe(Fate::Answered);
        bed.run_until(back + millis(2000), || Fate::Answered);
        assert_eq!(bed.verdicts, [(back + RTT * 2 + RECOVERY_PAUSE, true)]);
        assert_eq!(bed.sent.len(), 2);

        let mut bed = Bed::unreachable();
        bed.probe(Fate::Answered);
        bed.run_until(millis(9000), || Fate::Lost);
        assert!(bed.verdicts.iter().all(|verdict| !verdict.1));
        assert_eq!(bed.sent.len(), 1 + REPROBES as usize);
        assert_eq!(bed.confirmation.next_due(&bed.budget), None);

        let mut bed = Bed::unreachable();
        bed.probe(Fate::Answered);
        bed.run_until(millis(9000), || Fate::Refused);
        assert!(bed.verdicts.iter().all(|verdict| !verdict.1));
        assert_eq!(bed.sent.len(), 2);
    }

    #[test]
    fn an_agent_that_was_held_up_still_gives_each_probe_its_time() {
        let mut bed = Bed::reachable();
        bed.probe(Fate::Lost);
        bed.now += millis(5000);
        let resumed = bed.now;
        bed.run_until(millis(9000), || Fate::Lost);
        assert!(
            bed.verdicts[0].0 >= resumed + millis(800),
            "{:?}",
            bed.verdicts
        );
        assert_eq!(bed.sent.len(), 1 + REPROBES as usize);
    }

    #[test]
    fn probes_that_this_host_could_not_send_are_no_evidence() {
        let mut confirmation = Confirmation::default();
        let mut budget = Budget::new(1000);
        confirmation.insert(target(1));
        confirmation.answered(target(1), Duration::ZERO, RTT, RTT);
        confirmation.sent(target(1), millis(10), millis(1010));
        confirmation.withdrawn(target(1), millis(20));
        assert_eq!(confirmation.next_due(&budget), None);
        assert_eq!(confirmation.unanswered(target(1)), 0);
        confirmation.sent(target(1), millis(20), millis(1020));
        let due = confirmation.poll(millis(70), &mut budget);
        assert_eq!(due, Some(Due::Reprobe(target(1))));
        confirmation.sent(target(1), millis(70), millis(1070));
        confirmation.withdrawn(target(1), millis(80));
        assert_eq!(confirmation.next_due(&budget), Some(millis(80)));
        confirmation.remove(target(1));
        assert_eq!(confirmation.next_due(&budget), None);
    }

    proptest! {
        /// Only consecutive losses lead to an outage verdict: with loss probability `p`, as often as `p` to the power
        /// of the number of probes.
        #[test]
        fn only_losses_in_a_row_make_an_outage(
            lost in prop::collection::vec(prop::bool::weighted(0.2), 50..400),
        ) {
            let mut bed = Bed::reachable();
            let mut fates = lost.iter();
            let mut losses_in_a_row = 0;
            let mut longest = 0;
            let mut next = || {
                let lost = *fates.next()?;
                losses_in_a_row = if lost { losses_in_a_row + 1 } else { 0 };
                longest = longest.max(losses_in_a_row);
                Some(if lost { Fate::Lost } else { Fate::Answered })
            };
            let mut rounds = 0;
            while let Some(fate) = next() {
                bed.probe(fate);
                rounds += 1;
                let end = bed.now + millis(10_000);
                bed.run_until(end, || next().unwrap_or(Fate::Answered));
            }
            let fell = bed.verdicts.iter().any(|verdict| !verdict.1);
            prop_assert!(!fell || longest > REPROBES, "{longest} losses in a row");
            prop_assert!(bed.sent.len() <= rounds * (1 + REPROBES as usize));
        }

        #[test]
        fn alternating_losses_are_no_outage(period in 2_usize..6, phase in 0_usize..6) {
            let mut bed = Bed::reachable();
            let mut number = phase;
            let mut next = || {
                number += 1;
                // All but every n-th are lost.
                if number.is_multiple_of(period) { Fate::Answered } else { Fate::Lost }
            };
            for _ in 0..50 {
                bed.probe(next());
                let end = bed.now + millis(10_000);
                bed.run_until(end, &mut next);
            }
            prop_assert!(bed.verdicts.iter().all(|verdict| verdict.1), "{:?}", bed.verdicts);
        }

        #[test]
        fn many_failures_at_once_keep_to_the_budget(count in 1_u32..3000) {
            let mut confirmation = Confirmation::default();
            let mut budget = Budget::new(1000);
            for number in 0..count {
                confirmation.insert(target(number));
                confirmation.answered(target(number), Duration::ZERO, RTT, RTT);
                confirmation.sent(target(number), RTT, RTT + TIMEOUT);
            }
            let mut sent = Vec::new();
            let mut fallen = 0;
            while let Some(now) = confirmation.next_due(&budget) {
                while let Some(due) = confirmation.poll(now, &mut budget) {
                    match due {
                        Due::Reprobe(id) => {
                            confirmation.sent(id, now, now + TIMEOUT);
                            sent.push(now);
                        }
                        Due::Unreachable { .. } => fallen += 1,
                        Due::NotRecovered(id) => prop_assert!(false, "{id:?}"),
                    }
                }
            }
            prop_assert_eq!(fallen, count);
            prop_assert!(sent.len() >= count as usize);
            prop_assert!(sent.len() <= (count * REPROBES) as usize);
            for (earlier, &at) in sent.iter().enumerate() {
                let last = sent.partition_point(|&other| other <= at + millis(500));
                prop_assert!(last - earlier <= 551, "{} at {at:?}", last - earlier);
            }
        }
    }
}
