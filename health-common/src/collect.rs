//! Garbage collection of expired conntrack and NAT entries: which entries may be removed, which belong together, and
//! the requests to `ct_collect`, which removes them.

use crate::ct::{Tuple4, Tuple6};

/// Maximum number of keys in one request. The limit is small because packets on the same CPU wait while the program
/// runs.
pub const CHUNK: usize = 64;

/// Operation: the keys are those of flows; removes the flows' entries together with their translations.
pub const COLLECT_FLOWS: u32 = 1;
/// Operation: the keys are those of translations without a flow.
pub const COLLECT_ORPHANS: u32 = 2;
/// Operation: the keys are those of TCP flows through services, from a map that is nearly full. Removes the flows that
/// are not in conntrack.
pub const COLLECT_SERVICE_FLOWS: u32 = 3;

/// Return value: every key was handled.
pub const COLLECTED: u32 = 0;
/// Return value: the packet is not a request in this version's format.
pub const NOT_A_REQUEST: u32 = 1;

/// How long a translation may exist without a conntrack entry for its flow, in nanoseconds: the two are created one
/// after the other.
pub const ORPHAN_AGE_NS: u64 = 60_000_000_000;

/// What to remove, and the result.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectHeader {
    /// Placeholder for the Ethernet header that the kernel requires in a test run; zero.
    pub ethernet: [u8; 16],
    /// [`COLLECT_FLOWS`], [`COLLECT_ORPHANS`] or [`COLLECT_SERVICE_FLOWS`].
    pub operation: u32,
    /// IP version of the keys: 4 or 6.
    pub ip_version: u32,
    /// Number of keys.
    pub count: u32,
    /// Result: flows whose entry was removed; for services, entries removed.
    pub flows: u32,
    /// Result: entries kept because they are in use again.
    pub refreshed: u32,
    /// Result: translation entries removed, two per complete translation.
    pub translations: u32,
}

/// A request, passed as the packet of a test run.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectRequest<T> {
    /// Operation and results.
    pub header: CollectHeader,
    /// The keys to handle.
    pub keys: [T; CHUNK],
}

crate::map_types!(
    CollectHeader = 40,
    CollectRequest<Tuple4> = 1064,
    CollectRequest<Tuple6> = 2600,
);

/// Whether a translation is old enough to be an orphan; both times are `CLOCK_MONOTONIC`, in nanoseconds.
#[inline(always)]
pub const fn may_be_orphan(created_ns: u64, now_ns: u64) -> bool {
    created_ns.saturating_add(ORPHAN_AGE_NS) < now_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translations_without_a_flow_are_orphans_after_a_minute() {
        assert!(!may_be_orphan(5, ORPHAN_AGE_NS + 5));
        assert!(may_be_orphan(5, ORPHAN_AGE_NS + 6));
        assert!(!may_be_orphan(u64::MAX, 0));
    }
}
