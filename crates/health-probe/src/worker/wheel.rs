//! A single timer wheel for all timers.

use std::time::Duration;

use slotmap::{SlotMap, new_key_type};

new_key_type! {
    /// Identifies a timer of a wheel. Invalid once the timer has fired or was cancelled.
    pub struct TimerId;
}

/// Number of time bits that each level distinguishes.
const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
/// Enough levels for all 64-bit times.
const LEVELS: usize = u64::BITS.div_ceil(BITS) as usize;

/// Timers by the millisecond in which they fire, in a hierarchy of slots: a slot covers 1 ms at the lowest level, and
/// at each level above as much as all slots of the level below together. The cost of adding, cancelling and firing does
/// not depend on the number of timers; a timer moves down at most once per level. No timer fires early.
#[derive(Debug)]
pub struct Wheel<T> {
    timers: SlotMap<TimerId, Timer<T>>,
    /// The millisecond up to which timers have fired.
    now: u64,
    levels: Box<[Level; LEVELS]>,
    /// Timers that fire now.
    due: List,
}

#[derive(Debug)]
struct Timer<T> {
    value: T,
    at: u64,
    /// Level and slot; `None` if the timer is due.
    place: Option<(usize, usize)>,
    previous: Option<TimerId>,
    next: Option<TimerId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct List {
    first: Option<TimerId>,
    last: Option<TimerId>,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    /// Bitmap of the slots that hold a timer.
    occupied: u64,
    slots: [List; SLOTS],
}

impl<T> Default for Wheel<T> {
    fn default() -> Self {
        let empty = Level {
            occupied: 0,
            slots: [List::default(); SLOTS],
        };
        Self {
            timers: SlotMap::with_key(),
            now: 0,
            levels: Box::new([empty; LEVELS]),
            due: List::default(),
        }
    }
}

impl<T> Wheel<T> {
    /// Adds a timer that fires in the first whole millisecond not before `at`, or immediately if that has passed.
    pub fn insert(&mut self, at: Duration, value: T) -> TimerId {
        let at = at.as_nanos().div_ceil(1_000_000);
        let id = self.timers.insert(Timer {
            value,
            at: u64::try_from(at).unwrap_or(u64::MAX),
            place: None,
            previous: None,
            next: None,
        });
        self.put(id);
        id
    }

    /// Removes a timer that has not fired.
    pub fn cancel(&mut self, id: TimerId) -> Option<T> {
        let timer = self.timers.remove(id)?;
        let list = match timer.place {
            Some((level, slot)) => &mut self.levels[level].slots[slot],
            None => &mut self.due,
        };
        match timer.previous {
            Some(previous) => self.timers[previous].next = timer.next,
            None => list.first = timer.next,
        }
        match timer.next {
            Some(next) => self.timers[next].previous = timer.previous,
            None => list.last = timer.previous,
        }
        if let (Some((level, slot)), None) = (timer.place, list.first) {
            self.levels[level].occupied &= !(1 << slot);
        }
        Some(timer.value)
    }

    /// Removes and returns a timer that fires no later than `now`. Timers of the same millisecond fire in any order.
    pub fn pop(&mut self, now: Duration) -> Option<T> {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        while self.due.first.is_none() {
            let next = self.next_slot().filter(|&(_, _, begins)| begins <= now);
            let Some((level, slot, begins)) = next else {
                self.now = self.now.max(now);
                return None;
            };
            self.now = begins;
            let list = std::mem::take(&mut self.levels[level].slots[slot]);
            self.levels[level].occupied &= !(1 << slot);
            let mut cursor = list.first;
            while let Some(id) = cursor {
                cursor = self.timers[id].next;
                self.put(id);
            }
        }
        self.cancel(self.due.first?)
    }

    /// When to call [`pop`](Self::pop) next: no later than the next timer fires. A timer in the far future causes a
    /// call or two before it fires.
    pub fn next(&self) -> Option<Duration> {
        if self.due.first.is_some() {
            return Some(Duration::from_millis(self.now));
        }
        let (_, _, begins) = self.next_slot()?;
        Some(Duration::from_millis(begins))
    }

    /// The number of timers.
    pub fn len(&self) -> usize {
        self.timers.len()
    }

    /// Whether no timer exists.
    pub fn is_empty(&self) -> bool {
        self.timers.is_empty()
    }

    /// Returns the first slot that holds timers, and when it begins. All timers of a level fire before those of the
    /// next level, because they share more bits with `now`.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        let level = self.levels.iter().position(|level| level.occupied != 0)?;
        let slot = self.levels[level].occupied.trailing_zeros();
        let shift = BITS * u32::try_from(level).ok()?;
        let above = self
            .now
            .checked_shr(shift + BITS)
            .map_or(0, |bits| bits << (shift + BITS));
        Some((level, slot as usize, above | (u64::from(slot) << shift)))
    }

    /// Puts a timer into the right slot for the current time: at the level of the highest bits in which its time
    /// differs from `now`.
    fn put(&mut self, id: TimerId) {
        let timer = &mut self.timers[id];
        timer.place = (timer.at > self.now).then(|| {
            let highest = u64::BITS - 1 - (timer.at ^ self.now).leading_zeros();
            let level = highest / BITS;
            let slot = (timer.at >> (level * BITS)) as usize % SLOTS;
            (level as usize, slot)
        });
        let list = match timer.place {
            Some((level, slot)) => {
                self.levels[level].occupied |= 1 << slot;
                &mut self.levels[level].slots[slot]
            }
            None => &mut self.due,
        };
        timer.previous = list.last;
        timer.next = None;
        match list.last.replace(id) {
            Some(last) => self.timers[last].next = Some(id),
            None => list.first = Some(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64),
        Cancel(prop::sample::Index),
        Pass(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        // In nanoseconds: within a slot, within some levels, and at the end of time.
        let far = prop_oneof![
            0_u64..3_000_000,
            0_u64..200_000_000,
            0_u64..90_000_000_000,
            0_u64..u64::MAX / 4,
        ];
        prop_oneof![
            4 => far.prop_map(Step::Insert),
            2 => any::<prop::sample::Index>().prop_map(Step::Cancel),
            3 => (0_u64..20_000_000_000).prop_map(Step::Pass),
            2 => (0_u64..3_000_000).prop_map(Step::Pass),
        ]
    }

    proptest! {
        #[test]
        fn timers_fire_in_order_when_they_are_due(steps in prop::collection::vec(step(), 1..120)) {
            let mut wheel = Wheel::default();
            let mut expected = BTreeSet::new();
            let mut ids = Vec::new();
            let mut now = Duration::ZERO;
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(ns) => {
                        let at = now + Duration::from_nanos(ns);
                        let id = wheel.insert(at, number);
                        let ms = at.as_nanos().div_ceil(1_000_000);
                        ids.push((id, ms, number));
                        expected.insert((ms, number));
                    }
                    Step::Cancel(index) if !ids.is_empty() => {
                        let (id, ms, number) = ids.swap_remove(index.index(ids.len()));
                        let was_there = expected.remove(&(ms, number));
                        prop_assert_eq!(wheel.cancel(id), was_there.then_some(number));
                    }
                    Step::Cancel(_) => {}
                    Step::Pass(ns) => {
                        now += Duration::from_nanos(ns);
                        let mut fired = Vec::new();
                        while let Some(number) = wheel.pop(now) {
                            fired.push(number);
                        }
                        let later = expected.split_off(&(now.as_millis() + 1, 0));
                        let due = std::mem::replace(&mut expected, later);
                        // The order within a millisecond is arbitrary.
                        let times: Vec<_> = fired
                            .iter()
                            .map(|number| due.iter().find(|(_, due)| due == number).map(|(ms, _)| *ms))
                            .collect();
                        prop_assert!(times.is_sorted(), "{:?}", times);
                        fired.sort_unstable();
                        let mut numbers: Vec<_> = due.into_iter().map(|(_, number)| number).collect();
                        numbers.sort_unstable();
                        prop_assert_eq!(fired, numbers);
                    }
                }
                prop_assert_eq!(wheel.len(), expected.len());
                let first = expected.first().map(|(ms, _)| *ms);
                let next = wheel.next().map(|next| next.as_millis());
                prop_assert_eq!(next.is_some(), first.is_some());
                prop_assert!(next <= first, "{:?} {:?}", next, first);
                prop_assert!(next.is_none_or(|next| next + 1 > now.as_millis()), "nothing is left behind");
            }
        }
    }

    #[test]
    fn a_far_timer_wakes_seldom() {
        let mut wheel = Wheel::default();
        let at = Duration::from_secs(86_400 * 40) + Duration::from_nanos(1);
        wheel.insert(at, ());
        let mut wakes = 0;
        let mut now = Duration::ZERO;
        while wheel.pop(now).is_none() {
            now = wheel.next().expect("a timer that has not fired");
            wakes += 1;
        }
        assert_eq!(
            now,
            Duration::from_secs(86_400 * 40) + Duration::from_millis(1)
        );
        assert!(wakes <= LEVELS, "{wakes}");
        assert!(wheel.is_empty());
        assert_eq!(wheel.next(), None);
    }
}
