//! The queue of endpoints to regenerate: new endpoints first, then the oldest request. An endpoint is regenerated only
//! once at a time.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Requests to regenerate endpoints, by id.
///
/// A request for an endpoint that is already waiting is merged. A request for an endpoint that is being regenerated is
/// kept until that ends, and then waits behind the others.
#[derive(Debug)]
pub struct RegenerationQueue {
    limit: usize,
    /// New endpoints, which come before all others.
    first: VecDeque<u16>,
    waiting: VecDeque<u16>,
    /// Why each waiting endpoint was requested.
    reasons: HashMap<u16, String>,
    /// Running regenerations; if requested again meanwhile, with the reason.
    running: BTreeMap<u16, Option<String>>,
}

impl RegenerationQueue {
    /// Creates a queue that allows `limit` concurrent regenerations, but at least one.
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            first: VecDeque::new(),
            waiting: VecDeque::new(),
            reasons: HashMap::new(),
            running: BTreeMap::new(),
        }
    }

    /// Requests an endpoint. The first of several reasons is kept.
    pub fn push(&mut self, id: u16, reason: &str) {
        if self.note(id, reason) {
            self.waiting.push_back(id);
        }
    }

    /// Requests an endpoint for which a caller waits. It comes before all endpoints from [`push`](Self::push).
    pub(crate) fn push_first(&mut self, id: u16, reason: &str) {
        if self.note(id, reason) {
            self.first.push_back(id);
        }
    }

    /// Returns whether the endpoint must now be added to a queue.
    fn note(&mut self, id: u16, reason: &str) -> bool {
        if let Some(again) = self.running.get_mut(&id) {
            again.get_or_insert_with(|| reason.to_owned());
            return false;
        }
        match self.reasons.entry(id) {
            Entry::Vacant(place) => {
                place.insert(reason.to_owned());
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Starts the next regeneration, if another may run: of a new endpoint, or else of the one that has waited longest.
    pub fn begin(&mut self) -> Option<(u16, String)> {
        if self.running.len() >= self.limit {
            return None;
        }
        let next = self.first.pop_front();
        let id = next.or_else(|| self.waiting.pop_front())?;
        let reason = self.reasons.remove(&id).unwrap_or_default();
        self.running.insert(id, None);
        Some((id, reason))
    }

    /// Records that a regeneration has ended.
    pub fn end(&mut self, id: u16) {
        if let Some(Some(reason)) = self.running.remove(&id) {
            self.push(id, &reason);
        }
    }

    /// Drops the requests for an endpoint. A running regeneration still needs a call of [`end`](Self::end).
    pub fn forget(&mut self, id: u16) {
        if self.reasons.remove(&id).is_some() {
            self.first.retain(|waiting| *waiting != id);
            self.waiting.retain(|waiting| *waiting != id);
        }
        if let Some(again) = self.running.get_mut(&id) {
            *again = None;
        }
    }

    /// Whether an endpoint is being regenerated.
    pub fn is_running(&self, id: u16) -> bool {
        self.running.contains_key(&id)
    }

    /// Whether an endpoint is waiting or is being regenerated.
    pub(crate) fn is_asked_for(&self, id: u16) -> bool {
        self.reasons.contains_key(&id) || self.is_running(id)
    }

    /// Returns the number of waiting endpoints.
    pub fn waiting(&self) -> usize {
        self.first.len() + self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn begun(queue: &mut RegenerationQueue) -> Vec<u16> {
        std::iter::from_fn(|| queue.begin().map(|(id, _)| id)).collect()
    }

    #[test]
    fn the_oldest_come_first_and_no_more_than_the_limit() {
        let mut queue = RegenerationQueue::new(2);
        for id in [5, 3, 9] {
            queue.push(id, "policy");
        }
        assert_eq!(begun(&mut queue), [5, 3]);
        assert_eq!(queue.waiting(), 1);
        queue.end(3);
        assert_eq!(begun(&mut queue), [9]);
    }

    #[test]
    fn new_ones_come_before_those_that_wait_and_among_themselves_in_order() {
        let mut queue = RegenerationQueue::new(5);
        queue.push(5, "policy");
        for id in [3, 9, 5] {
            queue.push_first(id, "created");
        }
        queue.forget(3);
        queue.push_first(4, "created");
        assert_eq!(begun(&mut queue), [9, 4, 5]);
    }

    #[test]
    fn requests_while_one_waits_are_one_and_while_one_runs_one_more() {
        let mut queue = RegenerationQueue::new(4);
        for _ in 0..5 {
            queue.push(7, "policy");
        }
        assert_eq!(begun(&mut queue), [7]);
        for reason in ["identity", "policy", "policy"] {
            queue.push(7, reason);
        }
        assert_eq!(begun(&mut queue), [0; 0]);
        queue.end(7);
        assert_eq!(queue.begin(), Some((7, "identity".to_owned())));
        queue.end(7);
        assert_eq!(queue.begin(), None);
    }

    #[test]
    fn what_is_forgotten_is_not_begun_again() {
        let mut queue = RegenerationQueue::new(4);
        queue.push(1, "policy");
        queue.push(2, "policy");
        queue.forget(1);
        assert_eq!(begun(&mut queue), [2]);
        queue.push(2, "policy");
        queue.forget(2);
        queue.end(2);
        assert_eq!(queue.begin(), None);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(u16),
        Begin,
        End(u16),
    }

    proptest! {
        #[test]
        fn every_request_is_followed_by_a_beginning(
            limit in 1_usize..4,
            steps in proptest::collection::vec(prop_oneof![
                (0_u16..6).prop_map(Step::Push),
                Just(Step::Begin),
                (0_u16..6).prop_map(Step::End),
            ], 0..200),
        ) {
            let mut queue = RegenerationQueue::new(limit);
            let mut running = HashSet::new();
            // Endpoints that were requested since they last started.
            let mut wanted = HashSet::new();
            for step in steps {
                match step {
                    Step::Push(id) => {
                        queue.push(id, "");
                        wanted.insert(id);
                    }
                    Step::Begin => {
                        let full = running.len() == limit;
                        let any = wanted.iter().any(|id| !running.contains(id));
                        match queue.begin() {
                            Some((id, _)) => {
                                prop_assert!(!full && running.insert(id) && wanted.remove(&id));
                            }
                            None => prop_assert!(full || !any),
                        }
                    }
                    Step::End(id) => {
                        if running.remove(&id) {
                            queue.end(id);
                        }
                    }
                }
            }
        }
    }
}
