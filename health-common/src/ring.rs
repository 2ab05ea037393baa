//! Eviction from the TCP tables, which are hash maps. A ring holds the keys of a table's entries in insertion order.
//! When a new entry finds the table full, a hand moves round the ring, as in the CLOCK algorithm, and evicts
//!
//! - a worthless entry: of a connection that is closed, has not completed its handshake, or has seen packets from one
//!   side only;
//! - else the least recently used of [`CANDIDATES`] entries, if no worthless entry was found for [`SPARE_SECS`].
//!
//! The new key takes the evicted one's slot. So a flood of packets that get no answer evicts its own entries.

/// Index of the hand for the ring of `HEALTH_CT4`.
pub const RING_CT4: u32 = 0;
/// As [`RING_CT4`], for `HEALTH_CT6`.
pub const RING_CT6: u32 = 1;
/// As [`RING_CT4`], for `HEALTH_NAT4`.
pub const RING_NAT4: u32 = 2;
/// As [`RING_CT4`], for `HEALTH_NAT6`.
pub const RING_NAT6: u32 = 3;
/// As [`RING_CT4`], for `HEALTH_REVNAT4`.
pub const RING_REVNAT4: u32 = 4;
/// As [`RING_CT4`], for `HEALTH_REVNAT6`.
pub const RING_REVNAT6: u32 = 5;
/// Number of rings.
pub const RINGS: u32 = 6;

/// Maximum number of keys checked in search of an entry to evict.
pub const CANDIDATES: u32 = 16;

/// How long entries of worth are spared after a worthless one was found, or after a table became full, seconds.
pub const SPARE_SECS: u32 = 2;
/// A table counts as newly full if nothing had to be evicted for this long, seconds.
pub const ROOM_SECS: u32 = 10;
/// Number of vacated slots remembered at a time.
pub const VACATED: usize = 8;

/// Where a ring is written next. Padded to a cache line because other CPUs move other hands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hand {
    /// Number of slots passed; wraps.
    pub next: u32,
    /// Number of slots in the ring; 0: not in use yet.
    pub slots: u32,
    /// When something last had to be evicted: seconds of `CLOCK_MONOTONIC`.
    pub full_at: u32,
    /// Until when entries of worth are spared: seconds of `CLOCK_MONOTONIC`.
    pub spare_until: u32,
    /// Slots whose entries were evicted and that have not been rewritten since, counted from 1; 0: none.
    pub vacated: [u32; VACATED],
    /// Explicit padding, zero.
    pub pad: [u32; 4],
}

crate::map_types!(Hand = 64);
