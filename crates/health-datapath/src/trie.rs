//! Longest-prefix tries, read and written many entries at a time.

use std::io;

use aya::Pod;
use aya::maps::MapData;
use aya::maps::lpm_trie::Key;

use super::sys;
use super::table::Table;

/// Size of the prefix length, which precedes a key's data, in bytes.
const PREFIX_LEN: usize = size_of::<u32>();

/// A key: number of matched bits, and the data.
pub(super) type Prefix<K> = (u32, K);

/// A pinned trie.
#[derive(Debug)]
pub(super) struct Trie<K: Pod, V> {
    table: Table<Key<K>, V>,
}

impl<K: Pod, V: Pod> Trie<K, V> {
    /// Wraps `map`, which must have these types.
    pub(super) fn new(map: MapData) -> Self {
        Self {
            table: Table::new(map),
        }
    }

    /// Duplicates the map's descriptor.
    pub(super) fn try_clone(&self) -> io::Result<MapData> {
        self.table.try_clone()
    }

    /// Maximum number of entries.
    pub(super) fn max_entries(&self) -> io::Result<u32> {
        self.table.max_entries()
    }

    /// Returns the value of the longest prefix that covers this one.
    pub(super) fn get(&self, prefix: Prefix<K>) -> io::Result<Option<V>> {
        self.table.get(&key(prefix))
    }

    /// Returns all entries, in no particular order. Nobody else may delete entries meanwhile.
    pub(super) fn entries(&self) -> io::Result<Vec<(Prefix<K>, V)>> {
        let mut entries = Vec::new();
        self.table.for_each(|key, value| {
            entries.push(((key.prefix_len(), key.data()), value));
        })?;
        Ok(entries)
    }

    /// Writes entries in this order. Stops at the first one that the kernel rejects, and returns how many were written.
    pub(super) fn write(&self, entries: &[(Prefix<K>, V)]) -> Result<(), (usize, io::Error)> {
        let entries = entries.iter().map(|(prefix, value)| (key(*prefix), *value));
        self.table.write(&entries.collect::<Vec<_>>())
    }

    /// Deletes entries; missing ones are skipped.
    pub(super) fn delete(&self, prefixes: &[Prefix<K>]) -> io::Result<()> {
        let keys = prefixes.iter().copied().map(key);
        self.table.delete(&keys.collect::<Vec<_>>())
    }
}

/// Decodes an entry as the kernel copies it; `None` if there are too few bytes.
pub(super) fn entry<K: Pod, V: Pod>(key: &[u8], value: &[u8]) -> Option<(Prefix<K>, V)> {
    let prefix_len = sys::read(key)?;
    let data = sys::read(key.get(PREFIX_LEN..)?)?;
    Some(((prefix_len, data), sys::read(value)?))
}

fn key<K: Pod>((prefix_len, data): Prefix<K>) -> Key<K> {
    Key::new(prefix_len, data)
}
