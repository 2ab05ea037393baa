//! The bpf(2) calls that get the verifier's output for a program.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use aya_obj::generated::bpf_cmd::{
    self, BPF_BTF_LOAD, BPF_MAP_FREEZE, BPF_MAP_UPDATE_ELEM, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_LOAD,
};
use aya_obj::generated::bpf_prog_type;

/// `BPF_LOG_LEVEL1`: makes the verifier log the paths that it explores.
const BPF_LOG_WAYS: u32 = 1;
/// Size of the buffer for this log. Since Linux 6.4, the kernel drops the start of a log that is too long.
const WAYS_LEN: usize = 1 << 24;
/// Makes the verifier log only its statistics.
const BPF_LOG_STATS: u32 = 4;
/// Size of the buffer for the statistics. They need less: three lines, with one number per function.
const STATS_LEN: usize = 16 << 10;

/// `union bpf_attr` for loading BTF.
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

/// `union bpf_attr` for a map's elements, and for freezing it.
#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` for querying an object.
#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// The start of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    translated_len: u32,
}

/// `union bpf_attr` for loading a program.
#[repr(C)]
#[derive(Default)]
struct ProgramAttr {
    kind: u32,
    /// Number of instructions.
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

/// A program to load.
pub(super) struct Unverified<'a> {
    /// Program type, and attach type if the program type has several.
    pub(super) kind: bpf_prog_type,
    pub(super) hook: u32,
    /// A sequence of `struct bpf_insn`.
    pub(super) instructions: Vec<u8>,
    pub(super) license: &'a CStr,
    /// BTF with the types of the functions.
    pub(super) types: Option<BorrowedFd<'a>>,
    /// Function and line records, each with the length of one record.
    pub(super) func_info: (&'a [u8], usize),
    pub(super) line_info: (&'a [u8], usize),
}

/// Loads a program. Returns it with the verifier's statistics (`BPF_LOG_STATS`).
pub(super) fn verify_program(program: &Unverified<'_>) -> io::Result<(OwnedFd, String)> {
    let mut log = vec![0_u8; STATS_LEN];
    let program = load_with_log(program, BPF_LOG_STATS, &mut log)?;
    Ok((program, text_of(&log)))
}

/// The verifier's last message if it rejects the program; empty if it accepts the program.
pub(super) fn refusal(program: &Unverified<'_>) -> String {
    let mut log = vec![0_u8; WAYS_LEN];
    if load_with_log(program, BPF_LOG_WAYS, &mut log).is_ok() {
        return String::new();
    }
    // The statistics come last; skip them.
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

fn load_with_log(program: &Unverified<'_>, level: u32, log: &mut [u8]) -> io::Result<OwnedFd> {
    let records = |(bytes, length): (&[u8], usize)| {
        let count = bytes.len().checked_div(length).unwrap_or(0);
        (bytes.as_ptr() as u64, length as u32, count as u32)
    };
    let (func_info, func_info_rec_size, func_info_cnt) = records(program.func_info);
    let (line_info, line_info_rec_size, line_info_cnt) = records(program.line_info);
    let mut attr = ProgramAttr {
        kind: program.kind as u32,
        expected_attach_type: program.hook,
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

/// Size of a program's machine code in bytes; 0 if the program is interpreted.
pub(super) fn jited_len(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramInfo::default();
    let mut attr = InfoAttr {
        fd: program.as_raw_fd() as u32,
        info_len: size_of::<ProgramInfo>() as u32,
        info: std::ptr::from_mut(&mut info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info.jited_len)
}

/// Loads BTF into the kernel.
pub(super) fn load_btf(data: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = BtfAttr {
        data: data.as_ptr() as u64,
        len: data.len() as u32,
        ..BtfAttr::default()
    };
    bpf_open(BPF_BTF_LOAD, &mut attr)
}

/// Writes the single value of an array and makes the map read-only for user space.
pub(super) fn fill_and_freeze(map: BorrowedFd<'_>, value: &[u8]) -> io::Result<()> {
    let key = 0_u32;
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        key: std::ptr::from_ref(&key) as u64,
        value: value.as_ptr() as u64,
        ..ElementAttr::default()
    };
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr)?;
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd() as u32,
        ..ElementAttr::default()
    };
    bpf(BPF_MAP_FREEZE, &mut attr).map(drop)
}

fn bpf<A>(command: bpf_cmd, attr: &mut A) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` with the given size, and the kernel treats the rest as zero. Its
    // pointers refer to live buffers of the sizes given with them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as u32,
            std::ptr::from_mut(attr),
            size_of::<A>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Runs a command that returns a file descriptor.
fn bpf_open<A>(command: bpf_cmd, attr: &mut A) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: the kernel has just opened the descriptor for this process, and descriptors fit in an `i32`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
