//! Standard output as the program received it.
//!
//! If standard output is closed when the program starts, the standard library opens `/dev/null` in its place. If it is
//! not open for writing, the library treats writes as successful. In both cases, callers that print would see success.

use std::io::{self, Stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

static IS_UNWRITABLE: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library's own check: the loader calls the functions in this section before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: F_GETFL takes no further argument and touches no memory of this program.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFL) };
    let is_writable = flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
    IS_UNWRITABLE.store(!is_writable, Ordering::Relaxed);
}

/// Returns standard output. Fails with `EBADF` if it was closed, or not open for writing, when the program started.
pub fn stdout() -> io::Result<Stdout> {
    match IS_UNWRITABLE.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => Ok(io::stdout()),
    }
}
