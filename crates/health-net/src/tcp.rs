//! Options of TCP sockets that no library has.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::errno::Errno;

/// Has the kernel forget a connection that is closed as soon as the other side has acknowledged the FIN, and not wait
/// for that side's own: there will be no FIN_WAIT2 and no TIME_WAIT (tcp(7), `TCP_LINGER2`). Must be called before the
/// connection is closed.
pub fn forget_after_fin(socket: &impl AsFd) -> io::Result<()> {
    let never: libc::c_int = -1;
    // SAFETY: the kernel reads as much of `never` as it is told that there is.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_LINGER2,
            (&raw const never).cast(),
            size_of_val(&never) as libc::socklen_t,
        )
    };
    Errno::result(result).map(drop).map_err(io::Error::from)
}
