//! Options of TCP sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::errno::Errno;
use socket2::SockRef;

/// Makes the kernel forget a closed connection as soon as the other side has acknowledged the FIN, without waiting for
/// the other side's FIN: no FIN_WAIT2 and no TIME_WAIT (tcp(7), `TCP_LINGER2`). Must be called before the connection is
/// closed.
pub fn forget_after_fin(socket: &impl AsFd) -> io::Result<()> {
    let never: libc::c_int = -1;
    // SAFETY: the kernel reads no more of `never` than the length says, which is its size.
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

/// Delays the acknowledgement that ends the handshake until the first write, and sends both together. This saves a
/// packet, and a server learns of the connection when there is something to read (tcp(7), `TCP_QUICKACK`). If nothing
/// is written for 40 ms, the kernel sends the acknowledgement alone. Must be called before the connection is opened.
pub fn acknowledge_by_first_write(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_tcp_quickack(false)
}
