//! Programs, and the verifier's output about them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use aya_obj::generated::bpf_cmd::{BPF_PROG_LOAD, BPF_PROG_TEST_RUN};
use aya_obj::generated::bpf_prog_type::{
    self, BPF_PROG_TYPE_RAW_TRACEPOINT, BPF_PROG_TYPE_SCHED_CLS,
};

use super::{bpf, bpf_open, object_info};

/// Makes the verifier log the paths that it explored.
const BPF_LOG_WAYS: u32 = 1;
/// Size of that log; from Linux 6.4 on, the kernel truncates a longer log at its start.
const WAYS_LEN: usize = 1 << 24;
/// Makes the verifier log only its statistics.
const BPF_LOG_STATS: u32 = 4;
/// More than those need: three lines, and a number per function.
const STATS_LEN: usize = 16 << 10;

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

/// Loads a tc program. If the verifier refuses it, its output goes to `log`.
pub(crate) fn load_classifier(instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    load(BPF_PROG_TYPE_SCHED_CLS, instructions, log)
}

/// Loads a raw tracepoint program and runs it once in this process, without a context. Returns the program's result.
pub(crate) fn run_raw_tracepoint(instructions: &[u64]) -> io::Result<u32> {
    let program = load(BPF_PROG_TYPE_RAW_TRACEPOINT, instructions, &mut [])?;
    let mut attr = RunAttr {
        program: program.as_raw_fd() as u32,
        ..RunAttr::default()
    };
    bpf(BPF_PROG_TEST_RUN, &mut attr)?;
    Ok(attr.result)
}

fn load(kind: bpf_prog_type, instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    let mut attr = ProgramAttr {
        kind: kind as u32,
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

/// Runs a program on a packet. Returns the program's result.
pub(crate) fn run_classifier(program: BorrowedFd<'_>, packet: &[u8]) -> io::Result<u32> {
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

/// Id of a program.
pub(crate) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramInfo::default();
    object_info(program, &mut info)?;
    Ok(info.id)
}

/// Size of a program's machine code, bytes; 0 if it is interpreted.
pub(crate) fn jited_len(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramInfo::default();
    object_info(program, &mut info)?;
    Ok(info.jited_len)
}

/// A program for the verifier.
pub(crate) struct Unverified<'a> {
    /// Its kind, and its hook if the kind has several.
    pub(crate) kind: bpf_prog_type,
    pub(crate) hook: u32,
    /// A sequence of `struct bpf_insn`.
    pub(crate) instructions: Vec<u8>,
    pub(crate) license: &'a CStr,
    /// Types of its functions.
    pub(crate) types: Option<BorrowedFd<'a>>,
    /// Records about functions and lines, each with the length of one record.
    pub(crate) func_info: (&'a [u8], usize),
    pub(crate) line_info: (&'a [u8], usize),
}

/// Loads a program and returns the verifier's statistics (`BPF_LOG_STATS`).
pub(crate) fn verify_program(program: &Unverified<'_>) -> io::Result<(OwnedFd, String)> {
    let mut log = vec![0_u8; STATS_LEN];
    let program = load_with_log(program, BPF_LOG_STATS, &mut log)?;
    Ok((program, text_of(&log)))
}

/// The verifier's last message about a program that it refuses; empty if it accepts the program.
pub(crate) fn refusal(program: &Unverified<'_>) -> String {
    let mut log = vec![0_u8; WAYS_LEN];
    if load_with_log(program, BPF_LOG_WAYS, &mut log).is_ok() {
        return String::new();
    }
    // The statistics come last.
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
