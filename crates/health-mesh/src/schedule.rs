//! Decides when each target is probed next. Pure: time is passed in as the duration since the start.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use health_model::pace::{Budget, fraction, phase, regular_after};
use slotmap::SecondaryMap;

use super::target::{TargetId, TargetKey};

/// Initial wait between probes of a target that does not answer; it doubles with each further probe.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Fraction of the probe rate that regular probes may use. The rest is for confirming probes and for early probes of
/// targets that do not answer.
const REGULAR_SHARE: f64 = 0.9;

/// A target whose probe is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DueTarget {
    /// Its id.
    pub(super) id: TargetId,
    /// Whether the probe is due only because its interval is over.
    pub(super) routine: bool,
    /// How long ago it was due.
    pub(super) late: Duration,
}

/// The times at which targets are due.
///
/// In steady state a target is due once per interval, at a phase that depends on both the prober and the target:
/// neither the targets of one agent nor the agents that probe one target form bursts. If the probe rate does not
/// suffice for all targets, all intervals grow by the same factor. A target that does not answer, whether new or lost,
/// is due earlier, until its waits have grown to the interval; such probes yield to all others. The waits count from
/// probe to probe: the time-out of a silent target does not delay its next probe.
#[derive(Debug)]
pub(super) struct Schedule {
    agent: String,
    rate: u32,
    targets: SecondaryMap<TargetId, Times>,
    regular: BTreeSet<(Duration, TargetId)>,
    early: BTreeSet<(Duration, TargetId)>,
    /// Number of targets per interval.
    intervals: BTreeMap<Duration, u32>,
    /// Factor by which intervals are longer than configured.
    stretch: f64,
}

#[derive(Clone, Copy, Debug)]
struct Times {
    /// As configured.
    interval: Duration,
    /// Fraction of the interval, in units of `2^-64`.
    phase: u64,
    due: Duration,
    /// Whether it is due before its regular time.
    early: bool,
    /// Whether it is due only because its interval is over.
    routine: bool,
    /// Wait from the next probe to the one after it; `None` for a target that answers.
    retry: Option<Duration>,
}

impl Schedule {
    /// An empty schedule for the agent with this name, for at most `rate` probes a second.
    pub(super) fn new(agent: &str, rate: u32) -> Self {
        Self {
            agent: agent.to_owned(),
            rate,
            targets: SecondaryMap::new(),
            regular: BTreeSet::new(),
            early: BTreeSet::new(),
            intervals: BTreeMap::new(),
            stretch: 1.0,
        }
    }

    /// Reserves capacity for `targets` targets in total.
    pub(super) fn reserve(&mut self, targets: usize) {
        self.targets.set_capacity(targets);
    }

    /// Adds a target. It is first due within `spread` from `now`.
    pub(super) fn insert(
        &mut self,
        id: TargetId,
        key: &TargetKey,
        interval: Duration,
        now: Duration,
        spread: Duration,
    ) {
        let phase = phase((&self.agent, key));
        let due = now + fraction(spread, phase);
        let times = Times {
            interval,
            phase,
            due,
            early: false,
            routine: false,
            retry: Some(FIRST_RETRY),
        };
        self.targets.insert(id, times);
        self.regular.insert((due, id));
        *self.intervals.entry(interval).or_default() += 1;
        self.update_stretch();
    }

    /// Removes a target.
    pub(super) fn remove(&mut self, id: TargetId) {
        if let Some(times) = self.targets.remove(id) {
            self.queue(times.early).remove(&(times.due, id));
            self.uncount(times.interval);
            self.update_stretch();
        }
    }

    /// Changes the maximum number of probes a second.
    pub(super) fn set_rate(&mut self, rate: u32) {
        self.rate = rate;
        self.update_stretch();
    }

    /// Changes a target's interval. Its next regular probe is the first that is due by the new one.
    pub(super) fn set_interval(&mut self, id: TargetId, interval: Duration, now: Duration) {
        let Some(times) = self.targets.get_mut(id) else {
            return;
        };
        let former = std::mem::replace(&mut times.interval, interval);
        let Times {
            phase,
            early,
            routine,
            ..
        } = *times;
        self.uncount(former);
        *self.intervals.entry(interval).or_default() += 1;
        self.update_stretch();
        if former != interval && !early {
            self.set_due(
                id,
                regular_after(now, self.effective(interval), phase),
                false,
            );
            self.set_routine(id, routine);
        }
    }

    /// Decrements the number of targets with this interval.
    fn uncount(&mut self, interval: Duration) {
        if let Some(count) = self.intervals.get_mut(&interval) {
            *count -= 1;
            if *count == 0 {
                self.intervals.remove(&interval);
            }
        }
    }

    /// The effective length of `interval` at the probe rate.
    pub(super) fn effective(&self, interval: Duration) -> Duration {
        interval.mul_f64(self.stretch)
    }

    /// The mean time between two regular probes.
    pub(super) fn pace(&self) -> Duration {
        let rate = self.wanted_rate() / self.stretch;
        if rate > 0.0 {
            Duration::try_from_secs_f64(rate.recip()).unwrap_or(Duration::MAX)
        } else {
            Duration::MAX
        }
    }

    /// When the next target is due, if the budget allows.
    pub(super) fn next_due(&self, budget: &Budget) -> Option<Duration> {
        let regular = self.regular.first().map(|&(due, _)| due);
        let early = self.early.first().map(|&(due, _)| due);
        let next = regular.into_iter().chain(early).min()?;
        Some(next.max(budget.ready()))
    }

    /// Returns a due target, if there is one and `budget` allows a probe, which is then taken from it. The target is
    /// next due at its regular time, or earlier while it does not answer.
    pub(super) fn pop_due(&mut self, now: Duration, budget: &mut Budget) -> Option<DueTarget> {
        if !budget.allows(now) {
            return None;
        }
        let is_due = |&&(due, _): &&(Duration, TargetId)| due <= now;
        let regular = self.regular.first().filter(is_due);
        let &(was_due, id) = regular.or_else(|| self.early.first().filter(is_due))?;
        budget.take(now);
        let times = self.targets.get_mut(id)?;
        let due = DueTarget {
            id,
            routine: times.routine,
            late: now.saturating_sub(was_due),
        };
        let interval = times.interval.mul_f64(self.stretch);
        let retry = times.retry.filter(|&wait| wait < interval);
        times.retry = retry.map(|wait| wait * 2);
        let regular = regular_after(now + interval / 2, interval, times.phase);
        let settled = times.retry.is_none();
        match retry.map(|wait| now + wait).filter(|&at| at < regular) {
            Some(at) => self.set_due(id, at, true),
            None => self.set_due(id, regular, false),
        }
        self.set_routine(id, settled);
        Some(due)
    }

    /// Records that the target answers: from now on, it is due only at its regular times.
    pub(super) fn settle(&mut self, id: TargetId, now: Duration) {
        let Some(times) = self.targets.get_mut(id) else {
            return;
        };
        if times.retry.take().is_some() {
            let interval = times.interval.mul_f64(self.stretch);
            let regular = regular_after(now + interval / 2, interval, times.phase);
            self.set_due(id, regular, false);
            self.set_routine(id, true);
        }
    }

    /// Records that the target has stopped answering: it is due soon, then after growing waits.
    pub(super) fn retry(&mut self, id: TargetId, now: Duration) {
        if let Some(times) = self.targets.get_mut(id) {
            times.retry = Some(FIRST_RETRY);
            times.routine = false;
            let at = now + FIRST_RETRY;
            if at < times.due {
                self.set_due(id, at, true);
            }
        }
    }

    /// Makes a target due at `at`, unless it is already due earlier.
    pub(super) fn pull_in(&mut self, id: TargetId, at: Duration) {
        if self
            .targets
            .get(id)
            .is_some_and(|times| at < times.due || times.early)
        {
            self.set_due(id, at, false);
        }
    }

    /// Makes all targets due within `spread` from `now`, in phase order.
    pub(super) fn pull_in_all(&mut self, now: Duration, spread: Duration) {
        let all: Vec<_> = self
            .targets
            .iter()
            .map(|(id, times)| (id, times.phase))
            .collect();
        for (id, phase) in all {
            self.pull_in(id, now + fraction(spread, phase));
        }
    }

    fn set_due(&mut self, id: TargetId, at: Duration, early: bool) {
        if let Some(&times) = self.targets.get(id) {
            self.queue(times.early).remove(&(times.due, id));
            self.queue(early).insert((at, id));
            self.targets[id] = Times {
                due: at,
                early,
                routine: false,
                ..times
            };
        }
    }

    fn set_routine(&mut self, id: TargetId, routine: bool) {
        if let Some(times) = self.targets.get_mut(id) {
            times.routine = routine;
        }
    }

    fn queue(&mut self, early: bool) -> &mut BTreeSet<(Duration, TargetId)> {
        if early {
            &mut self.early
        } else {
            &mut self.regular
        }
    }

    fn update_stretch(&mut self) {
        self.stretch = (self.wanted_rate() / (f64::from(self.rate) * REGULAR_SHARE)).max(1.0);
    }

    /// Regular probes a second at the configured intervals.
    fn wanted_rate(&self) -> f64 {
        let intervals = self.intervals.iter();
        intervals
            .map(|(interval, &count)| f64::from(count) / interval.as_secs_f64())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use health_common::probe::Path;
    use proptest::prelude::*;
    use slotmap::KeyData;

    use super::*;
    use crate::target::Protocol;

    const INTERVAL: Duration = Duration::from_secs(10);
    const SPREAD: Duration = Duration::from_millis(100);

    fn key(number: u32) -> TargetKey {
        TargetKey {
            address: IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number)),
            path: Path::Host,
            protocol: Protocol::Icmp,
        }
    }

    fn target(number: u32) -> TargetId {
        KeyData::from_ffi((1 << 32) | u64::from(number)).into()
    }

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A schedule with a budget that allows everything that is due.
    struct Bed {
        schedule: Schedule,
        budget: Budget,
    }

    impl Bed {
        fn new(agent: &str, rate: u32) -> Self {
            Self {
                schedule: Schedule::new(agent, rate),
                budget: Budget::new(rate),
            }
        }

        fn insert(&mut self, number: u32, now: Duration, spread: Duration) {
            let (id, key) = (target(number), key(number));
            self.schedule.insert(id, &key, INTERVAL, now, spread);
        }

        fn next_due(&self) -> Option<Duration> {
            self.schedule.next_due(&self.budget)
        }

        fn pop_due(&mut self, now: Duration) -> Option<TargetId> {
            let due = self.schedule.pop_due(now, &mut self.budget)?;
            Some(due.id)
        }

        fn pop_routine(&mut self, now: Duration) -> bool {
            let due = self.schedule.pop_due(now, &mut self.budget);
            due.expect("a target that is due").routine
        }
    }

    #[test]
    fn another_interval_counts_from_the_next_probe_on() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, SPREAD);
        let first = bed.next_due().unwrap();
        assert!(bed.pop_due(first).is_some());
        bed.schedule.settle(target(1), first);
        assert!(bed.next_due().unwrap() > first + INTERVAL / 4);
        for interval in [INTERVAL / 10, INTERVAL * 6] {
            bed.schedule.set_interval(target(1), interval, first);
            let next = bed.next_due().unwrap();
            assert!(next - first <= interval, "{next:?} after {first:?}");
            assert!(bed.pop_due(next).is_some());
            let later = bed.next_due().unwrap();
            assert_eq!(later, next + interval);
            bed.schedule.set_interval(target(1), interval, next);
            assert_eq!(bed.next_due(), Some(later), "nothing has changed");
        }
    }

    #[test]
    fn another_rate_stretches_intervals_anew() {
        let mut bed = Bed::new("agent", 1000);
        for number in 0..90 {
            bed.insert(number, Duration::ZERO, SPREAD);
        }
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL);
        bed.schedule.set_rate(1);
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL * 10);
        bed.schedule.set_rate(1000);
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL);
    }

    #[test]
    fn a_new_target_is_due_at_once_and_then_once_an_interval() {
        let mut bed = Bed::new("agent", 1000);
        let start = millis(5);
        bed.insert(1, start, SPREAD);
        let first = bed.next_due().unwrap();
        assert!(first >= start && first < start + SPREAD);
        assert_eq!(bed.pop_due(first - Duration::from_nanos(1)), None);
        assert_eq!(bed.pop_due(first), Some(target(1)));
        assert_eq!(bed.pop_due(first), None);
        bed.schedule.settle(target(1), first);
        let mut last = bed.next_due().unwrap();
        assert!(last >= first + INTERVAL / 2 && last < first + INTERVAL * 3 / 2);
        for _ in 0..5 {
            let due = bed.schedule.pop_due(last + millis(3), &mut bed.budget);
            let due = due.expect("a target that is due");
            assert_eq!((due.id, due.late), (target(1), millis(3)));
            assert_eq!(bed.next_due(), Some(last + INTERVAL));
            last += INTERVAL;
        }
    }

    #[test]
    fn a_target_that_does_not_answer_is_due_with_growing_waits() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, SPREAD);
        // No result arrives in between: silence delays nothing.
        let mut now = bed.next_due().unwrap();
        for wait in [100, 200, 400, 800, 1600] {
            assert_eq!(bed.pop_due(now), Some(target(1)));
            assert_eq!(bed.next_due(), Some(now + millis(wait)));
            now += millis(wait);
        }
        // In the end, only the regular times are left.
        let mut gaps = Vec::new();
        for _ in 0..6 {
            assert_eq!(bed.pop_due(now), Some(target(1)));
            let next = bed.next_due().unwrap();
            gaps.push(next - now);
            now = next;
        }
        assert_eq!(gaps[4..], [INTERVAL, INTERVAL]);
        // A target that stops answering starts over.
        bed.pop_due(now);
        bed.schedule.settle(target(1), now);
        assert_eq!(bed.next_due(), Some(now + INTERVAL));
        bed.schedule.retry(target(1), now);
        assert_eq!(bed.next_due(), Some(now + millis(100)));
        bed.pop_due(now + millis(100));
        bed.schedule.settle(target(1), now + millis(100));
        assert!(bed.next_due().unwrap() >= now + INTERVAL / 2);
    }

    #[test]
    fn a_probe_is_routine_when_only_the_interval_asks_for_it() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, SPREAD);
        let first = bed.next_due().unwrap();
        assert!(!bed.pop_routine(first), "the first one");
        assert!(!bed.pop_routine(bed.next_due().unwrap()), "unanswered");
        bed.schedule.settle(target(1), first);
        let mut now = bed.next_due().unwrap();
        for _ in 0..2 {
            assert!(bed.pop_routine(now));
            now = bed.next_due().unwrap();
        }
        bed.schedule.pull_in(target(1), now - INTERVAL / 2);
        assert!(!bed.pop_routine(now - INTERVAL / 2), "asked for");
        now = bed.next_due().unwrap();
        bed.schedule.retry(target(1), now - millis(1));
        assert!(!bed.pop_routine(now), "no longer answered");
    }

    #[test]
    fn a_removed_target_is_never_due() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, SPREAD);
        bed.schedule.remove(target(1));
        bed.schedule.retry(target(1), Duration::ZERO);
        bed.schedule.settle(target(1), Duration::ZERO);
        bed.schedule.pull_in(target(1), Duration::ZERO);
        assert_eq!(bed.next_due(), None);
        assert_eq!(bed.pop_due(INTERVAL), None);
    }

    #[test]
    fn all_can_be_made_due_now() {
        let mut bed = Bed::new("agent", 1000);
        for number in 0..50 {
            bed.insert(number, Duration::ZERO, SPREAD);
            bed.schedule.settle(target(number), Duration::ZERO);
        }
        let now = millis(700);
        bed.schedule.pull_in_all(now, millis(10));
        let popped = std::iter::from_fn(|| bed.pop_due(now + millis(10))).count();
        assert_eq!(popped, 50);
    }

    #[test]
    fn early_probes_give_way_to_regular_ones() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, Duration::ZERO);
        assert_eq!(bed.pop_due(Duration::ZERO), Some(target(1)));
        // Now the first target is due again, early, and another one for the first time.
        let now = millis(100);
        bed.insert(2, now, Duration::ZERO);
        assert_eq!(bed.pop_due(now), Some(target(2)));
        assert_eq!(bed.pop_due(now), Some(target(1)));
    }

    #[test]
    fn a_probe_that_is_asked_for_gives_way_to_none() {
        let mut bed = Bed::new("agent", 1000);
        bed.insert(1, Duration::ZERO, Duration::ZERO);
        assert_eq!(bed.pop_due(Duration::ZERO), Some(target(1)));
        // It is due early at the same time, which alone would let the other one go first.
        let now = millis(100);
        assert_eq!(bed.next_due(), Some(now));
        bed.schedule.pull_in(target(1), now);
        bed.insert(2, now, Duration::ZERO);
        assert_eq!(bed.pop_due(now), Some(target(1)));
        assert_eq!(bed.pop_due(now), Some(target(2)));
    }

    #[test]
    fn more_targets_than_the_rate_allows_stretch_the_interval() {
        let mut bed = Bed::new("agent", 100);
        for number in 0..900 {
            bed.insert(number, Duration::ZERO, INTERVAL);
        }
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL);
        for number in 900..3600 {
            bed.insert(number, Duration::ZERO, INTERVAL);
        }
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL * 4);
        for number in 0..3600 {
            bed.schedule.settle(target(number), Duration::ZERO);
        }
        let mut probes = 0;
        let end = INTERVAL * 12;
        while let Some(now) = bed.next_due().filter(|&due| due < end) {
            let id = bed.pop_due(now).unwrap();
            bed.schedule.settle(id, now);
            probes += 1;
        }
        // Nine tenths of the rate, starting in the middle of the first interval.
        assert!((8_500..=9_500).contains(&probes), "{probes}");
        for number in 900..3600 {
            bed.schedule.remove(target(number));
        }
        assert_eq!(bed.schedule.effective(INTERVAL), INTERVAL);
    }

    proptest! {
        #[test]
        fn targets_are_spread_over_the_interval(
            agent in "[a-z]{1,12}",
            first in 0_u32..1_000_000,
        ) {
            let mut bed = Bed::new(&agent, 1_000_000);
            for number in 0..1000 {
                let (id, key) = (target(number), key(first + number));
                bed.schedule.insert(id, &key, INTERVAL, Duration::ZERO, SPREAD);
                bed.schedule.settle(id, Duration::ZERO);
            }
            let start = INTERVAL * 3;
            while let Some(due) = bed.next_due().filter(|&due| due < start) {
                bed.pop_due(due);
            }
            let mut tenths = [0; 10];
            while let Some(due) = bed.next_due().filter(|&due| due < start + INTERVAL) {
                bed.pop_due(due);
                tenths[((due - start).as_millis() / 1000) as usize] += 1;
            }
            prop_assert_eq!(tenths.iter().sum::<i32>(), 1000);
            prop_assert!(tenths.iter().all(|&n| (50..=160).contains(&n)), "{:?}", tenths);
        }

        #[test]
        fn two_agents_do_not_probe_one_target_together(a in "[a-z]{1,12}", b in "[A-Z]{1,12}") {
            let phases = |agent: &str| -> Vec<Duration> {
                let mut bed = Bed::new(agent, 1000);
                (0..20).map(|number| {
                    bed.insert(number, Duration::ZERO, INTERVAL);
                    bed.schedule.targets[target(number)].due
                }).collect()
            };
            let near = phases(&a).iter().zip(phases(&b)).filter(|(a, b)| a.abs_diff(*b) < millis(1)).count();
            prop_assert!(near <= 2, "{near} of 20 within a millisecond");
        }
    }
}
