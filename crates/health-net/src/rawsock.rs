//! Raw sockets under tokio, and a socket option that no library offers.

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use socket2::Socket;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets the runtime watch a nonblocking socket for incoming data. Must be called in a tokio runtime.
pub fn watch_readable(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns its descriptor, always returns the same one, and keeps it open until it is dropped, which
    // `AsyncFd` does after deregistering it.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)
}

/// Makes packets leave whole or not at all: IPv4 with the don't-fragment bit, IPv6 without fragmentation by this host.
/// Only the device's MTU limits them (`EMSGSIZE`), not the path MTU that the kernel knows: `IP_PMTUDISC_PROBE` of
/// ip(7), and its counterpart in ipv6(7).
pub fn probe_mtu(socket: &Socket, is_ipv6: bool) -> io::Result<()> {
    let (level, option, value) = match is_ipv6 {
        false => (
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            libc::IP_PMTUDISC_PROBE,
        ),
        true => (
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        ),
    };
    // SAFETY: the descriptor is open, and the option's value is an int that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    Errno::result(result).map(drop).map_err(io::Error::from)
}
