//! Maps with fixed types, read and written many entries at a time.

use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::{fmt, io};

use aya::Pod;
use aya::maps::MapData;

use crate::aya_io::map_io;
use crate::sys;
use crate::walk::{EntrySize, walk};

/// Entries written or deleted per call.
const BATCH: usize = 1_024;

/// A map with one key type and one value type.
pub(super) struct Table<K, V> {
    map: MapData,
    types: PhantomData<(K, V)>,
}

impl<K, V> fmt::Debug for Table<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.map.fmt(f)
    }
}

impl<K: Pod, V: Pod> Table<K, V> {
    /// Wraps `map`, which must have these types.
    pub(super) fn new(map: MapData) -> Self {
        Self {
            map,
            types: PhantomData,
        }
    }

    /// Duplicates the map's descriptor.
    pub(super) fn try_clone(&self) -> io::Result<MapData> {
        MapData::from_fd(self.fd().try_clone_to_owned()?).map_err(map_io)
    }

    /// Maximum number of entries.
    pub(super) fn max_entries(&self) -> io::Result<u32> {
        Ok(sys::map_info(self.fd())?.max_entries)
    }

    /// Calls `each` with every entry, in no particular order unless the map is an array.
    pub(super) fn for_each(&self, mut each: impl FnMut(K, V)) -> io::Result<()> {
        let size = EntrySize {
            key: size_of::<K>(),
            value: size_of::<V>(),
        };
        walk(self.fd(), size, &mut |key, value| {
            if let (Some(key), Some(value)) = (sys::read(key), sys::read(value)) {
                each(key, value);
            }
        })
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = vec![0; size_of::<V>()];
        let is_there = sys::lookup(self.fd(), sys::bytes_of(key), &mut value)?;
        Ok(is_there.then(|| sys::read(&value)).flatten())
    }

    /// Writes entries in this order. Stops at the first one that the kernel rejects, and returns how many were written.
    pub(super) fn write(&self, entries: &[(K, V)]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        for batch in entries.chunks(BATCH) {
            let keys = bytes(batch.iter().map(|(key, _)| *key));
            let values = bytes(batch.iter().map(|(_, value)| *value));
            sys::update_batch(self.fd(), &keys, &values, batch.len() as u32)
                .map_err(|(done, error)| (written + done as usize, error))?;
            written += batch.len();
        }
        Ok(())
    }

    /// Deletes entries; missing ones are skipped.
    pub(super) fn delete(&self, keys: &[K]) -> io::Result<()> {
        for batch in keys.chunks(BATCH) {
            let mut rest = batch;
            while !rest.is_empty() {
                let keys = bytes(rest.iter().copied());
                match sys::delete_batch(self.fd(), &keys, rest.len() as u32) {
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

    fn fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}

impl<V: Pod> Table<u32, V> {
    /// Returns the values in these slots of an array, up to its end.
    pub(super) fn range(&self, slots: Range<u32>) -> io::Result<Vec<V>> {
        let mut values = Vec::new();
        let mut next = slots.start;
        while next < slots.end {
            let room = (slots.end - next).min(BATCH as u32);
            let mut keys = vec![0; room as usize * size_of::<u32>()];
            let mut read = vec![0; room as usize * size_of::<V>()];
            // An array's cursor is the slot before the first one to read.
            let cursor = next.checked_sub(1).map(u32::to_ne_bytes);
            let cursor = cursor.as_ref().map(|before| &before[..]);
            let mut end = [0; size_of::<u32>()];
            let (count, is_end) =
                sys::lookup_batch(self.fd(), cursor, &mut end, &mut keys, &mut read, room)?;
            let read = read.chunks_exact(size_of::<V>()).take(count as usize);
            values.extend(read.filter_map(sys::read::<V>));
            if is_end {
                break;
            }
            next += count;
        }
        Ok(values)
    }
}

fn bytes<T: Pod>(values: impl Iterator<Item = T>) -> Vec<u8> {
    let mut bytes = Vec::new();
    values.for_each(|value| bytes.extend_from_slice(sys::bytes_of(&value)));
    bytes
}
