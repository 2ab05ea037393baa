//! Definitions that kernel and user space share: map layouts, the wire format of probes, and the packet decisions that
//! both sides (and the tests) run.
//!
//! Everything here is `no_std`, allocates nothing and touches no kernel interface. Multi-byte fields whose name ends in
//! `_be` are in network byte order, all others in host byte order.

#![no_std]

pub mod addr;
pub mod arrivals;
pub mod calls;
pub mod checksum;
pub mod collect;
pub mod config;
pub mod ct;
pub mod echo;
pub mod endpoint;
pub mod events;
pub mod fragment;
pub mod identity;
pub mod inflight;
pub mod ipcache;
pub mod link;
pub mod masquerade;
pub mod metrics;
pub mod nat;
pub mod neighbour;
pub mod own;
pub mod packet;
pub mod policy;
pub mod probe;
pub mod ring;
pub mod rtt;
pub mod service;
pub mod siphash;
pub mod tcp;
pub mod tuple;

/// Version of the map layouts as a whole. It changes whenever a key, a value or the meaning of either changes, which
/// keeps an agent from reusing pinned maps that it would misread. Each map's layout names the version that introduced
/// it.
pub const LAYOUT_VERSION: u32 = 12;

/// Asserts a map type's size at compile time and, in user space, marks it as plain data for aya.
macro_rules! map_types {
    ($($ty:ty = $size:literal),+ $(,)?) => {$(
        const _: () = assert!(core::mem::size_of::<$ty>() == $size);

        // SAFETY: the type is `repr(C)` and consists of integers only. The size assertion and the explicit padding
        // fields rule out implicit padding.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $ty {}
    )+};
}
pub(crate) use map_types;
