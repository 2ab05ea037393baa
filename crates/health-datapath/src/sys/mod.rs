//! The bpf(2) calls that aya lacks: maps of any layout, their type information, small programs, and the devices of
//! links.

mod btf;
mod link;
mod map;
mod program;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aya_obj::generated::bpf_cmd::{self, BPF_OBJ_GET, BPF_OBJ_GET_INFO_BY_FD, BPF_OBJ_PIN};

pub(crate) use self::btf::load_btf;
pub(crate) use self::link::{
    LinkTarget, cgroup_link, create_link, detach_link, device_of_link, update_link,
};
pub(crate) use self::map::{
    CreateAttr, MapInfo, add, create_map, delete, delete_batch, lookup, lookup_batch, map_by_id,
    map_info, next_key, open_map, set, update_batch, wait_for_programs,
};
pub(crate) use self::program::{
    jited_len, load_classifier, program_id, run_classifier, run_raw_tracepoint,
};

/// `union bpf_attr` for opening an object by its id.
#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// `union bpf_attr` for opening or creating a pin.
#[repr(C)]
#[derive(Default)]
struct PinAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// `union bpf_attr` for querying an object.
#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    info_len: u32,
    info: u64,
}

fn bpf<A>(command: bpf_cmd, attr: &mut A) -> io::Result<()> {
    bpf_fd(command, attr).map(drop)
}

fn bpf_fd<A>(command: bpf_cmd, attr: &mut A) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the given size; the kernel takes the rest as zero. Its pointers
    // are to live buffers of the sizes that the map demands.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as u32,
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

/// Runs a command that returns a descriptor.
fn bpf_open<A>(command: bpf_cmd, attr: &mut A) -> io::Result<OwnedFd> {
    let fd = bpf_fd(command, attr)?;
    // SAFETY: the kernel has just opened this descriptor for us, and every descriptor fits into an `i32`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Opens the object pinned at `path`.
pub(crate) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        path: path.as_ptr() as u64,
        ..PinAttr::default()
    };
    bpf_open(BPF_OBJ_GET, &mut attr)
}

/// Pins an object.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        path: path.as_ptr() as u64,
        fd: object.as_raw_fd() as u32,
        ..PinAttr::default()
    };
    bpf(BPF_OBJ_PIN, &mut attr)
}

fn object_info<I>(object: BorrowedFd<'_>, info: &mut I) -> io::Result<()> {
    let mut attr = InfoAttr {
        fd: object.as_raw_fd() as u32,
        info_len: size_of::<I>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)
}

/// Reads a map type from the start of `bytes`; `None` if there are too few.
pub(crate) fn read<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: there are enough bytes, and every bit pattern is a valid `Pod`.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// Returns a map type as bytes.
pub(crate) fn bytes_of<T: aya::Pod>(value: &T) -> &[u8] {
    // SAFETY: a `Pod` has no uninitialised padding, and lives as long as the slice.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Maps of any kind, for tests.
#[cfg(test)]
pub(super) mod testing {
    use super::*;

    pub(crate) use super::CreateAttr;

    pub(crate) fn create_map(attr: CreateAttr) -> OwnedFd {
        super::create_map(attr).expect("a map")
    }

    pub(crate) fn insert(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) {
        set(map, key, value).expect("room for an entry");
    }
}
