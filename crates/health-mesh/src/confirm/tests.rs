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
fn the_first_probe_that_confirms_a_failure_is_distinguished_from_the_next() {
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
