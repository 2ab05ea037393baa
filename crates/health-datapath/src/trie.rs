//! Tries of the longest prefix, read and written many entries at a time.

use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd as _;

use aya::Pod;
use aya::maps::MapData;
use aya::maps::lpm_trie::Key;

use super::sys;
use super::walk::{EntrySize, walk};

/// Entries that are written or deleted by one call.
const BATCH: usize = 1_024;
/// Bytes of a key in front of its data: the length of the prefix.
const PREFIX_LEN: usize = size_of::<u32>();

/// A key: bits that are matched, and the data.
pub(super) type Prefix<K> = (u32, K);

/// A pinned trie.
#[derive(Debug)]
pub(super) struct Trie<K, V> {
    map: MapData,
    types: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> Trie<K, V> {
    /// `map` must be of these types.
    pub(super) fn new(map: MapData) -> Self {
        Self {
            map,
            types: PhantomData,
        }
    }

    /// All entries, in no order. Nobody else may delete any meanwhile.
    pub(super) fn entries(&self) -> io::Result<Vec<(Prefix<K>, V)>> {
        let size = EntrySize {
            key: size_of::<Key<K>>(),
            value: size_of::<V>(),
        };
        let mut entries = Vec::new();
        walk(self.map.fd().as_fd(), size, &mut |key, value| {
            entries.extend(entry(key, value));
        })?;
        Ok(entries)
    }

    /// Writes entries in this order. Fails at the first that the kernel refuses, and tells how many were written.
    pub(super) fn write(&self, entries: &[(Prefix<K>, V)]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        for batch in entries.chunks(BATCH) {
            let keys = bytes(batch.iter().map(|(prefix, _)| key(*prefix)));
            let values = bytes(batch.iter().map(|(_, value)| *value));
            sys::update_batch(self.map.fd().as_fd(), &keys, &values, batch.len() as u32)
                .map_err(|(done, error)| (written + done as usize, error))?;
            written += batch.len();
        }
        Ok(())
    }

    /// Deletes entries; those that are not there are left out.
    pub(super) fn delete(&self, prefixes: &[Prefix<K>]) -> io::Result<()> {
        for batch in prefixes.chunks(BATCH) {
            let mut rest = batch;
            while !rest.is_empty() {
                let keys = bytes(rest.iter().map(|prefix| key(*prefix)));
                match sys::delete_batch(self.map.fd().as_fd(), &keys, rest.len() as u32) {
                    Ok(()) => break,
                    Err((done, error)) if error.raw_os_error() == Some(libc::ENOENT) => {
                        rest = rest.get(done as usize + 1..).unwrap_or_default();
                    }
                    Err((_, error)) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// An entry as the kernel copies it; `None` for too few bytes.
pub(super) fn entry<K: Pod, V: Pod>(key: &[u8], value: &[u8]) -> Option<(Prefix<K>, V)> {
    let prefix_len = sys::read(key)?;
    let data = sys::read(key.get(PREFIX_LEN..)?)?;
    Some(((prefix_len, data), sys::read(value)?))
}

fn key<K: Pod>((prefix_len, data): Prefix<K>) -> Key<K> {
    Key::new(prefix_len, data)
}

fn bytes<T: Pod>(values: impl Iterator<Item = T>) -> Vec<u8> {
    let mut bytes = Vec::new();
    values.for_each(|value| bytes.extend_from_slice(sys::bytes_of(&value)));
    bytes
}
