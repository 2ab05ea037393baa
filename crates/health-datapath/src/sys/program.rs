//! Programs: loading, running and querying them.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use aya_obj::generated::bpf_cmd::{BPF_PROG_LOAD, BPF_PROG_TEST_RUN};
use aya_obj::generated::bpf_prog_type::{
    self, BPF_PROG_TYPE_RAW_TRACEPOINT, BPF_PROG_TYPE_SCHED_CLS,
};

use super::{bpf, bpf_open, object_info};

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
struct ProgramAttr {
    kind: u32,
    /// Number of instructions.
    instructions: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
}

/// Loads a tc program. If the verifier rejects it, the verifier's output goes to `log`.
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

/// Returns the size of a program's machine code in bytes; 0 if it is interpreted.
pub(crate) fn jited_len(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = ProgramInfo::default();
    object_info(program, &mut info)?;
    Ok(info.jited_len)
}
