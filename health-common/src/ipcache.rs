//! The identities of addresses: `HEALTH_IPCACHE`, a longest-prefix-match trie over [`crate::addr::Addr`].

use crate::addr::Addr;

/// Entries of `HEALTH_IPCACHE`.
pub const IPCACHE_ENTRIES: u32 = 512_000;

/// Key length, in bits, of the IPv4 prefix of length 0: IPv4 addresses are stored as IPv4-mapped IPv6 addresses.
pub const IPV4_PREFIX: u32 = 96;

/// The identity of a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcacheEntry {
    /// Security identity.
    pub identity: u32,
    /// Explicit padding, zero.
    pub pad: u32,
    /// The endpoint's node; unset if the prefix is not an endpoint's address.
    pub node: Addr,
}

crate::map_types!(IpcacheEntry = 24);
