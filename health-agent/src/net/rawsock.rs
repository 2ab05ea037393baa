//! Raw sockets under tokio.

use std::io;

use socket2::Socket;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets the runtime watch a nonblocking socket for something to receive. Must be called in a tokio
/// runtime.
pub fn watch_readable(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns its descriptor, names the same one each time and keeps it open until
    // it is dropped, which `AsyncFd` does after it has deregistered it.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)
}
