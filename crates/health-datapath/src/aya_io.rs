//! Converts system call errors on maps and programs to the standard library's type.

use std::io;

use aya::maps::MapError;
use aya::programs::ProgramError;

/// Converts a map error.
pub(crate) fn map_io(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

/// Converts a program error.
pub(crate) fn program_io(error: ProgramError) -> io::Error {
    match error {
        ProgramError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}
