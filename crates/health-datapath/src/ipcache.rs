//! `HEALTH_IPCACHE`: the identity of each prefix.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use health_common::addr::Addr;
use health_common::identity;
use health_common::ipcache::{IPCACHE_ENTRIES, IPV4_PREFIX, IpcacheEntry};
use ipnet::{IpNet, Ipv4Net};

use crate::error::{DatapathError, TrieError};
use crate::known_trie::KnownTrie;
use crate::layout;
use crate::trie::Prefix;

/// The map, and its known contents.
#[derive(Debug)]
pub struct Ipcache(KnownTrie<Addr, IpcacheEntry>);

impl Ipcache {
    /// Reads the entries of a former agent from the map pinned in an instance's folder. No other agent may write to the
    /// map from now on.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        KnownTrie::from_pins(pins, &layout::IPCACHE, IPCACHE_ENTRIES).map(Self)
    }

    /// Replaces the map's contents by these prefixes. Prefixes that stay are never missing in between, and an entry
    /// changes atomically. Returns how many prefixes were written or removed.
    ///
    /// `0.0.0.0/0` is the world unless an entry says otherwise: the map treats IPv4 addresses as IPv6 addresses, and an
    /// entry such as `::/0` is not meant for them.
    ///
    /// After an error, the map has some of the changes, and the next call makes the rest.
    pub fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<usize, TrieError> {
        let world = IpcacheEntry {
            identity: identity::WORLD,
            ..IpcacheEntry::default()
        };
        let everything = IpNet::V4(Ipv4Net::default());
        let mut entries = BTreeMap::from([(prefix(everything), world)]);
        entries.extend(wanted.iter().map(|(net, entry)| (prefix(*net), *entry)));
        self.0.set_all(&entries)
    }

    /// Adds a prefix, or changes its entry.
    pub fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), TrieError> {
        self.0.set(prefix(net), entry)
    }

    /// Returns the contents of the map.
    pub fn entries(&self) -> impl Iterator<Item = (IpNet, IpcacheEntry)> {
        self.0
            .entries()
            .filter_map(|(prefix, entry)| Some((net(prefix)?, *entry)))
    }
}

/// Converts a prefix to a map key.
pub(super) fn prefix(net: IpNet) -> Prefix<Addr> {
    let len = u32::from(net.prefix_len());
    let len = match net {
        IpNet::V4(_) => IPV4_PREFIX + len,
        IpNet::V6(_) => len,
    };
    (len, net.network().into())
}

/// Converts a map key to a prefix; `None` if the key is invalid.
pub(super) fn net(&(len, addr): &Prefix<Addr>) -> Option<IpNet> {
    let (addr, len) = match addr.to_ip() {
        IpAddr::V4(addr) if len >= IPV4_PREFIX => (IpAddr::V4(addr), len - IPV4_PREFIX),
        IpAddr::V4(addr) => (IpAddr::V6(Ipv4Addr::to_ipv6_mapped(&addr)), len),
        v6 => (v6, len),
    };
    IpNet::new(addr, u8::try_from(len).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn prefixes_of_both_versions_come_back_as_they_went_in() {
        for text in [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "192.0.2.9/32",
            "::/0",
            "fd00::/8",
            "2001:db8::1/128",
        ] {
            let wanted: IpNet = text.parse().unwrap();
            assert_eq!(net(&prefix(wanted)), Some(wanted), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_prefix_of_ipv4_comes_back(addr: u32, len in 0_u8..=32) {
            let wanted = Ipv4Net::new(Ipv4Addr::from(addr), len).unwrap().trunc();
            prop_assert_eq!(net(&prefix(wanted.into())), Some(IpNet::V4(wanted)));
        }
    }
}
