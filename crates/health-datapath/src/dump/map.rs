//! One pinned map, and its entries in batches.

use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aya::Pod;
use aya::util::nr_cpus;

use super::DumpError;
use super::kind::MapKind;
use crate::layout::MapLayout;
use crate::sys;
use crate::walk::{Batch, EntrySize, Walk};

/// An open map.
#[derive(Debug)]
pub struct OpenMap {
    map: OwnedFd,
    info: sys::MapInfo,
    pin: PathBuf,
}

impl OpenMap {
    /// Opens a pinned map. Fails if something else is pinned there.
    pub fn open(pin: &Path) -> Result<Self, DumpError> {
        let (map, info) = sys::open_map(pin)
            .map_err(|source| match source.raw_os_error() {
                // The kernel's errors for folders, and for files outside a bpffs.
                Some(libc::EACCES | libc::EINVAL) if pin.exists() => {
                    DumpError::NotAMap(pin.to_owned())
                }
                _ => DumpError::Kernel {
                    what: "open",
                    path: pin.to_owned(),
                    source,
                },
            })?
            .ok_or_else(|| DumpError::NotAMap(pin.to_owned()))?;
        Ok(Self {
            map,
            info,
            pin: pin.to_owned(),
        })
    }

    /// Opens an unpinned map by its kernel id. The map's name stands in for its pin.
    pub fn open_id(id: u32) -> Result<Self, DumpError> {
        let failed = |source| DumpError::Kernel {
            what: "open",
            path: format!("map {id}").into(),
            source,
        };
        let map = sys::map_by_id(id).map_err(failed)?;
        let info = sys::map_info(map.as_fd()).map_err(failed)?;
        let name = info.name.split(|&byte| byte == 0).next();
        let pin = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
        Ok(Self {
            map,
            info,
            pin: pin.into(),
        })
    }

    /// Opens a pin of one of our own maps. Fails if another version created it.
    pub(super) fn open_as(pin: &Path, layout: &MapLayout) -> Result<Self, DumpError> {
        let map = Self::open(pin)?;
        if (map.info.key_size, map.info.value_size) != (layout.key_size, layout.value_size) {
            return Err(DumpError::OtherLayout(map.pin));
        }
        Ok(map)
    }

    pub(super) fn info(&self) -> &sys::MapInfo {
        &self.info
    }

    /// Where it is pinned.
    pub fn pin(&self) -> &Path {
        &self.pin
    }

    /// Its kind.
    pub fn kind(&self) -> MapKind {
        MapKind::of(self.info.kind)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }

    /// Returns the memory that the kernel charges for the map, in bytes; 0 if unknown.
    pub(super) fn memory_bytes(&self) -> u64 {
        fs::read_to_string(format!("/proc/self/fdinfo/{}", self.map.as_raw_fd()))
            .ok()
            .and_then(|text| {
                text.lines()
                    .find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
            })
            .unwrap_or_default()
    }

    /// Returns the entries, with keys and values decoded by `decode`.
    pub fn rows<T>(self, decode: Decode<T>) -> Result<Rows<T>, DumpError> {
        let walk = Walk::new(self.entry_size()?);
        Ok(Rows {
            map: self,
            walk: Mutex::new(walk),
            decode,
        })
    }

    pub(super) fn entry_size(&self) -> Result<EntrySize, DumpError> {
        let (key, value) = (self.info.key_size as usize, self.info.value_size as usize);
        if !self.kind().is_listable() || key == 0 || value == 0 {
            return Err(DumpError::NothingToList {
                path: self.pin.clone(),
                kind: self.kind().name(),
            });
        }
        let value = if self.kind().is_per_cpu() {
            let cpus = nr_cpus().map_err(|(_, source)| self.cannot("count the CPUs of", source))?;
            // The kernel pads each CPU's value.
            value.next_multiple_of(8) * cpus
        } else {
            value
        };
        Ok(EntrySize { key, value })
    }

    pub(super) fn cannot(&self, what: &'static str, source: std::io::Error) -> DumpError {
        DumpError::Kernel {
            what,
            path: self.pin.clone(),
            source,
        }
    }
}

/// Decodes an entry from key and value; `None` if it must not be shown.
pub type Decode<T> = fn(&[u8], &[u8]) -> Option<T>;

/// The entries of one map, read in batches: a reader holds no more than one batch.
///
/// Each entry that exists throughout the reading is read once, whatever happens to other entries; `docs/maps.md`
/// describes what else a reader may see.
#[derive(Debug)]
pub struct Rows<T> {
    map: OpenMap,
    walk: Mutex<Walk>,
    decode: Decode<T>,
}

impl<T> Rows<T> {
    /// Reads the next entries into `batch`; returns `None` after the last entries. Several threads may take turns, each
    /// with its own batch.
    pub fn next<'a>(
        &'a self,
        batch: &'a mut Batch,
    ) -> Result<Option<impl Iterator<Item = T> + 'a>, DumpError> {
        // The walk changes only after the system call has returned.
        let mut walk = self.walk.lock().unwrap_or_else(PoisonError::into_inner);
        let is_more = walk
            .read(self.map.fd(), batch)
            .map_err(|source| self.map.cannot("read", source))?;
        drop(walk);
        let entries = batch.entries();
        Ok(is_more.then(|| entries.filter_map(|(key, value)| (self.decode)(key, value))))
    }

    /// Calls `each` with every entry, until it fails.
    pub fn try_each(
        &self,
        mut each: impl FnMut(T) -> Result<(), DumpError>,
    ) -> Result<(), DumpError> {
        let mut batch = Batch::default();
        while let Some(mut rows) = self.next(&mut batch)? {
            rows.try_for_each(&mut each)?;
        }
        Ok(())
    }

    /// Calls `each` with every entry.
    pub fn each(&self, mut each: impl FnMut(T)) -> Result<(), DumpError> {
        self.try_each(|row| {
            each(row);
            Ok(())
        })
    }

    /// All entries at once.
    pub fn collect(&self) -> Result<Vec<T>, DumpError> {
        let mut all = Vec::new();
        self.each(|row| all.push(row))?;
        Ok(all)
    }
}

/// Decodes key and value as the types `K` and `V`.
pub(super) fn decode<K: Pod, V: Pod>(key: &[u8], value: &[u8]) -> Option<(K, V)> {
    Some((sys::read(key)?, sys::read(value)?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aya_obj::generated::{BPF_F_NO_PREALLOC, bpf_map_type};

    use super::*;
    use crate::dump::raw;
    use crate::sys::testing::{CreateAttr, create_map, insert};

    const HASH: u32 = bpf_map_type::BPF_MAP_TYPE_HASH as u32;
    const ARRAY: u32 = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    const PROG_ARRAY: u32 = bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY as u32;
    const LPM_TRIE: u32 = bpf_map_type::BPF_MAP_TYPE_LPM_TRIE as u32;

    fn is_root() -> bool {
        let is_root = nix::unistd::geteuid().is_root();
        if !is_root {
            println!("skipped: needs root");
        }
        is_root
    }

    fn map(kind: u32, key_size: u32, value_size: u32, max_entries: u32) -> OpenMap {
        let flags = if kind == LPM_TRIE {
            BPF_F_NO_PREALLOC
        } else {
            0
        };
        let map = create_map(CreateAttr {
            kind,
            key_size,
            value_size,
            max_entries,
            flags,
            ..CreateAttr::default()
        });
        OpenMap {
            info: sys::map_info(map.as_fd()).unwrap(),
            map,
            pin: "/bpffs/pin".into(),
        }
    }

    #[test]
    fn every_entry_of_every_kind_is_read_once() {
        if !is_root() {
            return;
        }
        let entries = 10_000_u32;
        for kind in [HASH, ARRAY, LPM_TRIE] {
            // Trie keys start with the prefix length.
            let key = |number: u32| match kind {
                LPM_TRIE => [32_u32.to_ne_bytes(), number.to_be_bytes()].concat(),
                _ => number.to_ne_bytes().to_vec(),
            };
            let map = map(kind, key(0).len() as u32, 8, entries);
            for number in 0..entries {
                insert(map.fd(), &key(number), &u64::from(number).to_ne_bytes());
            }
            let mut read = BTreeMap::new();
            map.rows(raw)
                .unwrap()
                .each(|(key, value)| *read.entry((key, value)).or_insert(0) += 1)
                .unwrap();
            let expected = (0..entries).map(|number| {
                let value = u64::from(number).to_ne_bytes().to_vec();
                ((key(number), value), 1)
            });
            assert!(read == expected.collect(), "kind {kind}: {}", read.len());
        }
    }

    #[test]
    fn what_has_no_batches_is_read_key_by_key() {
        if !is_root() {
            return;
        }
        let map = map(PROG_ARRAY, 4, 4, 100);
        assert_eq!(map.rows(raw).unwrap().collect().unwrap(), []);
    }

    #[test]
    fn what_cannot_be_listed_is_refused_by_kind() {
        if !is_root() {
            return;
        }
        let (queue, ring) = (map(22, 0, 4, 8), map(27, 0, 0, 4096));
        for (map, name) in [(queue, "unknown"), (ring, "ringbuf")] {
            let error = map.rows(raw).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("/bpffs/pin") && text.contains(name), "{text}");
        }
    }

    #[test]
    fn what_is_no_map_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path(), Path::new("/nonexistent/map")] {
            let error = OpenMap::open(path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }
}
