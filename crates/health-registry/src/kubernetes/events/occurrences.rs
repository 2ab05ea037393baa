//! Which occurrences of events are written, when, and as which object. An event that occurs again is counted in its
//! object. Makes no requests; callers pass the time in.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use health_model::pace::Budget;
use jiff::Timestamp;
use tokio::time::Instant;

use super::{Attempt, ObjectEvent};

/// How many occurrences about one object are written in a row; same as in the kubelet.
const BURST: u32 = 25;
/// Time after which one more occurrence is written; same as in the kubelet.
const REFILL: Duration = Duration::from_secs(300);
/// How long a repetition is counted in the object of an earlier occurrence. API servers forget events after an hour.
const REMEMBERED: Duration = Duration::from_secs(60 * 60);
/// Maximum number of events that are remembered.
const MOST: usize = 1000;

/// The occurrences so far.
#[derive(Debug)]
pub(super) struct Occurrences {
    began: Instant,
    events: BTreeMap<ObjectEvent, Occurred>,
    /// The budgets of objects, by UID. An object without one has a full budget.
    budgets: HashMap<String, Budget>,
}

/// An event that occurred, and its object.
#[derive(Clone, Debug)]
pub(super) struct Occurred {
    /// Distinguishes the object from those of other agents and of earlier times.
    pub(super) series: Timestamp,
    pub(super) last: Timestamp,
    pub(super) count: u32,
    /// The count in the API server; 0 if it has no object yet.
    pub(super) written: u32,
    last_at: Instant,
    /// When to write it next, if there is anything new.
    attempt: Option<Attempt>,
}

impl Occurrences {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            events: BTreeMap::new(),
            budgets: HashMap::new(),
        }
    }

    /// Records an occurrence, unless there were too many about its object.
    pub(super) fn note(&mut self, event: ObjectEvent, now: Instant, wall: Timestamp) {
        self.forget(now);
        let since = now.saturating_duration_since(self.began);
        let budget = self.budgets.entry(event.uid.clone());
        let budget = budget.or_insert_with(|| Budget::with_burst(REFILL, BURST));
        if !budget.allows(since) {
            return;
        }
        budget.take(since);
        let occurred = self.events.entry(event).or_insert_with(|| Occurred {
            series: wall,
            last: wall,
            count: 0,
            written: 0,
            last_at: now,
            attempt: None,
        });
        occurred.count += 1;
        (occurred.last, occurred.last_at) = (wall, now);
        occurred.attempt.get_or_insert_with(|| Attempt::at(now));
    }

    /// Drops what need not be remembered.
    fn forget(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.began);
        self.budgets.retain(|_, budget| !budget.is_full(since));
        self.events.retain(|_, event| {
            event.attempt.is_some() || now.saturating_duration_since(event.last_at) < REMEMBERED
        });
        if self.events.len() >= MOST {
            let oldest = self.events.iter().min_by_key(|(_, event)| event.last_at);
            if let Some(oldest) = oldest.map(|(event, _)| event.clone()) {
                self.events.remove(&oldest);
            }
        }
    }

    /// The next event to write, and when.
    pub(super) fn next(&self) -> Option<(Instant, &ObjectEvent)> {
        let due = self.events.iter();
        let due = due.filter_map(|(event, one)| Some((one.attempt.as_ref()?.at, event)));
        due.min_by_key(|(at, _)| *at)
    }

    /// What to write for an event.
    pub(super) fn get(&self, event: &ObjectEvent) -> Option<Occurred> {
        self.events.get(event).cloned()
    }

    /// Records that this many occurrences of an event are in the API server: 0 if it has forgotten the object.
    pub(super) fn note_written(&mut self, event: &ObjectEvent, count: u32, now: Instant) {
        if let Some(occurred) = self.events.get_mut(event) {
            occurred.written = count;
            occurred.attempt = (count < occurred.count).then(|| Attempt::at(now));
        }
    }

    /// Plans another attempt after a failure. Returns whether this was the first one.
    pub(super) fn note_failed(&mut self, event: &ObjectEvent, now: Instant) -> bool {
        let occurred = self.events.get_mut(event);
        let attempt = occurred.and_then(|occurred| occurred.attempt.as_mut());
        attempt.is_some_and(|attempt| attempt.retry(now))
    }
}

#[cfg(test)]
mod tests {
    use super::super::EventType;
    use super::*;

    fn event(uid: &str, message: &str) -> ObjectEvent {
        ObjectEvent {
            kind: "Pod".to_owned(),
            api_version: "v1".to_owned(),
            namespace: Some("shop".to_owned()),
            name: "web".to_owned(),
            uid: uid.to_owned(),
            field_path: None,
            event_type: EventType::Warning,
            reason: "Unhealthy",
            message: message.to_owned(),
        }
    }

    /// Writes everything that is due. Returns the number of writes.
    fn write(occurrences: &mut Occurrences, now: Instant) -> usize {
        let mut writes = 0;
        while let Some((at, event)) = occurrences.next().filter(|(at, _)| *at <= now) {
            assert!(at <= now);
            let event = event.clone();
            let count = occurrences.get(&event).unwrap().count;
            occurrences.note_written(&event, count, now);
            writes += 1;
        }
        writes
    }

    #[test]
    fn an_event_that_occurs_again_is_counted_in_its_object() {
        let now = Instant::now();
        let mut occurrences = Occurrences::new(now);
        for _ in 0..3 {
            occurrences.note(event("u-1", "refused"), now, Timestamp::UNIX_EPOCH);
        }
        let first = occurrences.get(&event("u-1", "refused")).unwrap();
        assert_eq!((first.count, first.written), (3, 0));
        assert_eq!(write(&mut occurrences, now), 1);
        occurrences.note(event("u-1", "refused"), now, Timestamp::UNIX_EPOCH);
        let again = occurrences.get(&event("u-1", "refused")).unwrap();
        assert_eq!((again.count, again.written), (4, 3));
        // The server has forgotten it.
        occurrences.note_written(&event("u-1", "refused"), 0, now);
        assert_eq!(write(&mut occurrences, now), 1);
    }

    #[test]
    fn an_object_with_many_events_is_limited_and_others_are_not() {
        let begun = Instant::now();
        let mut occurrences = Occurrences::new(begun);
        let mut writes = 0;
        for second in 0..3600_u64 {
            let now = begun + Duration::from_secs(second);
            occurrences.note(
                event("u-1", &second.to_string()),
                now,
                Timestamp::UNIX_EPOCH,
            );
            writes += write(&mut occurrences, now);
        }
        assert_eq!(writes, 25 + 3599 / 300);
        let now = begun + Duration::from_secs(3600);
        occurrences.note(event("u-2", "refused"), now, Timestamp::UNIX_EPOCH);
        assert_eq!(write(&mut occurrences, now), 1);
    }

    #[test]
    fn a_failed_write_is_repeated_with_growing_pauses() {
        let now = Instant::now();
        let mut occurrences = Occurrences::new(now);
        occurrences.note(event("u-1", "refused"), now, Timestamp::UNIX_EPOCH);
        let mut last = now;
        let mut pauses = Vec::new();
        for _ in 0..3 {
            occurrences.note_failed(&event("u-1", "refused"), last);
            let (at, _) = occurrences.next().unwrap();
            pauses.push((at - last).as_secs());
            last = at;
        }
        assert_eq!(pauses, [1, 2, 4]);
    }
}
