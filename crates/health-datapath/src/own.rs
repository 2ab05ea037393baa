//! `HEALTH_OWN`: the host's own addresses, which no outside host may use as a source.

use std::path::Path;

use health_common::own::{OWN_DEVICE_BITS, OWN_ENTRIES, OwnPrefix};
use ipnet::IpNet;

use crate::error::{DatapathError, TrieError};
use crate::ipcache;
use crate::known_trie::KnownTrie;
use crate::layout::OWN;
use crate::trie::Prefix;

/// The value of every entry.
const PRESENT: u32 = 1;

/// A prefix of the host's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnAddress {
    /// The addresses.
    pub prefix: IpNet,
    /// Ifindex of the device that has it.
    pub device: u32,
}

/// The map, and its known contents.
#[derive(Debug)]
pub struct OwnAddresses(KnownTrie<OwnPrefix, u32>);

impl OwnAddresses {
    /// Reads a former agent's entries from the map pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        KnownTrie::from_pins(pins, &OWN, OWN_ENTRIES).map(Self)
    }

    /// Replaces the map's contents by these addresses of the host. Prefixes that stay are never missing in between.
    /// After an error, the map has some of the changes, and the next call makes the rest.
    pub fn set_all(
        &mut self,
        wanted: impl IntoIterator<Item = OwnAddress>,
    ) -> Result<(), TrieError> {
        let wanted = wanted.into_iter().map(|own| (key(own), PRESENT));
        self.0.set_all(&wanted.collect()).map(drop)
    }
}

/// Converts to a map key.
fn key(own: OwnAddress) -> Prefix<OwnPrefix> {
    let (len, address) = ipcache::prefix(own.prefix);
    (
        OWN_DEVICE_BITS + len,
        OwnPrefix::of_source(address, own.device),
    )
}

/// Converts a map key to a prefix, and its ifindex if it is link-local; `None` if the key is invalid.
pub(super) fn read(&(len, own): &Prefix<OwnPrefix>) -> Option<(IpNet, Option<u32>)> {
    let len = len.checked_sub(OWN_DEVICE_BITS)?;
    let device = (own.ifindex != 0).then_some(own.ifindex);
    Some((ipcache::net(&(len, own.address))?, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_come_back_as_they_went_in() {
        for (text, device) in [
            ("127.0.0.0/8", None),
            ("192.0.2.9/32", None),
            ("2001:db8::1/128", None),
            ("2001:db8:7::/64", None),
            ("fe80::1/128", Some(7)),
        ] {
            let prefix: IpNet = text.parse().unwrap();
            let read = read(&key(OwnAddress { prefix, device: 7 }));
            assert_eq!(read, Some((prefix, device)), "{text}");
        }
    }
}
