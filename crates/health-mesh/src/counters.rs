//! Counters of the prober itself.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};

/// ICMP messages with this agent's identifier that match no waiting probe.
#[derive(Debug, Default)]
pub(super) struct IgnoredReplies {
    unexpected: AtomicU64,
    wrong_source: AtomicU64,
    wrong_payload: AtomicU64,
    unmatched_error: AtomicU64,
}

impl IgnoredReplies {
    pub(super) fn unexpected(&self) {
        self.unexpected.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn wrong_source(&self) {
        self.wrong_source.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn wrong_payload(&self) {
        self.wrong_payload.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn unmatched_error(&self) {
        self.unmatched_error.fetch_add(1, Ordering::Relaxed);
    }

    /// The current counts.
    pub(super) fn counts(&self) -> IgnoredReplyCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IgnoredReplyCounts {
            unexpected: count(&self.unexpected),
            wrong_source: count(&self.wrong_source),
            wrong_payload: count(&self.wrong_payload),
            unmatched_error: count(&self.unmatched_error),
        }
    }
}

/// Counters of `GET /hello` requests to a responder.
#[derive(Debug, Default)]
pub struct HelloRequests {
    malformed: AtomicU64,
    no_proof: AtomicU64,
    clock: AtomicU64,
    wrong_node: AtomicU64,
    too_many: AtomicU64,
}

impl HelloRequests {
    pub(super) fn add_malformed(&self) {
        self.malformed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_no_proof(&self) {
        self.no_proof.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_clock(&self) {
        self.clock.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_wrong_node(&self) {
        self.wrong_node.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_too_many(&self) {
        self.too_many.fetch_add(1, Ordering::Relaxed);
    }

    /// The current counts.
    pub fn counts(&self) -> HelloRequestCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HelloRequestCounts {
            malformed: count(&self.malformed),
            no_proof: count(&self.no_proof),
            clock: count(&self.clock),
            wrong_node: count(&self.wrong_node),
            too_many: count(&self.too_many),
        }
    }
}

/// Bad `GET /hello` requests since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HelloRequestCounts {
    /// The header about echo probes is malformed.
    pub malformed: u64,
    /// Refused: no valid proof of the mesh key.
    pub no_proof: u64,
    /// Refused: the clocks differ, or an old request is replayed.
    pub clock: u64,
    /// Refused: addressed to another node.
    pub wrong_node: u64,
    /// Connections closed because their source already uses all its slots.
    pub too_many: u64,
}

impl Add for HelloRequestCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            malformed: self.malformed + other.malformed,
            no_proof: self.no_proof + other.no_proof,
            clock: self.clock + other.clock,
            wrong_node: self.wrong_node + other.wrong_node,
            too_many: self.too_many + other.too_many,
        }
    }
}

/// ICMP messages with this agent's identifier that changed nothing, since the mesh started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredReplyCounts {
    /// Echo replies with a sequence number that no probe waits for: late, duplicate or forged.
    pub unexpected: u64,
    /// Echo replies to a probe that was sent to another address.
    pub wrong_source: u64,
    /// Echo replies without a probe's payload.
    pub wrong_payload: u64,
    /// ICMP errors about a probe that is no longer waiting or never existed.
    pub unmatched_error: u64,
}
