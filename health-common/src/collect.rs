//! Collection of conntrack and NAT entries whose time is over: which may go, what belongs together, and
//! how `ct_collect` is asked to remove them.

use crate::ct::{TUPLE_OUT, Tuple4, Tuple6};
use crate::nat::{NatEntry4, NatEntry6};

/// Most keys in one request. It is short, since packets of the CPU wait while the program runs.
pub const CHUNK: usize = 64;

/// Operation: the keys are flows; their entries go, and with them those of their translations.
pub const COLLECT_FLOWS: u32 = 1;
/// Operation: the keys are those of translations without a flow.
pub const COLLECT_ORPHANS: u32 = 2;

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
    /// [`COLLECT_FLOWS`] or [`COLLECT_ORPHANS`].
    pub operation: u32,
    /// IP version of the keys: 4 or 6.
    pub ip_version: u32,
    /// How many keys there are.
    pub count: u32,
    /// Answer: flows whose entry was removed.
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

/// A tuple of one IP version with what its flow's translation consists of: an entry under the flow's own
/// tuple in direction out, and one under the tuple of what comes back.
pub trait Translated: Copy + PartialEq {
    /// The value of the NAT map.
    type Entry: Copy;
    /// As [`CollectHeader::ip_version`].
    const IP_VERSION: u32;

    /// The same addresses and ports in another direction.
    #[must_use]
    fn in_direction(self, direction: u8) -> Self;

    /// Of an outbound flow that is translated by `out`: the key of the entry for what comes back.
    #[must_use]
    fn reply_key(self, out: &Self::Entry) -> Self;

    /// The outbound flow that `entry`, found under this key, is for.
    #[must_use]
    fn flow(self, entry: &Self::Entry) -> Self;

    /// When the entry was made: nanoseconds of `CLOCK_MONOTONIC`.
    fn created_ns(entry: &Self::Entry) -> u64;
}

macro_rules! translated {
    ($tuple:ty, $entry:ty, $ip_version:literal) => {
        impl Translated for $tuple {
            type Entry = $entry;
            const IP_VERSION: u32 = $ip_version;

            #[inline(always)]
            fn in_direction(self, direction: u8) -> Self {
                Self { direction, ..self }
            }

            #[inline(always)]
            fn reply_key(self, out: &$entry) -> Self {
                out.inbound_key(&self)
            }

            #[inline(always)]
            fn flow(self, entry: &$entry) -> Self {
                if self.direction == TUPLE_OUT {
                    self
                } else {
                    entry.outbound_key(&self)
                }
            }

            #[inline(always)]
            fn created_ns(entry: &$entry) -> u64 {
                entry.created_ns
            }
        }
    };
}

translated!(Tuple4, NatEntry4, 4);
translated!(Tuple6, NatEntry6, 6);

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: Tuple4 = Tuple4 {
        saddr_be: 1,
        daddr_be: 2,
        sport_be: 3,
        dport_be: 4,
        protocol: 6,
        direction: TUPLE_OUT,
        pad: 0,
    };

    #[test]
    fn both_entries_of_a_translation_lead_to_its_flow() {
        let out = NatEntry4 {
            addr_be: 9,
            port_be: 8,
            ..NatEntry4::default()
        };
        let key = FLOW.reply_key(&out);
        let back = NatEntry4 {
            addr_be: FLOW.saddr_be,
            port_be: FLOW.sport_be,
            ..NatEntry4::default()
        };
        assert_eq!(FLOW.flow(&out), FLOW);
        assert_eq!(key.flow(&back), FLOW);
    }

    #[test]
    fn translations_without_a_flow_are_orphans_after_a_minute() {
        assert!(!may_be_orphan(5, ORPHAN_AGE_NS + 5));
        assert!(may_be_orphan(5, ORPHAN_AGE_NS + 6));
        assert!(!may_be_orphan(u64::MAX, 0));
    }
}
