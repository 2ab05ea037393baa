//! One pinned map of whatever layout, and its entries as they are read.

use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aya::Pod;
use aya::util::nr_cpus;

use super::DumpError;
use crate::datapath::btf::{Btf, Value};
use crate::datapath::layout::MapLayout;
use crate::datapath::sys;
use crate::datapath::walk::{Batch, EntrySize, Walk};

/// A number of `enum bpf_map_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapKind(u32);

impl MapKind {
    const ARRAY: Self = Self(2);
    const PER_CPU: [Self; 4] = [Self(5), Self(6), Self(10), Self(21)];

    /// Names as bpftool writes them, by number (`include/uapi/linux/bpf.h`).
    const NAMES: [&str; 35] = [
        "unspec",
        "hash",
        "array",
        "prog_array",
        "perf_event_array",
        "percpu_hash",
        "percpu_array",
        "stack_trace",
        "cgroup_array",
        "lru_hash",
        "lru_percpu_hash",
        "lpm_trie",
        "array_of_maps",
        "hash_of_maps",
        "devmap",
        "sockmap",
        "cpumap",
        "xskmap",
        "sockhash",
        "cgroup_storage",
        "reuseport_sockarray",
        "percpu_cgroup_storage",
        "queue",
        "stack",
        "sk_storage",
        "devmap_hash",
        "struct_ops",
        "ringbuf",
        "inode_storage",
        "task_storage",
        "bloom_filter",
        "user_ringbuf",
        "cgrp_storage",
        "arena",
        "insn_array",
    ];

    /// Kinds whose entries cannot be listed: streams, sets that do not tell their members, and storage that
    /// is looked up by the object that it belongs to.
    const WITHOUT_LISTING: [&str; 13] = [
        "perf_event_array",
        "cgroup_array",
        "xskmap",
        "queue",
        "stack",
        "sk_storage",
        "ringbuf",
        "inode_storage",
        "task_storage",
        "bloom_filter",
        "user_ringbuf",
        "cgrp_storage",
        "arena",
    ];

    /// As bpftool names it (`lru_hash`, `array`).
    pub fn name(self) -> &'static str {
        Self::NAMES
            .get(self.0 as usize)
            .copied()
            .unwrap_or("unknown")
    }

    /// Whether each CPU has a value of its own.
    pub fn is_per_cpu(self) -> bool {
        Self::PER_CPU.contains(&self)
    }

    /// Whether all entries are there from the beginning.
    pub(super) fn is_array(self) -> bool {
        self == Self::ARRAY || self.name() == "percpu_array"
    }

    /// Whether its entries can be listed.
    pub(super) fn is_listable(self) -> bool {
        !Self::WITHOUT_LISTING.contains(&self.name())
    }
}

/// An open map.
#[derive(Debug)]
pub struct OpenMap {
    map: OwnedFd,
    info: sys::MapInfo,
    pin: PathBuf,
}

impl OpenMap {
    /// Opens a pin. Fails when it is not one of a map.
    pub fn open(pin: &Path) -> Result<Self, DumpError> {
        let (map, info) = sys::open_map(pin)
            .map_err(|source| match source.raw_os_error() {
                // What the kernel answers for files outside of a bpffs, and folders.
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

    /// Opens a pin of one of our own maps. Fails when another version made it.
    pub(super) fn open_as(dir: &Path, layout: &MapLayout) -> Result<Self, DumpError> {
        let map = Self::open(&dir.join(layout.name))?;
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
        MapKind(self.info.kind)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }

    /// The types of its entries; `None` where whoever made it told none.
    pub fn types(&self) -> Result<Option<EntryTypes>, DumpError> {
        let info = &self.info;
        if info.btf == 0 || info.btf_value_type == 0 {
            return Ok(None);
        }
        let data = sys::btf(info.btf).map_err(|source| self.cannot("read the types of", source))?;
        let btf = Btf::parse(&data).map_err(|source| DumpError::Types {
            path: self.pin.clone(),
            source,
        })?;
        Ok(Some(EntryTypes {
            key: info.btf_key_type,
            value: info.btf_value_type,
            is_array: self.kind().is_array(),
            per_cpu: self.kind().is_per_cpu().then_some(info.value_size as usize),
            btf,
        }))
    }

    /// What the kernel charges for it, bytes; 0 where it does not say.
    pub(super) fn memory_bytes(&self) -> u64 {
        fs::read_to_string(format!("/proc/self/fdinfo/{}", self.map.as_raw_fd()))
            .ok()
            .and_then(|text| {
                text.lines()
                    .find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
            })
            .unwrap_or_default()
    }

    /// Its entries, as `decode` reads them from their keys and values.
    pub fn rows<T>(self, decode: Decode<T>) -> Result<Rows<T>, DumpError> {
        let walk = Walk::new(self.entry_size()?);
        Ok(Rows {
            map: self,
            walk: Mutex::new(walk),
            decode,
        })
    }

    /// Calls `each` with every entry, and with what its value is a moment later unless the map's entries have
    /// changed meanwhile.
    pub(super) fn each_twice(
        &self,
        mut each: impl FnMut(&[u8], &[u8], Option<&[u8]>),
    ) -> Result<(), DumpError> {
        let failed = |source| self.cannot("read", source);
        let mut walk = Walk::new(self.entry_size()?);
        let (mut batch, mut again) = (Batch::default(), Batch::default());
        while walk.read(self.fd(), &mut batch).map_err(failed)? {
            walk.read_again(self.fd(), &batch, &mut again)
                .map_err(failed)?;
            let mut later = again.entries();
            for (key, value) in batch.entries() {
                let later = later.next().filter(|(later, _)| *later == key);
                each(key, value, later.map(|(_, value)| value));
            }
        }
        Ok(())
    }

    fn entry_size(&self) -> Result<EntrySize, DumpError> {
        let (key, value) = (self.info.key_size as usize, self.info.value_size as usize);
        if !self.kind().is_listable() || key == 0 || value == 0 {
            return Err(DumpError::NothingToList {
                path: self.pin.clone(),
                kind: self.kind().name(),
            });
        }
        let value = if self.kind().is_per_cpu() {
            let cpus = nr_cpus().map_err(|(_, source)| self.cannot("count the CPUs of", source))?;
            per_cpu_stride(value) * cpus
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

/// The kernel copies each CPU's value in steps of eight bytes.
fn per_cpu_stride(value_size: usize) -> usize {
    value_size.next_multiple_of(8)
}

/// The types of a map's entries.
#[derive(Debug)]
pub struct EntryTypes {
    btf: Btf,
    key: u32,
    value: u32,
    is_array: bool,
    /// Bytes of one CPU's value.
    per_cpu: Option<usize>,
}

impl EntryTypes {
    /// A key, readable.
    pub fn key(&self, bytes: &[u8]) -> Value {
        match sys::read::<u32>(bytes) {
            // The maps of a program's variables have no type of key.
            Some(index) if self.is_array && self.key == 0 => Value::Unsigned(index.into()),
            _ => self.btf.value(self.key, bytes),
        }
    }

    /// A value, readable; for per-CPU maps a list of all CPUs'.
    pub fn value(&self, bytes: &[u8]) -> Value {
        let Some(size) = self.per_cpu else {
            return self.btf.value(self.value, bytes);
        };
        let values = bytes.chunks_exact(per_cpu_stride(size));
        Value::List(
            values
                .map(|value| self.btf.value(self.value, &value[..size]))
                .collect(),
        )
    }
}

/// Reads an entry from key and value; `None` for what is not to be shown.
pub type Decode<T> = fn(&[u8], &[u8]) -> Option<T>;

/// The entries of one map, which are read batch by batch: whoever reads them holds no more than that.
///
/// Each entry that lives through the reading is read once, for whatever happens to others;
/// `docs/maps.md` says what else may be seen.
#[derive(Debug)]
pub struct Rows<T> {
    map: OpenMap,
    walk: Mutex<Walk>,
    decode: Decode<T>,
}

impl<T> Rows<T> {
    /// Reads the next entries into `batch`; `None` after the last ones. Several threads may take turns, with a
    /// batch each.
    pub fn next<'a>(
        &'a self,
        batch: &'a mut Batch,
    ) -> Result<Option<impl Iterator<Item = T> + 'a>, DumpError> {
        // A walk is only changed when the kernel has answered.
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

/// Key and value of the layouts that `K` and `V` are.
pub(super) fn decode<K: Pod, V: Pod>(key: &[u8], value: &[u8]) -> Option<(K, V)> {
    Some((sys::read(key)?, sys::read(value)?))
}
