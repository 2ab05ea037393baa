//! Counts of other agents' echo probes that arrived here, and of the replies that left: `HEALTH_ARRIVALS`.
//!
//! Counted per agent, not per address: an agent may have several addresses, and NAT may translate them. A restarted
//! agent counts as a new one.
//!
//! The module of the same name in `health-ebpf` counts them.

use crate::probe::Path;

/// Capacity of the map; when full, it evicts the agents heard from least recently.
pub const ARRIVALS_ENTRIES: u32 = 32_768;
/// Number of ways to reach a node: two paths times two IP versions.
pub const WAYS: usize = 4;

/// Key: one run of an agent, identified by fields of its probes.
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

/// Counts for one way to reach this node. They wrap.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WayCounts {
    /// Probes that arrived over an uplink.
    pub arrived: u32,
    /// Replies that left over an uplink.
    pub replied: u32,
}

/// Value: arrival counts of an agent's echo probes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// When counting started: `CLOCK_MONOTONIC`, in nanoseconds. Counts with different start times must not be
    /// compared.
    pub since_ns: u64,
    /// Indexed by [`way`].
    pub ways: [WayCounts; WAYS],
}

crate::map_types!(Prober = 8, Arrivals = 40);

/// Index of a way, below [`WAYS`]. `path` is a [`Path`] as a byte.
#[inline(always)]
pub const fn way(is_v4: bool, path: u8) -> usize {
    ((!is_v4) as usize) << 1 | (path == Path::Endpoint as u8) as usize
}
