//! Reads a map of any layout from its first entry to its last, in batches if its kind supports them.
//!
//! Hash maps are read bucket by bucket, each under its lock, and the kernel never resizes them or moves an entry to
//! another bucket (`kernel/bpf/hashtab.c`, `__htab_map_lookup_and_delete_batch`). An entry that exists throughout the
//! walk is therefore read exactly once, and no key is read twice. Arrays are read by index. LPM tries, and kinds
//! without batches, are read key by key: if the key just read is deleted, the kernel restarts from the beginning, and
//! entries may be read more than once, but none is missed. A walk that meets many times as many keys as the map's
//! capacity ends with an error: keys are deleted faster than it reads.

use std::io;
use std::os::fd::BorrowedFd;

use super::sys;

/// The kernel-internal error "not supported", which batch calls return for map kinds without batches.
const ENOTSUPP: i32 = 524;
/// Maximum number of entries per request.
const MAX_ENTRIES: usize = 1_024;
/// Maximum size in bytes of the keys and values of one request, unless a single hash bucket is larger.
const MAX_BYTES: usize = 256 << 10;
/// A key-by-key walk meets at most this many times the map's capacity of keys.
const KEYS_FACTOR: u64 = 16;
/// Shortest cursor that the kernel writes: the index of a hash bucket.
const MIN_CURSOR: usize = 4;

/// Sizes of an entry as the kernel copies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntrySize {
    /// Bytes of a key.
    pub(super) key: usize,
    /// Bytes of a value; for per-CPU maps, of all CPUs' values together.
    pub(super) value: usize,
}

impl EntrySize {
    /// Minimum size of a cursor in bytes.
    fn cursor(self) -> usize {
        self.key.max(MIN_CURSOR)
    }
}

/// A buffer for some entries.
#[derive(Debug, Default)]
pub struct Batch {
    keys: Vec<u8>,
    values: Vec<u8>,
    size: Option<EntrySize>,
    /// Number of entries in the batch.
    count: usize,
    origin: Origin,
}

/// How a batch was requested.
#[derive(Debug, Default)]
enum Origin {
    /// Starting at the map's first bucket or index.
    #[default]
    Start,
    /// Starting at this cursor.
    After(Vec<u8>),
    /// Key by key.
    Keys,
}

impl Batch {
    /// Keys and values; for per-CPU maps, the values of all CPUs in sequence.
    pub fn entries(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.size.into_iter().flat_map(|size| {
            let keys = self.keys.chunks_exact(size.key);
            keys.zip(self.values.chunks_exact(size.value))
                .take(self.count)
        })
    }

    /// Reads the same entries of the map again, into `again`. Each entry has the same index, unless entries before it
    /// were added or removed.
    pub(super) fn read_again(&self, map: BorrowedFd<'_>, again: &mut Self) -> io::Result<()> {
        let Some(size) = self.size else {
            again.count = 0;
            return Ok(());
        };
        let cursor = match &self.origin {
            Origin::Start => None,
            Origin::After(cursor) => Some(&cursor[..]),
            Origin::Keys => return self.read_keys(map, size, again),
        };
        let room = self.keys.len() / size.key;
        let mut end = vec![0; size.cursor()];
        again.reset(size, room);
        let Self { keys, values, .. } = again;
        match sys::lookup_batch(map, cursor, &mut end, keys, values, room as u32) {
            Ok((count, _)) => again.count = count as usize,
            // The first bucket has grown larger than the whole first batch.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn read_keys(&self, map: BorrowedFd<'_>, size: EntrySize, again: &mut Self) -> io::Result<()> {
        again.reset(size, self.count);
        for (key, _) in self.entries() {
            let slot = &mut again.values[again.count * size.value..][..size.value];
            if sys::lookup(map, key, slot)? {
                again.keys[again.count * size.key..][..size.key].copy_from_slice(key);
                again.count += 1;
            }
        }
        Ok(())
    }

    fn reset(&mut self, size: EntrySize, room: usize) {
        self.size = Some(size);
        self.count = 0;
        self.keys.resize(room * size.key, 0);
        self.values.resize(room * size.value, 0);
    }
}

/// The position of a walk through a map.
#[derive(Debug)]
pub(super) struct Walk {
    size: EntrySize,
    /// Number of entries for which a batch must have space.
    room: usize,
    place: Place,
    /// Where the last kernel call ended: its cursor, or a key.
    cursor: Vec<u8>,
    /// Receives the cursor of the next call.
    next: Vec<u8>,
    /// Keys that a key-by-key walk may still meet; `None` until it starts.
    keys_left: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Start,
    AfterBatch,
    AfterKey,
    End,
}

impl Walk {
    /// Starts at the first entry. Neither size may be 0.
    pub(super) fn new(size: EntrySize) -> Self {
        let fitting = MAX_BYTES / (size.key + size.value);
        let cursor = vec![0; size.cursor()];
        Self {
            size,
            room: fitting.clamp(1, MAX_ENTRIES),
            place: Place::Start,
            next: cursor.clone(),
            cursor,
            keys_left: None,
        }
    }

    /// Reads more entries into `batch`. Returns `false` if there were no more. An empty batch does not mean the end.
    pub(super) fn read(&mut self, map: BorrowedFd<'_>, batch: &mut Batch) -> io::Result<bool> {
        match self.place {
            Place::Start => match self.read_batch(map, batch) {
                Err(error) if matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EINVAL)) => {
                    self.read_by_key(map, batch)?;
                }
                other => other?,
            },
            Place::AfterBatch => self.read_batch(map, batch)?,
            Place::AfterKey => self.read_by_key(map, batch)?,
            Place::End => {
                batch.reset(self.size, 0);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn read_batch(&mut self, map: BorrowedFd<'_>, batch: &mut Batch) -> io::Result<()> {
        let cursor = (self.place == Place::AfterBatch).then_some(&self.cursor[..]);
        let (count, is_end) = loop {
            batch.reset(self.size, self.room);
            let Batch { keys, values, .. } = batch;
            match sys::lookup_batch(map, cursor, &mut self.next, keys, values, self.room as u32) {
                // The next bucket alone is larger than the batch.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => self.room *= 2,
                other => break other?,
            }
        };
        batch.count = count as usize;
        batch.origin = cursor.map_or(Origin::Start, |cursor| Origin::After(cursor.to_vec()));
        std::mem::swap(&mut self.cursor, &mut self.next);
        self.place = if is_end {
            Place::End
        } else {
            Place::AfterBatch
        };
        Ok(())
    }

    fn read_by_key(&mut self, map: BorrowedFd<'_>, batch: &mut Batch) -> io::Result<()> {
        batch.reset(self.size, self.room);
        batch.origin = Origin::Keys;
        let EntrySize { key, value } = self.size;
        let mut keys_left = match self.keys_left {
            Some(left) => left,
            None => u64::from(sys::map_info(map)?.max_entries) * KEYS_FACTOR,
        };
        while batch.count < self.room {
            let after = (self.place == Place::AfterKey).then_some(&self.cursor[..key]);
            if !sys::next_key(map, after, &mut self.next)? {
                self.place = Place::End;
                break;
            }
            let Some(left) = keys_left.checked_sub(1) else {
                let text = "keys are deleted faster than the map is read";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            };
            keys_left = left;
            self.place = Place::AfterKey;
            std::mem::swap(&mut self.cursor, &mut self.next);
            let slot = &mut batch.values[batch.count * value..][..value];
            // Otherwise the entry was deleted in the meantime, or is an empty slot in an array of objects.
            if sys::lookup(map, &self.cursor, slot)? {
                batch.keys[batch.count * key..][..key].copy_from_slice(&self.cursor[..key]);
                batch.count += 1;
            }
        }
        self.keys_left = Some(keys_left);
        Ok(())
    }
}

/// Calls `each` with every entry of a map.
pub(super) fn walk(
    map: BorrowedFd<'_>,
    size: EntrySize,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> io::Result<()> {
    let mut walk = Walk::new(size);
    let mut batch = Batch::default();
    while walk.read(map, &mut batch)? {
        for (key, value) in batch.entries() {
            each(key, value);
        }
    }
    Ok(())
}
