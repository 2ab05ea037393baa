//! Probes waiting for an answer, by sequence number.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use health_common::probe::ProbeId;

use super::Probe;
use crate::target::TargetKey;

/// The probes of one socket that wait for an answer.
#[derive(Debug)]
pub(super) struct Inflight {
    probes: HashMap<u16, Probe>,
    /// By expiry time. An entry is stale if its probe is gone or has another expiry.
    expiries: BinaryHeap<Reverse<(Duration, u16)>>,
    /// Number of the next probe.
    next: ProbeId,
}

impl Inflight {
    /// Starts a session with the sequence number `first`.
    pub(super) fn new(session: u32, first: u16) -> Self {
        Self {
            probes: HashMap::new(),
            expiries: BinaryHeap::new(),
            next: ProbeId {
                session,
                round: 0,
                sequence: first,
            },
        }
    }

    /// Stores a probe under an unused sequence number. `None` if all are in use.
    pub(super) fn insert(&mut self, probe: Probe) -> Option<ProbeId> {
        if self.probes.len() > usize::from(u16::MAX) {
            return None;
        }
        while self.probes.contains_key(&self.next.sequence) {
            self.advance();
        }
        let number = self.next;
        self.advance();
        self.expiries
            .push(Reverse((probe.expires, number.sequence)));
        self.probes
            .insert(number.sequence, Probe { number, ..probe });
        Some(number)
    }

    fn advance(&mut self) {
        let (sequence, wrapped) = self.next.sequence.overflowing_add(1);
        self.next.sequence = sequence;
        self.next.round = self.next.round.wrapping_add(wrapped.into());
    }

    /// The probe with this number.
    pub(super) fn get_mut(&mut self, number: ProbeId) -> Option<&mut Probe> {
        let probe = self.probes.get_mut(&number.sequence)?;
        (probe.number == number).then_some(probe)
    }

    /// Removes and returns the waiting probe if `accept` approves it. A duplicate reply finds no probe.
    pub(super) fn take(&mut self, sequence: u16, accept: impl Fn(&Probe) -> bool) -> Option<Probe> {
        if self.probes.get(&sequence).is_some_and(accept) {
            self.probes.remove(&sequence)
        } else {
            None
        }
    }

    /// When the next probe expires.
    pub(super) fn next_expiry(&mut self) -> Option<Duration> {
        while let Some(&Reverse((at, sequence))) = self.expiries.peek() {
            if self
                .probes
                .get(&sequence)
                .is_some_and(|probe| probe.expires == at)
            {
                return Some(at);
            }
            self.expiries.pop();
        }
        None
    }

    /// Removes and returns an expired probe, if there is one.
    pub(super) fn take_expired(&mut self, now: Duration) -> Option<Probe> {
        if self.next_expiry()? > now {
            return None;
        }
        let Reverse((_, sequence)) = self.expiries.pop()?;
        self.probes.remove(&sequence)
    }

    /// Number of waiting probes of a target.
    pub(super) fn count(&self, key: &TargetKey) -> usize {
        self.probes
            .values()
            .filter(|probe| probe.key == *key)
            .count()
    }

    /// Drops the probes that `keep` rejects.
    pub(super) fn retain(&mut self, keep: impl Fn(&Probe) -> bool) {
        self.probes.retain(|_, probe| keep(probe));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use health_common::probe::Path;

    use super::*;
    use crate::target::{Protocol, TargetId, TargetKey};

    fn probe(expires_ms: u64) -> Probe {
        Probe {
            id: TargetId::default(),
            key: TargetKey {
                address: IpAddr::from([10, 0, 0, 1]),
                path: Path::Host,
                protocol: Protocol::Icmp,
            },
            sent: Duration::ZERO,
            sent_realtime: Duration::ZERO,
            expires: Duration::from_millis(expires_ms),
            number: ProbeId::default(),
        }
    }

    fn number(round: u16, sequence: u16) -> ProbeId {
        ProbeId {
            session: 7,
            round,
            sequence,
        }
    }

    #[test]
    fn numbers_pass_those_in_use_and_report_how_often_they_wrapped() {
        let mut inflight = Inflight::new(7, u16::MAX);
        assert_eq!(inflight.insert(probe(1)), Some(number(0, u16::MAX)));
        assert_eq!(inflight.insert(probe(1)), Some(number(1, 0)));
        inflight.next.sequence = u16::MAX;
        assert_eq!(inflight.insert(probe(1)), Some(number(2, 1)));
        assert!(inflight.get_mut(number(2, 1)).is_some());
        assert!(inflight.get_mut(number(1, 1)).is_none());
    }

    #[test]
    fn all_numbers_can_be_in_use() {
        let mut inflight = Inflight::new(7, 9);
        for _ in 0..=u16::MAX {
            assert!(inflight.insert(probe(1)).is_some());
        }
        assert_eq!(inflight.insert(probe(1)), None);
        assert!(inflight.take(9, |_| true).is_some());
        assert_eq!(inflight.insert(probe(1)), Some(number(1, 9)));
    }

    #[test]
    fn a_number_that_is_given_again_has_the_time_of_its_new_probe() {
        let mut inflight = Inflight::new(7, 1);
        assert_eq!(inflight.insert(probe(10)), Some(number(0, 1)));
        assert!(inflight.take(1, |_| true).is_some());
        inflight.next = number(1, 1);
        assert_eq!(inflight.insert(probe(50)), Some(number(1, 1)));
        assert!(inflight.take_expired(Duration::from_millis(10)).is_none());
        assert_eq!(inflight.next_expiry(), Some(Duration::from_millis(50)));
    }

    #[test]
    fn only_what_waits_expires_and_only_once() {
        let mut inflight = Inflight::new(7, 1);
        let mut insert = |expires_ms| inflight.insert(probe(expires_ms)).unwrap().sequence;
        let (late, early, answered) = (insert(20), insert(10), insert(5));
        assert!(inflight.take(answered, |_| true).is_some());
        assert!(inflight.take(answered, |_| true).is_none());
        assert!(inflight.take(late, |_| false).is_none());
        assert_eq!(inflight.next_expiry(), Some(Duration::from_millis(10)));
        assert!(inflight.take_expired(Duration::from_millis(9)).is_none());
        let now = Duration::from_millis(30);
        assert_eq!(inflight.take_expired(now).unwrap().number.sequence, early);
        assert_eq!(inflight.take_expired(now).unwrap().number.sequence, late);
        assert!(inflight.take_expired(now).is_none());
        assert_eq!(inflight.next_expiry(), None);
    }
}
