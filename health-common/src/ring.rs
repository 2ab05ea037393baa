//! Eviction from the TCP tables, which are hash maps. A ring holds the keys of a table's entries in insertion order.
//! When an insertion finds the table full, a hand moves round the ring, as in the CLOCK algorithm, and evicts
//!
//! - a worthless entry, i.e. one whose connection is closed, has not completed its handshake, or has seen packets from
//!   one side only;
//! - or, if no worthless entry was found for [`SPARE_SECS`], the least recently used of [`CANDIDATES`] entries.
//!
//! The new key takes the evicted one's slot. So a flood of unanswered packets evicts its own entries.

/// Index of the hand for the ring of `HEALTH_CT4`.
pub const RING_CT4: u32 = 0;
/// Like [`RING_CT4`], for `HEALTH_CT6`.
pub const RING_CT6: u32 = 1;
/// Like [`RING_CT4`], for `HEALTH_NAT4`.
pub const RING_NAT4: u32 = 2;
/// Like [`RING_CT4`], for `HEALTH_NAT6`.
pub const RING_NAT6: u32 = 3;
/// Like [`RING_CT4`], for `HEALTH_REVNAT4`.
pub const RING_REVNAT4: u32 = 4;
/// Like [`RING_CT4`], for `HEALTH_REVNAT6`.
pub const RING_REVNAT6: u32 = 5;
/// Number of rings.
pub const RINGS: u32 = 6;

/// Maximum number of keys checked in search of an entry to evict.
pub const CANDIDATES: u32 = 16;

/// How long valuable entries are spared after a worthless one was found, or after a table became full, in seconds.
pub const SPARE_SECS: u32 = 2;
/// A full table counts as newly full if it had needed no eviction for this long, in seconds.
pub const ROOM_SECS: u32 = 10;
/// Number of vacated slots remembered at the same time.
pub const VACATED: usize = 8;

/// The position at which a ring is written next. Padded to a cache line because different CPUs move different hands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hand {
    /// Number of slots passed; wraps.
    pub next: u32,
    /// Number of slots in the ring; 0: the ring is not yet in use.
    pub slots: u32,
    /// When an entry last had to be evicted: `CLOCK_MONOTONIC`, in seconds.
    pub full_at: u32,
    /// Until when valuable entries are spared: `CLOCK_MONOTONIC`, in seconds.
    pub spare_until: u32,
    /// Numbers, from 1, of slots whose entries were evicted and which have not been rewritten since; 0: none.
    pub vacated: [u32; VACATED],
    /// Explicit padding, zero.
    pub pad: [u32; 4],
}

crate::map_types!(Hand = 64);
