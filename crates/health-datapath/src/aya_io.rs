//! Converts system call errors on maps and programs to the standard library's type.

use std::io::{self, ErrorKind};

use aya::maps::MapError;
use aya::programs::ProgramError;

/// Converts a map error.
pub(crate) fn map_io(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

/// Treats the removal of a missing entry as a success.
pub(crate) fn gone(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == ErrorKind::NotFound => {
            Ok(())
        }
        other => other,
    }
}

/// Converts a program error.
pub(crate) fn program_io(error: ProgramError) -> io::Error {
    match error {
        ProgramError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use aya::sys::SyscallError;

    use super::*;

    #[test]
    fn what_was_not_there_is_gone() {
        let failed = |errno| {
            MapError::SyscallError(SyscallError {
                call: "bpf_map_delete_elem",
                io_error: io::Error::from_raw_os_error(errno),
            })
        };
        assert!(gone(Ok(())).is_ok());
        assert!(gone(Err(MapError::KeyNotFound)).is_ok());
        assert!(gone(Err(failed(libc::ENOENT))).is_ok());
        assert!(gone(Err(failed(libc::EPERM))).is_err());
    }
}
