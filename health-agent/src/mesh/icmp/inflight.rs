//! Probes that wait for their answer, by sequence number.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use super::Probe;

/// The probes of one socket that wait for their answer.
#[derive(Debug)]
pub(super) struct Inflight {
    probes: HashMap<u16, Probe>,
    /// By time of expiry. An entry whose probe has gone, or has another expiry, means nothing.
    expiries: BinaryHeap<Reverse<(Duration, u16)>>,
    next: u16,
}

impl Inflight {
    /// Begins with the sequence number `first`.
    pub(super) fn new(first: u16) -> Self {
        Self {
            probes: HashMap::new(),
            expiries: BinaryHeap::new(),
            next: first,
        }
    }

    /// Files a probe under a sequence number that no other has, and which is not 0: that is what a
    /// row without samples holds. `None` when all are taken.
    pub(super) fn insert(&mut self, probe: Probe) -> Option<u16> {
        if self.probes.len() >= usize::from(u16::MAX) {
            return None;
        }
        while self.next == 0 || self.probes.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let sequence = self.next;
        self.next = self.next.wrapping_add(1);
        self.expiries.push(Reverse((probe.expires, sequence)));
        self.probes.insert(sequence, probe);
        Some(sequence)
    }

    /// The probe with this number.
    pub(super) fn get_mut(&mut self, sequence: u16) -> Option<&mut Probe> {
        self.probes.get_mut(&sequence)
    }

    /// Takes the probe out if it went to `accept`ed; duplicates find nothing.
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

    /// Takes out a probe that has expired, if one has.
    pub(super) fn take_expired(&mut self, now: Duration) -> Option<(u16, Probe)> {
        if self.next_expiry()? > now {
            return None;
        }
        let Reverse((_, sequence)) = self.expiries.pop()?;
        Some((sequence, self.probes.remove(&sequence)?))
    }

    /// Forgets the probes that are not to be kept.
    pub(super) fn retain(&mut self, keep: impl Fn(&Probe) -> bool) {
        self.probes.retain(|_, probe| keep(probe));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use health_common::probe::Path;

    use super::super::super::target::{Protocol, TargetId, TargetKey};
    use super::*;

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
            stamped: true,
        }
    }

    #[test]
    fn numbers_wrap_past_zero_and_past_those_in_use() {
        let mut inflight = Inflight::new(u16::MAX);
        assert_eq!(inflight.insert(probe(1)), Some(u16::MAX));
        assert_eq!(inflight.insert(probe(1)), Some(1));
        inflight.next = u16::MAX;
        assert_eq!(inflight.insert(probe(1)), Some(2));
    }

    #[test]
    fn all_numbers_can_be_in_use() {
        let mut inflight = Inflight::new(9);
        for _ in 1..=u16::MAX {
            assert!(inflight.insert(probe(1)).is_some());
        }
        assert_eq!(inflight.insert(probe(1)), None);
        assert!(inflight.take(9, |_| true).is_some());
        assert_eq!(inflight.insert(probe(1)), Some(9));
    }

    #[test]
    fn only_what_waits_expires_and_only_once() {
        let mut inflight = Inflight::new(1);
        let late = inflight.insert(probe(20)).unwrap();
        let early = inflight.insert(probe(10)).unwrap();
        let answered = inflight.insert(probe(5)).unwrap();
        assert!(inflight.take(answered, |_| true).is_some());
        assert!(inflight.take(answered, |_| true).is_none());
        assert!(inflight.take(late, |_| false).is_none());
        assert_eq!(inflight.next_expiry(), Some(Duration::from_millis(10)));
        assert!(inflight.take_expired(Duration::from_millis(9)).is_none());
        let now = Duration::from_millis(30);
        assert_eq!(inflight.take_expired(now).unwrap().0, early);
        assert_eq!(inflight.take_expired(now).unwrap().0, late);
        assert!(inflight.take_expired(now).is_none());
        assert_eq!(inflight.next_expiry(), None);
    }
}
