//! Room in the tables of TCP, which are hash maps. The keys of a table's entries stand in a ring, in the order in which they
//! were entered. Where a new entry finds no room, a hand goes on round the ring, as in the CLOCK algorithm, and evicts
//!
//! - an entry that is of no worth: of a connection that is over, whose handshake is not complete, or of which only one side has
//!   sent anything;
//! - else, of [`CANDIDATES`] entries, the one that was used longest ago, if none of no worth was found for [`SPARE_SECS`].
//!
//! The new key takes the place of the evicted one. So a flood of packets that nobody answers evicts its own entries.

/// Ring of `HEALTH_CT4`: the index of its hand.
pub const RING_CT4: u32 = 0;
/// As [`RING_CT4`], of `HEALTH_CT6`.
pub const RING_CT6: u32 = 1;
/// As [`RING_CT4`], of `HEALTH_NAT4`.
pub const RING_NAT4: u32 = 2;
/// As [`RING_CT4`], of `HEALTH_NAT6`.
pub const RING_NAT6: u32 = 3;
/// As [`RING_CT4`], of `HEALTH_REVNAT4`.
pub const RING_REVNAT4: u32 = 4;
/// As [`RING_CT4`], of `HEALTH_REVNAT6`.
pub const RING_REVNAT6: u32 = 5;
/// How many rings there are.
pub const RINGS: u32 = 6;

/// How many keys are looked at for an entry that may go, at most.
pub const CANDIDATES: u32 = 16;

/// How long entries of worth are spared after one of no worth was found, or after a table became full, seconds.
pub const SPARE_SECS: u32 = 2;
/// A table has become full if for so long nothing had to be evicted, seconds.
pub const ROOM_SECS: u32 = 10;
/// How many vacated places are known at a time.
pub const VACATED: usize = 8;

/// Where a ring is written next. It is as long as a line of a processor's cache, since others move other hands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hand {
    /// How many places it has passed, which wraps.
    pub next: u32,
    /// How many places the ring has; 0: it is not in use yet.
    pub places: u32,
    /// When something had to be evicted last: seconds of `CLOCK_MONOTONIC`.
    pub full_at: u32,
    /// Until when entries of worth are spared: seconds of `CLOCK_MONOTONIC`.
    pub spare_until: u32,
    /// Places whose entries were evicted and that were not written since, counted from 1; 0: none.
    pub vacated: [u32; VACATED],
    /// Explicit padding, zero.
    pub pad: [u32; 4],
}

crate::map_types!(Hand = 64);
