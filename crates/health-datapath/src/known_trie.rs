//! A longest-prefix trie with a single writer, which remembers the contents and writes only differences.

use std::collections::BTreeMap;
use std::path::Path;

use aya::Pod;
use aya::maps::MapError;

use crate::error::{DatapathError, TrieError, map_error};
use crate::layout::MapLayout;
use crate::maps::map_data;
use crate::trie::{Prefix, Trie};

/// The map, and its known contents.
#[derive(Debug)]
pub(super) struct KnownTrie<K: Pod, V> {
    name: &'static str,
    capacity: usize,
    trie: Trie<K, V>,
    known: BTreeMap<Prefix<K>, V>,
}

impl<K: Pod + Ord, V: Pod + PartialEq> KnownTrie<K, V> {
    /// Reads a former agent's entries from the map pinned in an instance's folder. No other agent may write to the map
    /// from now on. `capacity` is the map's capacity.
    pub(super) fn from_pins(
        pins: &Path,
        layout: &MapLayout,
        capacity: u32,
    ) -> Result<Self, DatapathError> {
        let trie = Trie::new(map_data(pins, layout)?);
        let known = trie.entries();
        let known =
            known.map_err(|source| map_error("read", layout.name)(MapError::IoError(source)))?;
        Ok(Self {
            name: layout.name,
            capacity: capacity as usize,
            trie,
            known: known.into_iter().collect(),
        })
    }

    /// Returns the contents of the map.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&Prefix<K>, &V)> {
        self.known.iter()
    }

    /// Adds an entry, or changes it.
    pub(super) fn set(&mut self, prefix: Prefix<K>, value: V) -> Result<(), TrieError> {
        if self.known.get(&prefix) == Some(&value) {
            return Ok(());
        }
        self.write(vec![(prefix, value)]).map(drop)
    }

    /// Replaces the map's contents by `wanted`. Prefixes that stay are never missing in between, and an entry changes
    /// atomically. Returns how many entries were written or removed.
    ///
    /// After an error, the map has some of the changes, and the next call makes the rest.
    pub(super) fn set_all(&mut self, wanted: &BTreeMap<Prefix<K>, V>) -> Result<usize, TrieError> {
        if wanted.len() > self.capacity {
            return Err(TrieError::Full {
                map: self.name,
                wanted: wanted.len(),
                capacity: self.capacity,
            });
        }
        // Frees space first if old and new entries would not fit together.
        let removed = if self.known.len() + wanted.len() > self.capacity {
            self.remove_all_but(wanted)?
        } else {
            0
        };
        let changed = wanted
            .iter()
            .filter(|(prefix, value)| self.known.get(prefix) != Some(value));
        let changed = changed.map(|(prefix, value)| (*prefix, *value)).collect();
        Ok(removed + self.write(changed)? + self.remove_all_but(wanted)?)
    }

    fn write(&mut self, entries: Vec<(Prefix<K>, V)>) -> Result<usize, TrieError> {
        let count = entries.len();
        let result = self.trie.write(&entries);
        let written = result.as_ref().map_or_else(|(done, _)| *done, |()| count);
        self.known.extend(entries.into_iter().take(written));
        result.map_err(|(_, source)| TrieError::Kernel {
            what: "write to",
            map: self.name,
            source,
        })?;
        Ok(count)
    }

    fn remove_all_but(&mut self, wanted: &BTreeMap<Prefix<K>, V>) -> Result<usize, TrieError> {
        let gone = self
            .known
            .keys()
            .filter(|prefix| !wanted.contains_key(prefix));
        let gone: Vec<_> = gone.copied().collect();
        self.trie
            .delete(&gone)
            .map_err(|source| TrieError::Kernel {
                what: "delete from",
                map: self.name,
                source,
            })?;
        for prefix in &gone {
            self.known.remove(prefix);
        }
        Ok(gone.len())
    }
}
