//! Echo probes of other agents that arrived here, and their replies that left: `HEALTH_ARRIVALS`.
//!
//! Counted by agent and not by address: an agent may have several addresses, and others may translate
//! them. An agent that was restarted is another one.
//!
//! The module of the same name in `health-ebpf` counts them.

use crate::probe::Path;

/// Entries of the map; of more agents, those least recently heard of go.
pub const ARRIVALS_ENTRIES: u32 = 32_768;
/// Number of ways to a node: both paths by both IP versions.
pub const WAYS: usize = 4;

/// Key: an agent from one of its starts to the next, by what its probes carry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Prober {
    /// [`crate::probe::ProbeId::session`].
    pub session: u32,
    /// ICMP identifier, network byte order.
    pub icmp_id_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// Counts of one way. They wrap.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WayCounts {
    /// Probes that came in by an uplink.
    pub arrived: u32,
    /// Their replies that went out by one.
    pub replied: u32,
}

/// Value: what arrived of an agent's echo probes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// When the counts began: `CLOCK_MONOTONIC`, nanoseconds. Counts that began at different times are
    /// not to be compared.
    pub since_ns: u64,
    /// By [`way`].
    pub ways: [WayCounts; WAYS],
}

crate::map_types!(Prober = 8, Arrivals = 40);

/// Index of a way, below [`WAYS`]. `path` is a [`Path`] as a byte.
#[inline(always)]
pub const fn way(is_v4: bool, path: u8) -> usize {
    ((!is_v4) as usize) << 1 | (path == Path::Endpoint as u8) as usize
}
