//! Maps of any layout: single elements, and batches.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::{fs, io};

use aya_obj::generated::BPF_NOEXIST;
use aya_obj::generated::bpf_cmd::{
    self, BPF_MAP_CREATE, BPF_MAP_DELETE_BATCH, BPF_MAP_DELETE_ELEM, BPF_MAP_GET_FD_BY_ID,
    BPF_MAP_GET_NEXT_KEY, BPF_MAP_LOOKUP_BATCH, BPF_MAP_LOOKUP_ELEM, BPF_MAP_UPDATE_BATCH,
    BPF_MAP_UPDATE_ELEM,
};

use super::{IdAttr, bpf, bpf_open, object_info, open_pin};

/// The target of a map's descriptor link in `/proc/self/fd`, which no other kind of BPF object has.
const MAP_LINK: &str = "anon_inode:bpf-map";

/// `union bpf_attr` for single elements.
#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value_or_next_key: u64,
    flags: u64,
}

/// `union bpf_attr` for batches.
#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The start of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MapInfo {
    /// A value of `enum bpf_map_type`.
    pub(crate) kind: u32,
    pub(crate) id: u32,
    /// Bytes.
    pub(crate) key_size: u32,
    /// Bytes; in per-CPU maps, the size of one CPU's value.
    pub(crate) value_size: u32,
    pub(crate) max_entries: u32,
    flags: u32,
    pub(crate) name: [u8; 16],
    ifindex: u32,
    vmlinux_value_type: u32,
    netns_device: u64,
    netns_inode: u64,
    btf: u32,
    btf_key_type: u32,
    btf_value_type: u32,
    vmlinux_btf: u32,
}

/// `union bpf_attr` for creating a map.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CreateAttr {
    /// A value of `enum bpf_map_type`.
    pub(crate) kind: u32,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) max_entries: u32,
    pub(crate) flags: u32,
    pub(crate) inner_map: u32,
    pub(crate) numa_node: u32,
    pub(crate) name: [u8; 16],
    pub(crate) ifindex: u32,
    pub(crate) btf: u32,
    pub(crate) btf_key_type: u32,
    pub(crate) btf_value_type: u32,
}

pub(crate) fn create_map(mut attr: CreateAttr) -> io::Result<OwnedFd> {
    bpf_open(BPF_MAP_CREATE, &mut attr)
}

/// Opens the map pinned at `path`; `None` if something else is pinned there.
pub(crate) fn open_map(path: &Path) -> io::Result<Option<(OwnedFd, MapInfo)>> {
    let map = open_pin(path)?;
    let link = fs::read_link(format!("/proc/self/fd/{}", map.as_raw_fd()))?;
    if link.as_os_str() != MAP_LINK {
        return Ok(None);
    }
    let info = map_info(map.as_fd())?;
    Ok(Some((map, info)))
}

/// Opens the map with this id.
pub(crate) fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    bpf_open(BPF_MAP_GET_FD_BY_ID, &mut attr)
}

/// Returns the kernel's description of a map.
pub(crate) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    object_info(map, &mut info)?;
    Ok(info)
}

/// Reads many entries at once, starting after `cursor`, or at the first entry if `cursor` is `None`. Returns how many
/// were copied to `keys` and `values`, and whether these were the last. `next` receives the cursor for the next call.
///
/// Cursors are opaque and as long as a key, but at least 4 bytes. `ENOSPC`: the next bucket of a hash map does not fit.
pub(crate) fn lookup_batch(
    map: BorrowedFd<'_>,
    cursor: Option<&[u8]>,
    next: &mut [u8],
    keys: &mut [u8],
    values: &mut [u8],
    room: u32,
) -> io::Result<(u32, bool)> {
    let mut attr = BatchAttr {
        in_batch: cursor.map_or(0, |cursor| cursor.as_ptr() as u64),
        out_batch: next.as_mut_ptr() as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: room,
        map_fd: map.as_raw_fd() as u32,
        ..BatchAttr::default()
    };
    let Err(error) = bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) else {
        return Ok((attr.count, false));
    };
    match error.raw_os_error() {
        Some(libc::ENOENT) => Ok((attr.count, true)),
        // The next bucket's lock could not be taken: the batch ends before it.
        Some(libc::EBUSY | libc::EDEADLK | libc::ETIMEDOUT) => Ok((attr.count, false)),
        _ => Err(error),
    }
}

/// Writes many entries in sequence; keys and values are in memory order. An error includes the number of entries that
/// were written.
pub(crate) fn update_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    values: &[u8],
    count: u32,
) -> Result<(), (u32, io::Error)> {
    let values = values.as_ptr() as u64;
    change_batch(BPF_MAP_UPDATE_BATCH, map, keys, values, count)
}

/// Deletes many entries in sequence. An error, such as `ENOENT`, includes the number of entries that were deleted.
pub(crate) fn delete_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    count: u32,
) -> Result<(), (u32, io::Error)> {
    change_batch(BPF_MAP_DELETE_BATCH, map, keys, 0, count)
}

fn change_batch(
    command: bpf_cmd,
    map: BorrowedFd<'_>,
    keys: &[u8],
    values: u64,
    count: u32,
) -> Result<(), (u32, io::Error)> {
    let mut attr = BatchAttr {
        keys: keys.as_ptr() as u64,
        values,
        count,
        map_fd: map.as_raw_fd() as u32,
        ..BatchAttr::default()
    };
    let Err(error) = bpf(command, &mut attr) else {
        return Ok(());
    };
    // If the kernel rejects the whole call, it leaves the count unchanged.
    let done = if attr.count == count { 0 } else { attr.count };
    Err((done, error))
}

/// Waits until no running program can still hold values that it read from a map before (`synchronize_rcu`).
pub(crate) fn wait_for_programs() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Copies the key after `key`, or the first key if that is `None`, to `next`. Returns `false` if there is none.
pub(crate) fn next_key(
    map: BorrowedFd<'_>,
    key: Option<&[u8]>,
    next: &mut [u8],
) -> io::Result<bool> {
    let key = key.map_or(0, |key| key.as_ptr() as u64);
    element(BPF_MAP_GET_NEXT_KEY, map, key, next.as_mut_ptr() as u64)
}

/// Copies the value of `key` to `value`. Returns `false` if the key does not exist.
pub(crate) fn lookup(map: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
    element(
        BPF_MAP_LOOKUP_ELEM,
        map,
        key.as_ptr() as u64,
        value.as_mut_ptr() as u64,
    )
}

/// Deletes `key`. Returns `false` if the key does not exist.
pub(crate) fn delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    element(BPF_MAP_DELETE_ELEM, map, key.as_ptr() as u64, 0)
}

/// Writes an entry, replacing one with the same key.
pub(crate) fn set(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key, value) = (key.as_ptr() as u64, value.as_ptr() as u64);
    element(BPF_MAP_UPDATE_ELEM, map, key, value).map(drop)
}

/// Adds an entry. Returns `false` if the key exists, and leaves its entry unchanged.
pub(crate) fn add(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        key: key.as_ptr() as u64,
        value_or_next_key: value.as_ptr() as u64,
        flags: BPF_NOEXIST.into(),
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_UPDATE_ELEM, &mut attr) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Runs a command on one element. Returns `false` if the kernel finds no such element.
fn element(
    command: bpf_cmd,
    map: BorrowedFd<'_>,
    key: u64,
    value_or_next_key: u64,
) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        key,
        value_or_next_key,
        ..ElementAttr::default()
    };
    match bpf(command, &mut attr) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
