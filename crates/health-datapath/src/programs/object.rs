//! The compiled programs, and the variables that are set when they are loaded.

use aya::Ebpf;
use aya::programs::{Program, SchedClassifier};
use health_net::clock;
use miniz_oxide::inflate::decompress_to_vec;

use crate::error::DatapathError;
use crate::program::DatapathProgram;

/// The object with the compiled programs, as a DEFLATE stream (RFC 1951): a quarter of its size.
pub static COMPRESSED_PROGRAMS: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/datapath.deflate"));

/// The variable with the time from which programs hold early fragments.
pub(super) const HOLDS_FROM: &str = "HOLDS_FROM";
/// How long new programs do not hold early fragments, in seconds: they see later fragments of packets whose first
/// fragment passed the former programs. Loading takes part of this time.
const TAKE_OVER_SECS: u64 = 5;

/// Returns the value of [`HOLDS_FROM`] for programs that are loaded now: `CLOCK_MONOTONIC`, in seconds.
pub(super) fn holds_from() -> u32 {
    (clock::now_ns() / 1_000_000_000 + TAKE_OVER_SECS) as u32
}

/// Returns the object with the compiled programs, about 1.7 MB. Bytes after the stream's end are ignored.
///
/// # Errors
///
/// If the agent's file is damaged.
pub fn programs() -> Result<Vec<u8>, DatapathError> {
    decompress_to_vec(COMPRESSED_PROGRAMS).map_err(|error| DatapathError::Damaged(error.status))
}

/// Returns a program of the object.
pub(super) fn classifier(
    ebpf: &mut Ebpf,
    program: DatapathProgram,
) -> Result<&mut SchedClassifier, DatapathError> {
    match ebpf.program_mut(program.object_name()) {
        Some(Program::SchedClassifier(program)) => Ok(program),
        _ => Err(DatapathError::Missing(program.object_name().to_owned())),
    }
}
