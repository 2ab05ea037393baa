//! Network address translation: `HEALTH_NAT4` and `HEALTH_NAT6`, keyed by conntrack tuples.
//!
//! Each translation is two entries: direction out (source is rewritten) and in (destination is).

/// Flag: the flow is the host's own; its port or identifier is reserved, nothing is rewritten.
pub const NAT_HOST_LOCAL: u32 = 1;

/// Translation of an IPv4 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry4 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: u32,
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: [u16; 3],
}

/// Translation of an IPv6 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry6 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: [u32; 4],
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
}

crate::map_types!(NatEntry4 = 24, NatEntry6 = 32);
