//! The bpf(2) calls that aya does not offer: walking a map of any layout, in batches where it can, and
//! asking a pinned link for its device.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_MAP_LOOKUP_ELEM: u32 = 1;
const BPF_MAP_GET_NEXT_KEY: u32 = 4;
const BPF_OBJ_GET: u32 = 7;
const BPF_OBJ_GET_INFO_BY_FD: u32 = 15;
const BPF_MAP_LOOKUP_BATCH: u32 = 24;
const BPF_LINK_TYPE_TCX: u32 = 11;
/// The kernel-internal "not supported", which batches return where a map kind has none.
const ENOTSUPP: i32 = 524;
/// Entries asked for at once. A batch must hold the fullest hash bucket.
const BATCH: u32 = 4_096;

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

/// `union bpf_attr` for opening a pin.
#[repr(C)]
#[derive(Default)]
struct PinAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// `union bpf_attr` for asking about an object.
#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// The beginning of `struct bpf_link_info` of a TCX link.
#[repr(C)]
#[derive(Default)]
struct TcxLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    pad: u32,
    ifindex: u32,
    attach_type: u32,
}

fn bpf<A>(command: u32, attr: &mut A) -> io::Result<()> {
    bpf_fd(command, attr).map(drop)
}

fn bpf_fd<A>(command: u32, attr: &mut A) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; the kernel takes the rest as
    // zero. The pointers in it are to live buffers of the sizes the map demands.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<A>(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Number of the device that the TCX link pinned at `path` is on; `None` for other objects, and where
/// the device is gone.
pub(super) fn device_of_link(path: &Path) -> io::Result<Option<u32>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        path: path.as_ptr() as u64,
        ..PinAttr::default()
    };
    let fd = bpf_fd(BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just opened it for us, and it fits as all descriptors do.
    let link = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut info = TcxLinkInfo::default();
    let mut attr = InfoAttr {
        fd: link.as_raw_fd() as u32,
        info_len: size_of::<TcxLinkInfo>() as u32,
        info: std::ptr::from_mut(&mut info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok((info.kind == BPF_LINK_TYPE_TCX && info.ifindex != 0).then_some(info.ifindex))
}

/// Sizes of one entry as the kernel copies it.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntrySize {
    /// Bytes of a key.
    pub(super) key: usize,
    /// Bytes of a value; for per-CPU maps of all CPUs' together.
    pub(super) value: usize,
}

/// Calls `each` with every entry. Entries that live through the walk are seen at least once; others may
/// or may not be.
pub(super) fn walk(
    map: BorrowedFd<'_>,
    size: EntrySize,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> io::Result<()> {
    match walk_in_batches(map, size, BATCH, each) {
        // Not all kinds of map have batches.
        Err(error) if matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EINVAL)) => {
            walk_one_by_one(map, size, each)
        }
        other => other,
    }
}

/// As [`walk`], for kinds of map that have batches, with `room` entries asked for at once: the kernel
/// holds its CPU for so long.
pub(super) fn walk_in_batches(
    map: BorrowedFd<'_>,
    size: EntrySize,
    mut room: u32,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> io::Result<()> {
    let mut keys = vec![0_u8; room as usize * size.key];
    let mut values = vec![0_u8; room as usize * size.value];
    // The cursor is opaque; hash maps keep four bytes in it, others a key.
    let mut cursor = vec![0_u8; size.key.max(8)];
    let mut next = cursor.clone();
    let mut first = true;
    loop {
        let mut attr = BatchAttr {
            in_batch: if first { 0 } else { cursor.as_ptr() as u64 },
            out_batch: next.as_mut_ptr() as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: room,
            map_fd: map.as_raw_fd() as u32,
            ..BatchAttr::default()
        };
        let end = match bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) {
            Ok(()) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            // One bucket alone is larger than the buffers.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                room *= 2;
                keys.resize(room as usize * size.key, 0);
                values.resize(room as usize * size.value, 0);
                continue;
            }
            Err(error) => return Err(error),
        };
        let count = attr.count as usize;
        for (key, value) in keys
            .chunks_exact(size.key)
            .zip(values.chunks_exact(size.value))
            .take(count)
        {
            each(key, value);
        }
        if end {
            return Ok(());
        }
        std::mem::swap(&mut cursor, &mut next);
        first = false;
    }
}

/// What a look at a part of a hash map found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    /// All entries that there are.
    All(u64),
    /// So many entries in the first buckets, of which there are so many.
    Part { entries: u32, buckets: u32 },
}

/// Counts at most `most` entries of a hash map without reading the rest.
pub(super) fn sample(map: BorrowedFd<'_>, size: EntrySize, most: u32) -> io::Result<Sample> {
    let mut keys = vec![0_u8; most as usize * size.key];
    let mut values = vec![0_u8; most as usize * size.value];
    // Of a hash map, the cursor is the number of the bucket that comes next
    // (`__htab_map_lookup_and_delete_batch`).
    let mut buckets = 0_u32;
    let mut attr = BatchAttr {
        out_batch: std::ptr::from_mut(&mut buckets) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: most,
        map_fd: map.as_raw_fd() as u32,
        ..BatchAttr::default()
    };
    match bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) {
        Ok(()) => Ok(Sample::Part {
            entries: attr.count,
            buckets,
        }),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            Ok(Sample::All(attr.count.into()))
        }
        Err(error) => Err(error),
    }
}

/// Whether a map holds a key. To an LRU map that is no use of the entry.
pub(super) fn contains(map: BorrowedFd<'_>, size: EntrySize, key: &[u8]) -> io::Result<bool> {
    let mut value = vec![0_u8; size.value];
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        key: key.as_ptr() as u64,
        value_or_next_key: value.as_mut_ptr() as u64,
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

fn walk_one_by_one(
    map: BorrowedFd<'_>,
    size: EntrySize,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> io::Result<()> {
    let map_fd = map.as_raw_fd() as u32;
    let mut key: Option<Vec<u8>> = None;
    let mut next = vec![0_u8; size.key];
    let mut value = vec![0_u8; size.value];
    loop {
        let mut attr = ElementAttr {
            map_fd,
            key: key.as_ref().map_or(0, |key| key.as_ptr() as u64),
            value_or_next_key: next.as_mut_ptr() as u64,
            ..ElementAttr::default()
        };
        match bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut attr = ElementAttr {
            map_fd,
            key: next.as_ptr() as u64,
            value_or_next_key: value.as_mut_ptr() as u64,
            ..ElementAttr::default()
        };
        match bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) {
            Ok(()) => each(&next, &value),
            // Deleted in the meantime.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
        key = Some(next.clone());
    }
}

/// The first bytes of `bytes` as a map type; `None` when there are too few.
pub(super) fn read<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: enough bytes are there, and every pattern of them is a valid `Pod`.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// A map type as bytes.
pub(super) fn bytes_of<T: aya::Pod>(value: &T) -> &[u8] {
    // SAFETY: a `Pod` has no padding that was not initialised, and lives as long as the slice.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}
