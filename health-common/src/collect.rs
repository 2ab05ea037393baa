//! Collection of conntrack and NAT entries whose time is over: which may go, what belongs together, and
//! how `ct_collect` is asked to remove them.

use crate::ct::{Tuple4, Tuple6};

/// Most keys in one request. It is short, since packets of the CPU wait while the program runs.
pub const CHUNK: usize = 64;

/// Operation: the keys are flows; their entries go, and with them those of their translations.
pub const COLLECT_FLOWS: u32 = 1;
/// Operation: the keys are those of translations without a flow.
pub const COLLECT_ORPHANS: u32 = 2;
/// Operation: the keys are those of flows of TCP through services, of a map that is nearly full. Those that conntrack does not
/// know go.
pub const COLLECT_SERVICE_FLOWS: u32 = 3;

/// Return value: each key was seen to.
pub const COLLECTED: u32 = 0;
/// Return value: it is no request of this version.
pub const NOT_A_REQUEST: u32 = 1;

/// So long, in nanoseconds, a translation may be there without an entry of its flow: whoever opens a
/// flow enters one after the other.
pub const ORPHAN_AGE_NS: u64 = 60_000_000_000;

/// What to remove, and what came of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectHeader {
    /// Stands for the Ethernet header that the kernel asks of a test run; zero.
    pub ethernet: [u8; 16],
    /// [`COLLECT_FLOWS`], [`COLLECT_ORPHANS`] or [`COLLECT_SERVICE_FLOWS`].
    pub operation: u32,
    /// IP version of the keys: 4 or 6.
    pub ip_version: u32,
    /// How many keys there are.
    pub count: u32,
    /// Answer: flows whose entry was removed; of services, entries.
    pub flows: u32,
    /// Answer: entries left alone, since they are in use again.
    pub refreshed: u32,
    /// Answer: entries of translations removed, two for a whole one.
    pub translations: u32,
}

/// A request, as the "packet" of a test run.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectRequest<T> {
    /// What to do.
    pub header: CollectHeader,
    /// With what.
    pub keys: [T; CHUNK],
}

crate::map_types!(
    CollectHeader = 40,
    CollectRequest<Tuple4> = 1064,
    CollectRequest<Tuple6> = 2600,
);

/// Whether a translation is old enough to be an orphan, both times in nanoseconds of `CLOCK_MONOTONIC`.
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
