//! Binds client sockets to ports.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use socket2::Socket;

/// Ephemeral ports, which the kernel assigns to sockets that do not choose a port (`net.ipv4.ip_local_port_range`).
const EPHEMERAL: Range<u16> = 32_768..61_000;

/// Binds a socket that will connect to `target`, unless `port` is 0. Other sockets may use the port too. Rejects
/// ephemeral ports, which the kernel may have assigned to another process.
pub(super) fn bind(socket: &Socket, port: u16, target: SocketAddr) -> io::Result<()> {
    if port == 0 {
        return Ok(());
    }
    if EPHEMERAL.contains(&port) {
        let error = format!("another process may take port {port} at any time");
        return Err(io::Error::other(error));
    }
    let unspecified: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(unspecified, port).into())
}
