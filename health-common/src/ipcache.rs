//! Who has which addresses: `HEALTH_IPCACHE`, a trie of the longest prefix over [`crate::addr::Addr`].

use crate::addr::Addr;

/// Entries of `HEALTH_IPCACHE`.
pub const IPCACHE_ENTRIES: u32 = 512_000;

/// Bits of a prefix of length 0 of IPv4, which addresses hold mapped into IPv6.
pub const IPV4_PREFIX: u32 = 96;

/// The identity behind a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcacheEntry {
    /// Security identity.
    pub identity: u32,
    /// Explicit padding, zero.
    pub pad: u32,
    /// Node of an endpoint; unset for every other prefix.
    pub node: Addr,
}

crate::map_types!(IpcacheEntry = 24);
