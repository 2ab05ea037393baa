//! `HEALTH_OWN`: the host's own addresses, which no outside host may use as a source.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use aya::maps::{MapData, MapError};
use health_common::own::{OWN_DEVICE_BITS, OWN_ENTRIES, OwnPrefix};
use ipnet::IpNet;

use crate::error::{DatapathError, map_error};
use crate::ipcache;
use crate::layout::OWN;
use crate::maps::map_data;
use crate::trie::{Prefix, Trie};

/// The value of every entry.
const PRESENT: u32 = 1;

/// A prefix of the host's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnAddress {
    /// The addresses.
    pub prefix: IpNet,
    /// Number of the device that has it.
    pub device: u32,
}

/// Errors of the map.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    /// There are more prefixes than the map holds. Nothing was changed.
    #[error("cannot write {wanted} host addresses to HEALTH_OWN: its capacity is {OWN_ENTRIES}")]
    Full {
        /// How many prefixes were wanted.
        wanted: usize,
    },
    /// The kernel refused.
    #[error("cannot {what} {}: {source}", OWN.name)]
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
pub struct OwnAddresses {
    trie: Trie<OwnPrefix, u32>,
    known: BTreeSet<Prefix<OwnPrefix>>,
}

impl OwnAddresses {
    /// Reads what a former agent left in the map pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        Self::open(map_data(pins, &OWN)?)
            .map_err(|source| map_error("read", OWN.name)(MapError::IoError(source)))
    }

    fn open(map: MapData) -> io::Result<Self> {
        let trie = Trie::new(map);
        let known = trie.entries()?.into_iter().map(|(prefix, _)| prefix);
        Ok(Self {
            known: known.collect(),
            trie,
        })
    }

    /// Makes these exactly the host's addresses. Prefixes that stay are never missing in between. After an error, the
    /// map has some of the changes, and the next call makes the rest.
    pub fn set_all(
        &mut self,
        wanted: impl IntoIterator<Item = OwnAddress>,
    ) -> Result<(), OwnError> {
        let wanted: BTreeSet<_> = wanted.into_iter().map(key).collect();
        if wanted.len() > OWN_ENTRIES as usize {
            return Err(OwnError::Full {
                wanted: wanted.len(),
            });
        }
        let gone: Vec<_> = self.known.difference(&wanted).copied().collect();
        self.trie
            .delete(&gone)
            .map_err(|source| kernel("delete from", source))?;
        for prefix in &gone {
            self.known.remove(prefix);
        }
        let fresh: Vec<_> = wanted
            .difference(&self.known)
            .map(|prefix| (*prefix, PRESENT))
            .collect();
        let result = self.trie.write(&fresh);
        let written = result
            .as_ref()
            .map_or_else(|(done, _)| *done, |()| fresh.len());
        let written = fresh.into_iter().take(written);
        self.known.extend(written.map(|(prefix, _)| prefix));
        result.map_err(|(_, source)| kernel("write to", source))
    }
}

fn kernel(what: &'static str, source: io::Error) -> OwnError {
    OwnError::Kernel { what, source }
}

/// Converts to a map key.
fn key(own: OwnAddress) -> Prefix<OwnPrefix> {
    let (len, address) = ipcache::prefix(own.prefix);
    (
        OWN_DEVICE_BITS + len,
        OwnPrefix::of_source(address, own.device),
    )
}

/// The prefix of a key, and its device number if it is link-local; `None` if the key is not a valid prefix.
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
