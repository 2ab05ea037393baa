//! Distributes this node's entries over its slices. An entry stays in its slice, so that a change writes few slices. No
//! connection and no clock of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::objects::{Entries, EntryKey};

/// Maximum number of entries of a slice, as for Kubernetes' own slices of endpoints.
const MAX_ENTRIES: usize = 100;
/// Minimum time between two writes of a slice: starting pods come in numbers, and each write goes to all agents.
pub(super) const SHORTEST_GAP: Duration = Duration::from_secs(1);
/// How long details must differ from those in the store before they alone cause a write of the slice: endpoints leave
/// the state `ready` for a moment with each change of policy.
pub(super) const DETAILS_HOLD: Duration = Duration::from_secs(5);
/// Minimum time between two writes of a slice that only details cause.
pub(super) const DETAILS_GAP: Duration = Duration::from_secs(30);

/// This node's slices as they should be.
#[derive(Debug, Default)]
pub(super) struct OwnSlices {
    slots: BTreeMap<u32, Entries>,
    /// The writes of each slice.
    written: BTreeMap<u32, Written>,
    /// Entries of the node's earlier agent that this agent has not confirmed; `None` before the first listing.
    inherited: Option<Entries>,
    /// The slices in the store that must be written even if their entries are right.
    faulty: BTreeSet<u32>,
}

/// When a slice was written, and since when it must be.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    last: Option<Instant>,
    /// When it was last written only because of details.
    for_details: Option<Instant>,
    /// Since when only details differ from those in the store.
    differs_since: Option<Instant>,
}

impl Written {
    /// When the slice may be written, after a difference that agents read or only in details.
    fn due(&mut self, is_only_details: bool, now: Instant) -> Instant {
        let after = |at: Option<Instant>, gap| at.map_or(now, |at| at + gap);
        let earliest = after(self.last, SHORTEST_GAP);
        if !is_only_details {
            return earliest;
        }
        let held = *self.differs_since.get_or_insert(now) + DETAILS_HOLD;
        let spaced = after(self.for_details, DETAILS_GAP);
        earliest.max(held).max(spaced)
    }

    fn note(&mut self, is_only_details: bool, now: Instant) {
        self.last = Some(now);
        self.differs_since = None;
        if is_only_details {
            self.for_details = Some(now);
        }
    }
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
    /// Sets the slices in the store that must be written even if their entries are right.
    pub(super) fn set_faulty(&mut self, faulty: BTreeSet<u32>) {
        self.faulty = faulty;
    }

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
            let (slot, known) = (self.slots.get(&index), stored.get(&index));
            let written = self.written.entry(index).or_default();
            if slot == known && !self.faulty.contains(&index) {
                written.differs_since = None;
                continue;
            }
            let is_only_details = is_same_to_agents(slot, known);
            let left = written.due(is_only_details, now) - now;
            if left.is_zero() {
                written.note(is_only_details, now);
                jobs.push(SliceJob {
                    index,
                    entries: slot.cloned().unwrap_or_default(),
                    is_known: known.is_some(),
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
        let inherited = self.inherited.get_or_insert_with(|| {
            earlier()
                .map(|(key, entry)| (*key, entry.clone()))
                .collect()
        });
        if forgets_earlier {
            inherited.clear();
        }
        if inherited.is_empty() {
            return wanted;
        }
        // Once wanted, an entry goes when it is no longer wanted. So does one whose address another endpoint has.
        let addresses = wanted.values().flat_map(|entry| entry.addresses.keys());
        let addresses: BTreeSet<IpAddr> = addresses.copied().collect();
        inherited.retain(|key, entry| {
            let mut own = entry.addresses.keys();
            !wanted.contains_key(key) && !own.any(|ip| addresses.contains(ip))
        });
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

/// Whether agents read the same from both slices.
fn is_same_to_agents(slot: Option<&Entries>, known: Option<&Entries>) -> bool {
    let (Some(slot), Some(known)) = (slot, known) else {
        return false;
    };
    let mut pairs = slot.iter().zip(known);
    slot.len() == known.len()
        && pairs
            .all(|((key, entry), (other, known))| key == other && entry.is_same_to_agents(known))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use health_model::identity::Identity;

    use super::super::super::EndpointDetails;
    use super::super::super::view::LabelsDigest;
    use super::super::objects::Entry;
    use super::*;

    fn entries(range: std::ops::Range<u16>) -> Entries {
        in_state(range, |_| "ready")
    }

    fn in_state(range: std::ops::Range<u16>, state: impl Fn(u16) -> &'static str) -> Entries {
        let node = IpAddr::from([172, 30, 0, 1]);
        let entry = |i: u16| {
            let [high, low] = i.to_be_bytes();
            let ip = Ipv4Addr::new(10, 244, high, low);
            let details = EndpointDetails {
                pod: Some(format!("shop/web-{i}")),
                state: state(i).to_owned(),
            };
            let entry = Entry {
                identity: Identity(300 + u32::from(i)),
                digest: Some(LabelsDigest(i.into())),
                addresses: BTreeMap::from([(ip.into(), node)]),
                details: Some(details),
            };
            (EntryKey::Endpoint(i), entry)
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
        let mut plan = |wanted: Entries, at: Instant| {
            let (jobs, wait) = own.plan(wanted, &stored, true, at);
            writes += jobs.len();
            write(&mut stored, jobs);
            wait
        };
        // Each endpoint is built, waits for a change of policy, is built again, and is then ready.
        for i in 0..1000_u16 {
            let now = begun + Duration::from_millis(60) * u32::from(i);
            let state = |one: u16| match i - one {
                0..10 => "regenerating",
                10..20 => "waiting-to-regenerate",
                20..30 => "regenerating",
                _ => "ready",
            };
            plan(in_state(0..i + 1, state), now);
        }
        let mut now = begun + Duration::from_secs(60);
        while let Some(wait) = plan(entries(0..1000), now) {
            now += wait;
        }
        assert!(writes <= 100, "{writes}");
        assert!(now < begun + Duration::from_secs(100), "{:?}", now - begun);
        assert_eq!(stored.len(), 10);
        let all = stored.into_values().flatten().collect::<Entries>();
        assert_eq!(all, entries(0..1000));
    }

    #[test]
    fn endpoints_whose_state_flaps_cost_no_writes_and_those_that_change_slowly_few() {
        let begun = Instant::now();
        let writes_of_an_hour = |period: u64| {
            let mut own = OwnSlices::default();
            let mut stored = BTreeMap::new();
            let mut writes = 0;
            for second in 0..3600 {
                let is_well = (second / period).is_multiple_of(2);
                let state = if is_well { "ready" } else { "regenerating" };
                let now = begun + Duration::from_secs(second);
                let (jobs, _) = own.plan(in_state(0..100, |_| state), &stored, true, now);
                writes += jobs.len();
                write(&mut stored, jobs);
            }
            writes
        };
        assert_eq!(writes_of_an_hour(2), 1, "only the first one");
        let slow = writes_of_an_hour(20);
        assert!((2..=120).contains(&slow), "{slow}");
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

    #[test]
    fn a_slice_with_the_right_entries_is_written_if_it_is_faulty() {
        let mut own = OwnSlices::default();
        let stored = BTreeMap::from([(0, entries(0..2)), (1, entries(2..4))]);
        own.set_faulty(BTreeSet::from([1]));
        let now = Instant::now();
        own.plan(entries(0..4), &stored, true, now);
        let (jobs, _) = own.plan(entries(0..4), &stored, true, now + DETAILS_HOLD);
        let written: Vec<_> = jobs.iter().map(|job| job.index).collect();
        assert_eq!(written, [1]);
    }

    #[test]
    fn an_entry_of_an_earlier_agent_goes_when_another_endpoint_has_its_address() {
        let mut own = OwnSlices::default();
        let stored = BTreeMap::from([(0, entries(0..2))]);
        let moved = Entries::from([(
            EntryKey::Endpoint(9),
            entries(0..1)[&EntryKey::Endpoint(0)].clone(),
        )]);
        let (jobs, _) = own.plan(moved.clone(), &stored, false, Instant::now());
        let mut wanted = entries(1..2);
        wanted.extend(moved);
        assert_eq!(jobs[0].entries, wanted);
    }
}
