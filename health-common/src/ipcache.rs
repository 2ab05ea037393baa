//! Which identity an address belongs to: `HEALTH_IPCACHE`, a longest-prefix-match trie over [`crate::addr::Addr`].

use crate::addr::Addr;

/// Entries of `HEALTH_IPCACHE`.
pub const IPCACHE_ENTRIES: u32 = 512_000;

/// Key length in bits of an IPv4 prefix of length 0: addresses hold IPv4 mapped into IPv6.
pub const IPV4_PREFIX: u32 = 96;

/// The identity behind a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcacheEntry {
    /// Security identity.
    pub identity: u32,
    /// Explicit padding, zero.
    pub pad: u32,
    /// The endpoint's node; unset for all other prefixes.
    pub node: Addr,
}

crate::map_types!(IpcacheEntry = 24);
