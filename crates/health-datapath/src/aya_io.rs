//! Errors of system calls on maps and programs, as the standard library has them.

use std::io;

use aya::maps::MapError;
use aya::programs::ProgramError;

/// Of a map.
pub(crate) fn map_io(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

/// Of a program.
pub(crate) fn program_io(error: ProgramError) -> io::Error {
    match error {
        ProgramError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}
