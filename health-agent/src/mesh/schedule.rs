//! When each target is probed next. Pure: time comes in as the duration since the start.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use super::target::TargetKey;

/// First wait between probes of a target that does not answer; each further probe doubles it.
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// The times at which targets are due.
///
/// In its steady state a target is due once an interval, at a phase that depends on who probes and
/// what is probed: neither the targets of one agent nor the agents that probe one target come in
/// bursts. A target that does not answer, new or lost, is due earlier, until its waits have grown to
/// the interval. They count from probe to probe: the time-out of a silent one does not delay the next.
#[derive(Debug)]
pub(super) struct Schedule {
    interval: Duration,
    agent: String,
    targets: HashMap<TargetKey, Times>,
    due: BTreeSet<(Duration, TargetKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Times {
    /// Fraction of the interval, in units of `2^-64`.
    phase: u64,
    due: Duration,
    /// Wait from the next probe to the one after it; `None` for a target that answers.
    retry: Option<Duration>,
}

impl Schedule {
    /// An empty schedule of the agent with this name.
    pub(super) fn new(agent: &str, interval: Duration) -> Self {
        Self {
            interval,
            agent: agent.to_owned(),
            targets: HashMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// Adds a target unless it is there. It is due first within `spread` from `now`.
    pub(super) fn insert(&mut self, key: TargetKey, now: Duration, spread: Duration) {
        if let Entry::Vacant(vacant) = self.targets.entry(key) {
            let mut hasher = DefaultHasher::new();
            (&self.agent, key).hash(&mut hasher);
            let phase = hasher.finish();
            let due = now + fraction(spread, phase);
            vacant.insert(Times {
                phase,
                due,
                retry: Some(FIRST_RETRY),
            });
            self.due.insert((due, key));
        }
    }

    /// Forgets a target.
    pub(super) fn remove(&mut self, key: &TargetKey) {
        if let Some(times) = self.targets.remove(key) {
            self.due.remove(&(times.due, *key));
        }
    }

    /// When the next target is due.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|&(due, _)| due)
    }

    /// A target that is due, if one is. It is next due at its regular time, or earlier while it does
    /// not answer.
    pub(super) fn pop_due(&mut self, now: Duration) -> Option<TargetKey> {
        let &(due, key) = self.due.first()?;
        if due > now {
            return None;
        }
        let times = self.targets.get(&key)?;
        let retry = times.retry.filter(|&wait| wait < self.interval);
        let regular = self.regular_after(now + self.interval / 2, times.phase);
        let next = retry.map_or(regular, |wait| regular.min(now + wait));
        if let Some(times) = self.targets.get_mut(&key) {
            times.retry = retry.map(|wait| wait * 2);
        }
        self.set_due(&key, next);
        Some(key)
    }

    /// The target answers: it is due at its regular times alone.
    pub(super) fn settle(&mut self, key: &TargetKey, now: Duration) {
        let Some(times) = self.targets.get_mut(key) else {
            return;
        };
        if times.retry.take().is_some() {
            let phase = times.phase;
            let regular = self.regular_after(now + self.interval / 2, phase);
            self.set_due(key, regular);
        }
    }

    /// The target has ceased to answer: it is due soon, and then with growing waits.
    pub(super) fn retry(&mut self, key: &TargetKey, now: Duration) {
        if let Some(times) = self.targets.get_mut(key) {
            times.retry = Some(FIRST_RETRY);
            self.pull_in(key, now + FIRST_RETRY);
        }
    }

    /// Makes a target due at `at` unless it is due before.
    pub(super) fn pull_in(&mut self, key: &TargetKey, at: Duration) {
        if self.targets.get(key).is_some_and(|times| at < times.due) {
            self.set_due(key, at);
        }
    }

    /// Makes all targets due within `spread` from `now`, in the order of their phases.
    pub(super) fn pull_in_all(&mut self, now: Duration, spread: Duration) {
        for (key, times) in &mut self.targets {
            let at = now + fraction(spread, times.phase);
            if at < times.due {
                self.due.remove(&(times.due, *key));
                times.due = at;
                self.due.insert((at, *key));
            }
        }
    }

    fn set_due(&mut self, key: &TargetKey, at: Duration) {
        if let Some(times) = self.targets.get_mut(key) {
            self.due.remove(&(times.due, *key));
            times.due = at;
            self.due.insert((at, *key));
        }
    }

    /// The first regular time that is not before `earliest`.
    fn regular_after(&self, earliest: Duration, phase: u64) -> Duration {
        let interval = self.interval.as_nanos().max(1);
        let phase = fraction(self.interval, phase);
        let past = earliest.saturating_sub(phase).as_nanos();
        let periods = past.div_ceil(interval);
        phase + Duration::from_nanos(u64::try_from(periods * interval).unwrap_or(u64::MAX))
    }
}

/// `part / 2^64` of `whole`.
fn fraction(whole: Duration, part: u64) -> Duration {
    // Below `whole` in nanoseconds; those fit 64 bits for 584 years.
    Duration::from_nanos(((whole.as_nanos() * u128::from(part)) >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use health_common::probe::Path;
    use proptest::prelude::*;

    use super::super::target::Protocol;
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);
    const SPREAD: Duration = Duration::from_millis(100);

    fn target(number: u32) -> TargetKey {
        TargetKey {
            address: IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number)),
            path: Path::Host,
            protocol: Protocol::Icmp,
        }
    }

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_new_target_is_due_at_once_and_then_once_an_interval() {
        let mut schedule = Schedule::new("agent", INTERVAL);
        let start = millis(5);
        schedule.insert(target(1), start, SPREAD);
        let first = schedule.next_due().unwrap();
        assert!(first >= start && first < start + SPREAD);
        assert_eq!(schedule.pop_due(first - Duration::from_nanos(1)), None);
        assert_eq!(schedule.pop_due(first), Some(target(1)));
        assert_eq!(schedule.pop_due(first), None);
        schedule.settle(&target(1), first);
        let mut last = schedule.next_due().unwrap();
        assert!(last >= first + INTERVAL / 2 && last < first + INTERVAL * 3 / 2);
        for _ in 0..5 {
            assert_eq!(schedule.pop_due(last + millis(3)), Some(target(1)));
            assert_eq!(schedule.next_due(), Some(last + INTERVAL));
            last += INTERVAL;
        }
    }

    #[test]
    fn a_target_that_does_not_answer_is_due_with_growing_waits() {
        let mut schedule = Schedule::new("agent", INTERVAL);
        schedule.insert(target(1), Duration::ZERO, SPREAD);
        // No result comes between: silence delays nothing.
        let mut now = schedule.next_due().unwrap();
        for wait in [100, 200, 400, 800, 1600] {
            assert_eq!(schedule.pop_due(now), Some(target(1)));
            assert_eq!(schedule.next_due(), Some(now + millis(wait)));
            now += millis(wait);
        }
        // At last, only the regular times are left.
        let mut gaps = Vec::new();
        for _ in 0..6 {
            assert_eq!(schedule.pop_due(now), Some(target(1)));
            let next = schedule.next_due().unwrap();
            gaps.push(next - now);
            now = next;
        }
        assert_eq!(gaps[4..], [INTERVAL, INTERVAL]);
        // One that has ceased to answer begins anew.
        schedule.pop_due(now);
        schedule.settle(&target(1), now);
        assert_eq!(schedule.next_due(), Some(now + INTERVAL));
        schedule.retry(&target(1), now);
        assert_eq!(schedule.next_due(), Some(now + millis(100)));
        schedule.pop_due(now + millis(100));
        schedule.settle(&target(1), now + millis(100));
        assert!(schedule.next_due().unwrap() >= now + INTERVAL / 2);
    }

    #[test]
    fn a_removed_target_is_never_due() {
        let mut schedule = Schedule::new("agent", INTERVAL);
        schedule.insert(target(1), Duration::ZERO, SPREAD);
        schedule.remove(&target(1));
        schedule.retry(&target(1), Duration::ZERO);
        schedule.settle(&target(1), Duration::ZERO);
        schedule.pull_in(&target(1), Duration::ZERO);
        assert_eq!(schedule.next_due(), None);
        assert_eq!(schedule.pop_due(INTERVAL), None);
    }

    #[test]
    fn all_can_be_made_due_now() {
        let mut schedule = Schedule::new("agent", INTERVAL);
        for number in 0..50 {
            schedule.insert(target(number), Duration::ZERO, SPREAD);
            schedule.settle(&target(number), Duration::ZERO);
        }
        let now = millis(700);
        schedule.pull_in_all(now, millis(10));
        let popped = std::iter::from_fn(|| schedule.pop_due(now + millis(10))).count();
        assert_eq!(popped, 50);
    }

    proptest! {
        #[test]
        fn targets_are_spread_over_the_interval(
            agent in "[a-z]{1,12}",
            first in 0_u32..1_000_000,
        ) {
            let mut schedule = Schedule::new(&agent, INTERVAL);
            for number in first..first + 1000 {
                schedule.insert(target(number), Duration::ZERO, SPREAD);
                schedule.settle(&target(number), Duration::ZERO);
            }
            let start = INTERVAL * 3;
            while let Some(due) = schedule.next_due().filter(|&due| due < start) {
                schedule.pop_due(due);
            }
            let mut tenths = [0; 10];
            while let Some(due) = schedule.next_due().filter(|&due| due < start + INTERVAL) {
                schedule.pop_due(due);
                tenths[((due - start).as_millis() / 1000) as usize] += 1;
            }
            prop_assert_eq!(tenths.iter().sum::<i32>(), 1000);
            prop_assert!(tenths.iter().all(|&n| (50..=160).contains(&n)), "{:?}", tenths);
        }

        #[test]
        fn two_agents_do_not_probe_one_target_together(a in "[a-z]{1,12}", b in "[A-Z]{1,12}") {
            let phases = |agent: &str| -> Vec<Duration> {
                let mut schedule = Schedule::new(agent, INTERVAL);
                (0..20).map(|number| {
                    schedule.insert(target(number), Duration::ZERO, INTERVAL);
                    schedule.targets[&target(number)].due
                }).collect()
            };
            let near = phases(&a).iter().zip(phases(&b)).filter(|(a, b)| a.abs_diff(*b) < millis(1)).count();
            prop_assert!(near <= 2, "{near} of 20 within a millisecond");
        }
    }
}
