//! The bpf(2) calls that aya does not offer: reading maps of any layout, what is known of their types,
//! programs as the verifier sees them, and the devices of links.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_LOOKUP_ELEM: u32 = 1;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_MAP_DELETE_ELEM: u32 = 3;
const BPF_MAP_GET_NEXT_KEY: u32 = 4;
const BPF_PROG_LOAD: u32 = 5;
const BPF_OBJ_PIN: u32 = 6;
const BPF_OBJ_GET: u32 = 7;
const BPF_PROG_TEST_RUN: u32 = 10;
const BPF_MAP_GET_FD_BY_ID: u32 = 14;
const BPF_OBJ_GET_INFO_BY_FD: u32 = 15;
const BPF_BTF_LOAD: u32 = 18;
const BPF_BTF_GET_FD_BY_ID: u32 = 19;
const BPF_MAP_FREEZE: u32 = 22;
const BPF_MAP_LOOKUP_BATCH: u32 = 24;
const BPF_MAP_UPDATE_BATCH: u32 = 26;
const BPF_MAP_DELETE_BATCH: u32 = 27;
const BPF_LINK_CREATE: u32 = 28;
const BPF_LINK_UPDATE: u32 = 29;
const BPF_LINK_TYPE_TCX: u32 = 11;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// Has the verifier say which ways it went.
const BPF_LOG_WAYS: u32 = 1;
/// Room for that; what is more, the kernel leaves out at the beginning from Linux 6.4 on.
const WAYS_LEN: usize = 1 << 24;
/// Has the verifier say what it did, and no more.
const BPF_LOG_STATS: u32 = 4;
/// More than it says then: three lines, and a number for each function.
const STATS_LEN: usize = 16 << 10;
/// What the link in `/proc/self/fd` of a map says, and of no other BPF object.
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

/// `union bpf_attr` for opening an object by its id.
#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
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

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MapInfo {
    /// A number of `enum bpf_map_type`.
    pub(super) kind: u32,
    pub(super) id: u32,
    /// Bytes.
    pub(super) key_size: u32,
    /// Bytes; in per-CPU maps of one CPU's value.
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    flags: u32,
    pub(super) name: [u8; 16],
    ifindex: u32,
    vmlinux_value_type: u32,
    netns_device: u64,
    netns_inode: u64,
    /// Of the BTF object that describes its types; 0 for none.
    pub(super) btf: u32,
    /// Type of its keys there; 0 for none.
    pub(super) btf_key_type: u32,
    /// Type of its values there; 0 for none.
    pub(super) btf_value_type: u32,
    vmlinux_btf: u32,
}

/// The beginning of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    translated_len: u32,
}

/// `struct bpf_btf_info`.
#[repr(C)]
#[derive(Default)]
struct BtfInfo {
    data: u64,
    len: u32,
    id: u32,
    name: u64,
    name_len: u32,
    of_kernel: u32,
}

/// `union bpf_attr` for making a map.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct CreateAttr {
    /// A number of `enum bpf_map_type`.
    pub(super) kind: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
    pub(super) inner_map: u32,
    pub(super) numa_node: u32,
    pub(super) name: [u8; 16],
    pub(super) ifindex: u32,
    pub(super) btf: u32,
    pub(super) btf_key_type: u32,
    pub(super) btf_value_type: u32,
}

/// `union bpf_attr` for running a program.
#[repr(C)]
#[derive(Default)]
struct RunAttr {
    program: u32,
    result: u32,
    data_in_len: u32,
    data_out_len: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// `union bpf_attr` for handing in BTF.
#[repr(C)]
#[derive(Default)]
struct BtfAttr {
    data: u64,
    log: u64,
    len: u32,
    log_len: u32,
    log_level: u32,
    pad: u32,
}

/// `union bpf_attr` for loading a program.
#[repr(C)]
#[derive(Default)]
struct ProgramAttr {
    kind: u32,
    /// How many.
    instructions: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
    btf: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    line_info_rec_size: u32,
    line_info: u64,
    line_info_cnt: u32,
    pad: u32,
}

/// `union bpf_attr` for making a TCX link, at the end of those that a device has.
#[repr(C)]
#[derive(Default)]
struct LinkAttr {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    pad: u32,
    expected_revision: u64,
}

/// `union bpf_attr` for giving a link another program.
#[repr(C)]
#[derive(Default)]
struct LinkUpdateAttr {
    link: u32,
    program: u32,
    flags: u32,
    former: u32,
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

/// For commands that answer with a descriptor.
fn bpf_open<A>(command: u32, attr: &mut A) -> io::Result<OwnedFd> {
    let fd = bpf_fd(command, attr)?;
    // SAFETY: the kernel has just opened it for us, and it fits as all descriptors do.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Opens the object that is pinned at `path`.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        path: path.as_ptr() as u64,
        ..PinAttr::default()
    };
    bpf_open(BPF_OBJ_GET, &mut attr)
}

/// Pins an object at `path`, where nothing may be.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        path: path.as_ptr() as u64,
        fd: object.as_raw_fd() as u32,
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &mut attr)
}

/// Makes a map.
pub(super) fn create_map(mut attr: CreateAttr) -> io::Result<OwnedFd> {
    bpf_open(BPF_MAP_CREATE, &mut attr)
}

/// Loads a program for the hooks of tc. What the verifier has to say to a program that it refuses goes to `log`.
pub(super) fn load_classifier(instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    let mut attr = ProgramAttr {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        instructions: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_size: log.len() as u32,
        log_buf: if log.is_empty() {
            0
        } else {
            log.as_mut_ptr() as u64
        },
        ..ProgramAttr::default()
    };
    bpf_open(BPF_PROG_LOAD, &mut attr)
}

/// Runs a program on a packet; what it returned.
pub(super) fn run_classifier(program: BorrowedFd<'_>, packet: &[u8]) -> io::Result<u32> {
    let mut attr = RunAttr {
        program: program.as_raw_fd() as u32,
        data_in_len: packet.len() as u32,
        data_in: packet.as_ptr() as u64,
        repeat: 1,
        ..RunAttr::default()
    };
    bpf(BPF_PROG_TEST_RUN, &mut attr)?;
    Ok(attr.result)
}

/// Bytes of machine code that a program was compiled to; 0 where it is interpreted.
pub(super) fn jited_len(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramInfo::default();
    object_info(program, &mut info)?;
    Ok(info.jited_len)
}

/// Hands types (BTF) to the kernel.
pub(super) fn load_btf(data: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = BtfAttr {
        data: data.as_ptr() as u64,
        len: data.len() as u32,
        ..BtfAttr::default()
    };
    bpf_open(BPF_BTF_LOAD, &mut attr)
}

/// Puts a program on a device, behind those that are there. The link goes with its last descriptor or pin.
pub(super) fn create_tcx_link(
    program: BorrowedFd<'_>,
    device: u32,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let mut attr = LinkAttr {
        program: program.as_raw_fd() as u32,
        ifindex: device,
        attach_type,
        ..LinkAttr::default()
    };
    bpf_open(BPF_LINK_CREATE, &mut attr)
}

/// Gives a link another program: each packet meets the one or the other.
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdateAttr {
        link: link.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        ..LinkUpdateAttr::default()
    };
    bpf(BPF_LINK_UPDATE, &mut attr)
}

fn object_info<I>(object: BorrowedFd<'_>, info: &mut I) -> io::Result<()> {
    let mut attr = InfoAttr {
        fd: object.as_raw_fd() as u32,
        info_len: size_of::<I>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)
}

/// Number of the device that the TCX link pinned at `path` is on; `None` for other objects, and where
/// the device is gone.
pub(super) fn device_of_link(path: &Path) -> io::Result<Option<u32>> {
    let link = open_pin(path)?;
    let mut info = TcxLinkInfo::default();
    object_info(link.as_fd(), &mut info)?;
    Ok((info.kind == BPF_LINK_TYPE_TCX && info.ifindex != 0).then_some(info.ifindex))
}

/// Opens the map pinned at `path`; `None` when that is the pin of something else.
pub(super) fn open_map(path: &Path) -> io::Result<Option<(OwnedFd, MapInfo)>> {
    let map = open_pin(path)?;
    let link = fs::read_link(format!("/proc/self/fd/{}", map.as_raw_fd()))?;
    if link.as_os_str() != MAP_LINK {
        return Ok(None);
    }
    let info = map_info(map.as_fd())?;
    Ok(Some((map, info)))
}

/// Opens the map of this id.
pub(super) fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    bpf_open(BPF_MAP_GET_FD_BY_ID, &mut attr)
}

/// What the kernel says of a map.
pub(super) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    object_info(map, &mut info)?;
    Ok(info)
}

/// The BTF object of this id, as the kernel was given it.
pub(super) fn btf(id: u32) -> io::Result<Vec<u8>> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    let btf = bpf_open(BPF_BTF_GET_FD_BY_ID, &mut attr)?;
    let mut info = BtfInfo::default();
    object_info(btf.as_fd(), &mut info)?;
    let mut data = vec![0_u8; info.len as usize];
    let mut info = BtfInfo {
        data: data.as_mut_ptr() as u64,
        len: info.len,
        ..BtfInfo::default()
    };
    object_info(btf.as_fd(), &mut info)?;
    Ok(data)
}

/// Asks a map for many entries at once: those after `cursor`, the first ones without. Returns how many
/// have been copied to `keys` and `values`, and whether these were the last. `next` is the next call's cursor.
///
/// Cursors are opaque and as long as a key, 4 bytes at least. `ENOSPC`: not even the next bucket of a hash fits.
pub(super) fn lookup_batch(
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
        // The next bucket's lock was not to be had: the batch ends before it.
        Some(libc::EBUSY | libc::EDEADLK | libc::ETIMEDOUT) => Ok((attr.count, false)),
        _ => Err(error),
    }
}

/// Writes many entries, one after the other: keys and values as they lie in memory. On an error, the number of
/// those that were written comes with it.
pub(super) fn update_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    values: &[u8],
    count: u32,
) -> Result<(), (u32, io::Error)> {
    let values = values.as_ptr() as u64;
    change_batch(BPF_MAP_UPDATE_BATCH, map, keys, values, count)
}

/// Deletes many entries, one after the other. On an error, such as `ENOENT`, the number of those that were deleted
/// comes with it.
pub(super) fn delete_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    count: u32,
) -> Result<(), (u32, io::Error)> {
    change_batch(BPF_MAP_DELETE_BATCH, map, keys, 0, count)
}

fn change_batch(
    command: u32,
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
    // Where it refuses the call as a whole, the kernel leaves the count as it was.
    let done = if attr.count == count { 0 } else { attr.count };
    Err((done, error))
}

/// Waits until no program runs any more that may hold what was read from a map before (`synchronize_rcu`).
pub(super) fn wait_for_programs() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Copies the key after `key`, or the first one without, to `next`. `false` when there is none.
pub(super) fn next_key(
    map: BorrowedFd<'_>,
    key: Option<&[u8]>,
    next: &mut [u8],
) -> io::Result<bool> {
    let key = key.map_or(0, |key| key.as_ptr() as u64);
    element(BPF_MAP_GET_NEXT_KEY, map, key, next.as_mut_ptr() as u64)
}

/// Copies the value of `key` to `value`. `false` when there is no such key.
pub(super) fn lookup(map: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
    element(
        BPF_MAP_LOOKUP_ELEM,
        map,
        key.as_ptr() as u64,
        value.as_mut_ptr() as u64,
    )
}

/// Deletes `key`. `false` when there is no such key.
pub(super) fn delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    element(BPF_MAP_DELETE_ELEM, map, key.as_ptr() as u64, 0)
}

/// Writes an entry, in place of one of the same key.
pub(super) fn set(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key, value) = (key.as_ptr() as u64, value.as_ptr() as u64);
    element(BPF_MAP_UPDATE_ELEM, map, key, value).map(drop)
}

/// Adds an entry. `false` when there is one of this key, which stays as it is.
pub(super) fn add(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<bool> {
    const BPF_NOEXIST: u64 = 1;
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        key: key.as_ptr() as u64,
        value_or_next_key: value.as_ptr() as u64,
        flags: BPF_NOEXIST,
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_UPDATE_ELEM, &mut attr) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// `false` when the kernel finds no such element.
fn element(
    command: u32,
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

/// Writes the one value of an array and has nobody change it any more.
pub(super) fn fill_and_freeze(map: BorrowedFd<'_>, value: &[u8]) -> io::Result<()> {
    let key = 0_u32;
    let key = std::ptr::from_ref(&key) as u64;
    element(BPF_MAP_UPDATE_ELEM, map, key, value.as_ptr() as u64)?;
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        ..ElementAttr::default()
    };
    bpf(BPF_MAP_FREEZE, &mut attr)
}

/// A classifier to be verified.
pub(super) struct Classifier<'a> {
    /// `struct bpf_insn` each.
    pub(super) instructions: Vec<u8>,
    pub(super) license: &'a CStr,
    /// Types of its functions.
    pub(super) types: Option<BorrowedFd<'a>>,
    /// Records about functions and lines, and the length of one.
    pub(super) func_info: (&'a [u8], usize),
    pub(super) line_info: (&'a [u8], usize),
}

/// Loads a program, and tells what the verifier says of it (`BPF_LOG_STATS`).
pub(super) fn verify_classifier(program: &Classifier<'_>) -> io::Result<(OwnedFd, String)> {
    let mut log = vec![0_u8; STATS_LEN];
    let program = load_with_log(program, BPF_LOG_STATS, &mut log)?;
    Ok((program, text_of(&log)))
}

/// What the verifier says last of a program that it refuses; nothing of one that it takes.
pub(super) fn refusal(program: &Classifier<'_>) -> String {
    let mut log = vec![0_u8; WAYS_LEN];
    if load_with_log(program, BPF_LOG_WAYS, &mut log).is_ok() {
        return String::new();
    }
    // Behind it, what it counted.
    let said = text_of(&log);
    let mut lines = said
        .lines()
        .rev()
        .skip_while(|line| line.starts_with("processed "));
    lines.next().unwrap_or_default().to_owned()
}

fn text_of(log: &[u8]) -> String {
    let end = log.iter().position(|&byte| byte == 0);
    String::from_utf8_lossy(&log[..end.unwrap_or(log.len())]).into_owned()
}

fn load_with_log(program: &Classifier<'_>, level: u32, log: &mut [u8]) -> io::Result<OwnedFd> {
    let records = |(bytes, length): (&[u8], usize)| {
        let count = bytes.len().checked_div(length).unwrap_or(0);
        (bytes.as_ptr() as u64, length as u32, count as u32)
    };
    let (func_info, func_info_rec_size, func_info_cnt) = records(program.func_info);
    let (line_info, line_info_rec_size, line_info_cnt) = records(program.line_info);
    let mut attr = ProgramAttr {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        instructions: (program.instructions.len() / 8) as u32,
        insns: program.instructions.as_ptr() as u64,
        license: program.license.as_ptr() as u64,
        log_level: level,
        log_size: log.len() as u32,
        log_buf: log.as_mut_ptr() as u64,
        ..ProgramAttr::default()
    };
    if let Some(types) = program.types {
        attr.btf = types.as_raw_fd() as u32;
        attr.func_info = func_info;
        attr.func_info_rec_size = func_info_rec_size;
        attr.func_info_cnt = func_info_cnt;
        attr.line_info = line_info;
        attr.line_info_rec_size = line_info_rec_size;
        attr.line_info_cnt = line_info_cnt;
    }
    bpf_open(BPF_PROG_LOAD, &mut attr)
}

/// Maps of any kind, for tests.
#[cfg(test)]
pub(super) mod testing {
    use super::*;

    pub(in crate::datapath) use super::CreateAttr;

    pub(in crate::datapath) fn create_map(attr: CreateAttr) -> OwnedFd {
        super::create_map(attr).expect("a map")
    }

    pub(in crate::datapath) fn insert(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) {
        set(map, key, value).expect("room for an entry");
    }
}
