//! Allocates ranges of an array.

use std::collections::{BTreeMap, BTreeSet};

/// The free slots of an array, as ranges. Allocation takes the smallest range that is large enough; adjacent free
/// ranges are merged.
#[derive(Clone, Debug)]
pub(super) struct Ranges {
    /// The lengths of the free ranges, by start. No two are adjacent.
    free: BTreeMap<u32, u32>,
    /// The same ranges, by length and start.
    by_len: BTreeSet<(u32, u32)>,
    size: u32,
    free_slots: u32,
}

impl Ranges {
    /// Creates an array of this size, with all slots free.
    pub(super) fn new(size: u32) -> Self {
        let mut ranges = Self {
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
            size,
            free_slots: 0,
        };
        ranges.insert(0, size);
        ranges
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Number of taken slots.
    pub(super) fn taken(&self) -> u32 {
        self.size - self.free_slots
    }

    /// The length of the longest free range.
    pub(super) fn longest(&self) -> u32 {
        self.by_len.last().map_or(0, |(len, _)| *len)
    }

    /// Takes `len` adjacent slots (at least one) and returns the first; `None` if no free range is long enough.
    pub(super) fn allocate(&mut self, len: u32) -> Option<u32> {
        let &(_, at) = self.by_len.range((len, 0)..).next()?;
        self.take(at, len).then_some(at)
    }

    /// Takes these slots, if all of them are free.
    pub(super) fn take(&mut self, at: u32, len: u32) -> bool {
        let Some((&start, &free)) = self.free.range(..=at).next_back() else {
            return false;
        };
        let (Some(end), free_end) = (at.checked_add(len), start + free) else {
            return false;
        };
        if len == 0 || end > free_end {
            return false;
        }
        self.remove(start, free);
        self.insert(start, at - start);
        self.insert(end, free_end - end);
        true
    }

    /// Releases taken slots.
    pub(super) fn release(&mut self, at: u32, len: u32) {
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &before_len)) = self.free.range(..at).next_back()
            && before + before_len == at
        {
            self.remove(before, before_len);
            start = before;
        }
        if let Some(&after_len) = self.free.get(&end) {
            self.remove(end, after_len);
            end += after_len;
        }
        self.insert(start, end - start);
    }

    fn insert(&mut self, at: u32, len: u32) {
        if len > 0 {
            self.free.insert(at, len);
            self.by_len.insert((len, at));
            self.free_slots += len;
        }
    }

    fn remove(&mut self, at: u32, len: u32) {
        self.free.remove(&at);
        self.by_len.remove(&(len, at));
        self.free_slots -= len;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u32 = 64;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(u32),
        Take(u32, u32),
        Release(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..20_u32).prop_map(Step::Allocate),
            (0..SIZE + 4, 0..20_u32).prop_map(|(at, len)| Step::Take(at, len)),
            any::<usize>().prop_map(Step::Release),
        ]
    }

    /// Returns the lengths of the longest runs of free slots.
    fn runs(taken: &[bool]) -> Vec<u32> {
        let runs = taken.split(|is_taken| *is_taken);
        runs.map(|run| run.len() as u32).collect()
    }

    proptest! {
        #[test]
        fn a_range_is_given_out_once_and_the_smallest_that_fits_is_used(
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let mut ranges = Ranges::new(SIZE);
            let mut taken = [false; SIZE as usize];
            let mut held: Vec<(u32, u32)> = Vec::new();
            for step in steps {
                let free = runs(&taken);
                let got = match step {
                    Step::Allocate(len) => {
                        let best = free.iter().filter(|run| **run >= len).min();
                        let got = ranges.allocate(len);
                        prop_assert_eq!(got.is_some(), best.is_some());
                        got.map(|at| (at, len))
                    }
                    Step::Take(at, len) => {
                        let slots = taken.get(at as usize..(at + len) as usize);
                        let is_free = len > 0 && slots.is_some_and(|slots| !slots.contains(&true));
                        prop_assert_eq!(ranges.take(at, len), is_free);
                        is_free.then_some((at, len))
                    }
                    Step::Release(which) => {
                        if !held.is_empty() {
                            let (at, len) = held.swap_remove(which % held.len());
                            taken[at as usize..(at + len) as usize].fill(false);
                            ranges.release(at, len);
                        }
                        None
                    }
                };
                if let Some((at, len)) = got {
                    let slots = &mut taken[at as usize..(at + len) as usize];
                    prop_assert!(!slots.contains(&true));
                    slots.fill(true);
                    held.push((at, len));
                }
                let count = taken.iter().filter(|taken| **taken).count() as u32;
                prop_assert_eq!(ranges.taken(), count);
                prop_assert_eq!(Some(ranges.longest()), runs(&taken).into_iter().max());
            }
        }
    }
}
