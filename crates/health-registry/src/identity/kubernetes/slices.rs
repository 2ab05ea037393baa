//! Distributes this node's entries over its slices. An entry stays in its slice, so that a change writes few slices. No
//! connection and no clock of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::objects::{Entries, EntryKey};

/// Maximum number of entries of a slice, as for Kubernetes' own slices of endpoints.
const MAX_ENTRIES: usize = 100;
/// Minimum time between two writes of a slice: starting pods come in numbers, and each write goes to all agents.
pub(super) const SHORTEST_GAP: Duration = Duration::from_secs(1);

/// This node's slices as they should be.
#[derive(Debug, Default)]
pub(super) struct OwnSlices {
    slots: BTreeMap<u32, Entries>,
    /// When each slice was last written.
    written: BTreeMap<u32, Instant>,
    /// Entries of the node's earlier agent that this agent has not confirmed; `None` before the first listing.
    inherited: Option<Entries>,
}

/// A slice that must be written. Without entries, it must be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SliceJob {
    pub(super) index: u32,
    pub(super) entries: Entries,
    /// Whether the object exists.
    pub(super) is_known: bool,
}

impl OwnSlices {
    /// Changes the entries to `wanted`, and to those of the node's earlier agent unless `forgets_earlier`. `stored` are
    /// the slices in the store. Returns the slices that must be written now, and the time until more are due.
    pub(super) fn plan(
        &mut self,
        wanted: Entries,
        stored: &BTreeMap<u32, Entries>,
        forgets_earlier: bool,
        now: Instant,
    ) -> (Vec<SliceJob>, Option<Duration>) {
        let wanted = self.with_inherited(wanted, stored, forgets_earlier);
        self.assign(wanted);
        let indices: BTreeSet<u32> = self.slots.keys().chain(stored.keys()).copied().collect();
        let mut jobs = Vec::new();
        let mut wait: Option<Duration> = None;
        for index in indices {
            if self.slots.get(&index) == stored.get(&index) {
                continue;
            }
            let age = self.written.get(&index).map(|at| now - *at);
            let left = age.map_or(Duration::ZERO, |age| SHORTEST_GAP.saturating_sub(age));
            if left.is_zero() {
                self.written.insert(index, now);
                jobs.push(SliceJob {
                    index,
                    entries: self.slots.get(&index).cloned().unwrap_or_default(),
                    is_known: stored.contains_key(&index),
                });
            } else {
                wait = Some(wait.map_or(left, |before| before.min(left)));
            }
        }
        (jobs, wait)
    }

    fn with_inherited(
        &mut self,
        wanted: Entries,
        stored: &BTreeMap<u32, Entries>,
        forgets_earlier: bool,
    ) -> Entries {
        if self.inherited.is_none() {
            self.slots.clone_from(stored);
        }
        let earlier = || stored.values().flatten();
        let inherited = self
            .inherited
            .get_or_insert_with(|| earlier().map(|(key, entry)| (*key, *entry)).collect());
        if forgets_earlier {
            inherited.clear();
        }
        // Once wanted, an entry goes when it is no longer wanted.
        inherited.retain(|key, _| !wanted.contains_key(key));
        let mut all = inherited.clone();
        all.extend(wanted);
        all
    }

    fn assign(&mut self, mut wanted: Entries) {
        for slot in self.slots.values_mut() {
            let before: Vec<EntryKey> = slot.keys().copied().collect();
            slot.clear();
            slot.extend(
                before
                    .into_iter()
                    .filter_map(|key| wanted.remove_entry(&key)),
            );
        }
        let mut index = 0;
        for (key, entry) in wanted {
            while self
                .slots
                .get(&index)
                .is_some_and(|slot| slot.len() >= MAX_ENTRIES)
            {
                index += 1;
            }
            self.slots.entry(index).or_default().insert(key, entry);
        }
        self.slots.retain(|_, slot| !slot.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use health_model::identity::Identity;

    use super::super::objects::Entry;
    use super::*;

    fn entries(range: std::ops::Range<u16>) -> Entries {
        let node = Some(IpAddr::from([172, 30, 0, 1]));
        let entry = |i: u16| {
            let [high, low] = i.to_be_bytes();
            let ip = Ipv4Addr::new(10, 244, high, low);
            let identity = Identity(300 + u32::from(i));
            (EntryKey::Address(ip.into()), Entry { identity, node })
        };
        range.map(entry).collect()
    }

    /// Writes the jobs to the store.
    fn write(stored: &mut BTreeMap<u32, Entries>, jobs: Vec<SliceJob>) {
        for job in jobs {
            match job.entries.is_empty() {
                true => stored.remove(&job.index),
                false => stored.insert(job.index, job.entries),
            };
        }
    }

    #[test]
    fn a_thousand_endpoints_that_start_within_a_minute_cost_less_than_a_hundred_writes() {
        let mut own = OwnSlices::default();
        let mut stored = BTreeMap::new();
        let begun = Instant::now();
        let mut writes = 0;
        for i in 0..1000_u16 {
            let now = begun + Duration::from_millis(60) * u32::from(i);
            let (jobs, _) = own.plan(entries(0..i + 1), &stored, true, now);
            writes += jobs.len();
            write(&mut stored, jobs);
        }
        let late = begun + Duration::from_secs(100);
        let (jobs, _) = own.plan(entries(0..1000), &stored, true, late);
        writes += jobs.len();
        write(&mut stored, jobs);
        assert!(writes <= 100, "{writes}");
        assert_eq!(stored.len(), 10);
        let all: Entries = stored.values().flatten().map(|(k, e)| (*k, *e)).collect();
        assert_eq!(all, entries(0..1000));
        assert_eq!(
            own.plan(entries(0..1000), &stored, true, late),
            (Vec::new(), None)
        );
    }

    #[test]
    fn an_entry_stays_in_its_slice_and_the_room_that_others_leave_is_used() {
        let mut own = OwnSlices::default();
        let mut stored = BTreeMap::new();
        let mut now = Instant::now();
        let mut plan = |stored: &mut _, wanted| {
            now += SHORTEST_GAP;
            let (jobs, _) = own.plan(wanted, stored, true, now);
            let written: Vec<_> = jobs.iter().map(|job| job.index).collect();
            write(stored, jobs);
            written
        };
        assert_eq!(plan(&mut stored, entries(0..250)), [0, 1, 2]);
        let mut fewer = entries(0..250);
        fewer.extend(entries(250..251));
        fewer.retain(|key, _| !entries(3..4).contains_key(key));
        assert_eq!(plan(&mut stored, fewer), [0]);
        assert_eq!(plan(&mut stored, entries(0..100)), [0, 1, 2]);
        assert_eq!(plan(&mut stored, Entries::new()), [0]);
        assert!(stored.is_empty(), "{stored:?}");
    }

    #[test]
    fn entries_of_an_earlier_agent_stay_until_they_are_forgotten_or_withdrawn() {
        let mut own = OwnSlices::default();
        let stored = BTreeMap::from([(4, entries(0..3))]);
        let now = Instant::now();
        assert_eq!(own.plan(entries(0..1), &stored, false, now).0, []);
        // The first one was wanted, and is withdrawn.
        let (jobs, _) = own.plan(Entries::new(), &stored, false, now);
        assert_eq!(jobs[0].entries, entries(1..3));
        let (jobs, _) = own.plan(Entries::new(), &stored, true, now + SHORTEST_GAP);
        assert!(jobs[0].entries.is_empty() && jobs[0].is_known, "{jobs:?}");
    }
}
