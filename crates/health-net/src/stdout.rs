//! Standard output as it was given to the program.
//!
//! The standard library opens `/dev/null` in place of a standard output that is closed when the program starts, and takes
//! a write to one that is not open for writing for done. Whoever prints would be told that all is well.

use std::io::{self, Stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

static IS_UNWRITABLE: AtomicBool = AtomicBool::new(false);

/// Looks before the standard library does: what the loader finds here runs before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: F_GETFL takes no further argument and touches no memory of this program.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let is_writable = flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
    IS_UNWRITABLE.store(!is_writable, Ordering::Relaxed);
}

/// Standard output. Fails with `EBADF` if it was closed, or not open for writing, when the program started.
pub fn stdout() -> io::Result<Stdout> {
    match IS_UNWRITABLE.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => Ok(io::stdout()),
    }
}
