//! Lists and closes sockets of the calling thread's network namespace through netlink (sock_diag(7)).

use std::io;
use std::net::SocketAddr;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, Parseable as _};
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags,
};
use netlink_packet_sock_diag::{SockDiagDestroy, SockDiagMessage};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::socket::KernelSocket;

/// Maximum number of requests for a dump that changes interrupt.
const LIST_ATTEMPTS: u32 = 20;

/// A connected UDP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectedSocket {
    /// The socket's id in the kernel (`SO_COOKIE`).
    pub cookie: u64,
    /// The address to which it is connected.
    pub peer: SocketAddr,
    family: u8,
    id: SocketId,
}

/// A connection to the kernel, bound to the network namespace in which it was opened.
#[derive(Debug)]
pub struct SocketDiag(KernelSocket);

impl SocketDiag {
    /// Opens a connection in the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        KernelSocket::open(NETLINK_SOCK_DIAG).map(Self)
    }

    /// Lists all connected UDP sockets.
    pub fn connected_udp(&mut self) -> io::Result<Vec<ConnectedSocket>> {
        // For UDP, this state means connected.
        self.list(libc::IPPROTO_UDP as u8, StateFlags::ESTABLISHED, 0)
    }

    /// Returns the cookies (`SO_COOKIE`) of sockets with this IP protocol (TCP or UDP) and local port, in any state.
    pub fn cookies_at(&mut self, protocol: u8, port: u16) -> io::Result<Vec<u64>> {
        let any = StateFlags::from_bits_retain(u32::MAX);
        let sockets = self.list(protocol, any, port)?;
        Ok(sockets.iter().map(|socket| socket.cookie).collect())
    }

    /// Sockets in these states; if the port is not 0, only those with this local port.
    fn list(
        &mut self,
        protocol: u8,
        states: StateFlags,
        port: u16,
    ) -> io::Result<Vec<ConnectedSocket>> {
        let mut sockets = Vec::new();
        for (family, id) in [
            (libc::AF_INET, SocketId::new_v4()),
            (libc::AF_INET6, SocketId::new_v6()),
        ] {
            sockets.extend(self.list_family(InetRequest {
                family: family as u8,
                protocol,
                extensions: ExtensionFlags::empty(),
                states: states.clone(),
                socket_id: SocketId {
                    source_port: port,
                    ..id
                },
            })?);
        }
        Ok(sockets)
    }

    fn list_family(&mut self, request: InetRequest) -> io::Result<Vec<ConnectedSocket>> {
        let request = SockDiagMessage::InetRequest(request);
        for _ in 0..LIST_ATTEMPTS {
            let (mut sockets, mut is_whole) = (Vec::new(), true);
            let mut each = |flags, body: &[u8]| {
                is_whole &= flags & NLM_F_DUMP_INTR == 0;
                sockets.extend(connected(body));
                Ok(())
            };
            self.0.request_message(&request, NLM_F_DUMP, &mut each)?;
            if is_whole {
                return Ok(sockets);
            }
        }
        Err(io::Error::other(format!(
            "changes interrupted the listing of sockets {LIST_ATTEMPTS} times"
        )))
    }

    /// Disconnects a socket: pending receives fail with `ECONNABORTED`, sends with `EDESTADDRREQ`. The error kind is
    /// [`NotFound`](io::ErrorKind::NotFound) if the socket is gone or connected elsewhere by now, and
    /// [`Unsupported`](io::ErrorKind::Unsupported) if the kernel cannot do this (`CONFIG_INET_DIAG_DESTROY`).
    pub fn destroy(&mut self, socket: &ConnectedSocket) -> io::Result<()> {
        let request = SockDiagDestroy::new(SockDiagMessage::InetRequest(InetRequest {
            family: socket.family,
            protocol: libc::IPPROTO_UDP as u8,
            extensions: ExtensionFlags::empty(),
            states: StateFlags::ESTABLISHED,
            socket_id: socket.id.clone(),
        }));
        self.0.request_message(&request, 0, &mut |_, _| Ok(()))
    }
}

/// Parses a socket from its `struct inet_diag_msg`.
fn connected(body: &[u8]) -> Option<ConnectedSocket> {
    let header = InetResponseHeader::parse(body).ok()?;
    let id = header.socket_id;
    Some(ConnectedSocket {
        // Two words, the lower one first (net/ipv4/inet_diag.c, `inet_diag_msg_common_fill`). On little-endian
        // machines, the only ones we run on, the bytes form one number.
        cookie: u64::from_le_bytes(id.cookie),
        peer: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
        family: header.family,
        id,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, UdpSocket};

    use socket2::SockRef;

    use super::*;

    #[test]
    fn connected_sockets_are_listed_with_their_peers() {
        let mut diag = SocketDiag::open().unwrap();
        let mut wanted = Vec::new();
        for ip in ["127.0.0.1", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            let peer = UdpSocket::bind((ip, 0)).unwrap();
            let socket = UdpSocket::bind((ip, 0)).unwrap();
            socket.connect(peer.local_addr().unwrap()).unwrap();
            let cookie = SockRef::from(&socket).cookie().unwrap();
            wanted.push((cookie, peer.local_addr().unwrap(), socket, peer));
        }
        let listed = diag.connected_udp().unwrap();
        for (cookie, peer, socket, unconnected) in &wanted {
            let found = listed.iter().find(|found| found.cookie == *cookie);
            assert_eq!(found.unwrap().peer, *peer);
            let other = SockRef::from(unconnected).cookie().unwrap();
            assert!(listed.iter().all(|found| found.cookie != other));
            assert!(socket.take_error().unwrap().is_none());
        }
    }

    #[test]
    fn sockets_are_found_by_their_local_port() {
        let mut diag = SocketDiag::open().unwrap();
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let datagrams = UdpSocket::bind("[::]:0").unwrap();
        for (protocol, port, cookie) in [
            (
                libc::IPPROTO_TCP,
                client.local_addr().unwrap().port(),
                SockRef::from(&client).cookie(),
            ),
            (
                libc::IPPROTO_UDP,
                datagrams.local_addr().unwrap().port(),
                SockRef::from(&datagrams).cookie(),
            ),
        ] {
            let found = diag.cookies_at(protocol as u8, port).unwrap();
            assert!(found.contains(&cookie.unwrap()), "{protocol}: {found:?}");
        }
    }
}
