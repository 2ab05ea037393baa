//! What the prober counts of itself.

use std::sync::atomic::{AtomicU64, Ordering};

/// ICMP messages with this agent's identifier that concern no probe that waits.
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

    /// The counts so far.
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

/// Headers of `GET /hello` that cannot be read, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MalformedHeaderCounts {
    /// Of requests to this agent.
    pub requests: u64,
    /// Of answers to it.
    pub answers: u64,
}

/// ICMP messages with this agent's identifier that changed nothing, since the mesh's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredReplyCounts {
    /// Echo replies with a sequence number that no probe waits for: late, duplicate or forged.
    pub unexpected: u64,
    /// Echo replies to a probe that went to another address.
    pub wrong_source: u64,
    /// Echo replies without the payload of a probe.
    pub wrong_payload: u64,
    /// ICMP errors about a probe that no longer waits, or that never was.
    pub unmatched_error: u64,
}
