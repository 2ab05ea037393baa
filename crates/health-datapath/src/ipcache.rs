//! `HEALTH_IPCACHE`: the identity of each prefix.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use aya::maps::{MapData, MapError};
use health_common::addr::Addr;
use health_common::identity;
use health_common::ipcache::{IPCACHE_ENTRIES, IPV4_PREFIX, IpcacheEntry};
use ipnet::{IpNet, Ipv4Net};

use crate::error::{DatapathError, map_error};
use crate::layout;
use crate::maps::map_data;
use crate::trie::{Prefix, Trie};

/// Errors of the ipcache.
#[derive(Debug, thiserror::Error)]
pub enum IpcacheError {
    /// There are more prefixes than the map holds. Nothing was changed.
    #[error("cannot write {wanted} prefixes to HEALTH_IPCACHE: its capacity is {IPCACHE_ENTRIES}")]
    Full {
        /// How many prefixes were wanted.
        wanted: usize,
    },
    /// The kernel refused.
    #[error("cannot {what} HEALTH_IPCACHE: {source}")]
    Kernel {
        /// What was attempted.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// The map, and its known contents.
#[derive(Debug)]
pub struct Ipcache {
    trie: Trie<Addr, IpcacheEntry>,
    known: BTreeMap<Prefix<Addr>, IpcacheEntry>,
}

impl Ipcache {
    /// Reads what a former agent left in the map pinned in an instance's folder. No other agent may write to it from
    /// now on.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        Self::open(map_data(pins, &layout::IPCACHE)?)
            .map_err(|source| map_error("read", layout::IPCACHE.name)(MapError::IoError(source)))
    }

    fn open(map: MapData) -> io::Result<Self> {
        let trie = Trie::new(map);
        let known = trie.entries()?.into_iter().collect();
        Ok(Self { trie, known })
    }

    /// Makes these exactly the known prefixes. Prefixes that stay are never missing in between, and an entry changes
    /// atomically. Returns how many were written or removed.
    ///
    /// `0.0.0.0/0` is the world unless an entry says otherwise: the map treats IPv4 addresses as IPv6 addresses, and an
    /// entry such as `::/0` is not meant for them.
    ///
    /// After an error, the map has some of the changes, and the next call makes the rest.
    pub fn set_all(
        &mut self,
        wanted: &BTreeMap<IpNet, IpcacheEntry>,
    ) -> Result<usize, IpcacheError> {
        let world = IpcacheEntry {
            identity: identity::WORLD,
            ..IpcacheEntry::default()
        };
        let everything = IpNet::V4(Ipv4Net::default());
        let mut entries = BTreeMap::from([(prefix(everything), world)]);
        entries.extend(wanted.iter().map(|(net, entry)| (prefix(*net), *entry)));
        if entries.len() > IPCACHE_ENTRIES as usize {
            return Err(IpcacheError::Full {
                wanted: entries.len(),
            });
        }
        // Frees space first if old and new entries would not fit together.
        let removed = if self.known.len() + entries.len() > IPCACHE_ENTRIES as usize {
            self.remove_all_but(&entries)?
        } else {
            0
        };
        let changed: Vec<(Prefix<Addr>, IpcacheEntry)> = entries
            .iter()
            .filter(|(prefix, entry)| self.known.get(prefix) != Some(entry))
            .map(|(prefix, entry)| (*prefix, *entry))
            .collect();
        let result = self.trie.write(&changed);
        let written = result
            .as_ref()
            .map_or_else(|(done, _)| *done, |()| changed.len());
        self.known.extend(changed.into_iter().take(written));
        result.map_err(|(_, source)| kernel("write to", source))?;
        Ok(written + removed + self.remove_all_but(&entries)?)
    }

    /// Adds a prefix, or changes its entry.
    pub fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), IpcacheError> {
        let prefix = prefix(net);
        if self.known.get(&prefix) == Some(&entry) {
            return Ok(());
        }
        self.trie
            .write(&[(prefix, entry)])
            .map_err(|(_, source)| kernel("write to", source))?;
        self.known.insert(prefix, entry);
        Ok(())
    }

    /// The contents of the map.
    pub fn entries(&self) -> impl Iterator<Item = (IpNet, IpcacheEntry)> {
        self.known
            .iter()
            .filter_map(|(prefix, entry)| Some((net(prefix)?, *entry)))
    }

    fn remove_all_but(
        &mut self,
        wanted: &BTreeMap<Prefix<Addr>, IpcacheEntry>,
    ) -> Result<usize, IpcacheError> {
        let gone: Vec<Prefix<Addr>> = self
            .known
            .keys()
            .filter(|prefix| !wanted.contains_key(prefix))
            .copied()
            .collect();
        self.trie
            .delete(&gone)
            .map_err(|source| kernel("delete from", source))?;
        for prefix in &gone {
            self.known.remove(prefix);
        }
        Ok(gone.len())
    }
}

fn kernel(what: &'static str, source: io::Error) -> IpcacheError {
    IpcacheError::Kernel { what, source }
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

/// The prefix of a key; `None` if the key is not a valid prefix.
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
