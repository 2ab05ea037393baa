//! Lists and closes sockets of the calling thread's network namespace through netlink (sock_diag(7)).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::socket::KernelSocket;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// `struct inet_diag_sockid`, bytes, and its offset in `struct inet_diag_msg`.
const ID: usize = 48;
const ID_AT: usize = 4;
/// The cookie's offset in it.
const COOKIE_AT: usize = 40;
/// `TCP_ESTABLISHED`, which means connected for UDP; as a bit.
const CONNECTED: u32 = 1 << 1;
/// The bits of all states.
const ANY_STATE: u32 = u32::MAX;
/// How often a listing is requested when changes interrupt it.
const LIST_ATTEMPTS: u32 = 20;

/// A connected UDP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectedSocket {
    /// The kernel's id for it (`SO_COOKIE`).
    pub cookie: u64,
    /// The address that it is connected to.
    pub peer: SocketAddr,
    family: u8,
    /// `struct inet_diag_sockid`.
    id: [u8; ID],
}

/// A connection to the kernel. It is bound to the network namespace in which it was opened.
#[derive(Debug)]
pub struct SocketDiag(KernelSocket);

impl SocketDiag {
    /// Opens a connection in the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        KernelSocket::open(NETLINK_SOCK_DIAG).map(Self)
    }

    /// All connected UDP sockets.
    pub fn connected_udp(&mut self) -> io::Result<Vec<ConnectedSocket>> {
        self.list(libc::IPPROTO_UDP as u8, CONNECTED, 0)
    }

    /// The cookies (`SO_COOKIE`) of sockets with this IP protocol (TCP or UDP) and local port, in any state.
    pub fn cookies_at(&mut self, protocol: u8, port: u16) -> io::Result<Vec<u64>> {
        let sockets = self.list(protocol, ANY_STATE, port)?;
        Ok(sockets.iter().map(|socket| socket.cookie).collect())
    }

    /// Sockets in these states; if the port is not 0, only those with this local port.
    fn list(&mut self, protocol: u8, states: u32, port: u16) -> io::Result<Vec<ConnectedSocket>> {
        let mut id = [0; ID];
        id[..2].copy_from_slice(&port.to_be_bytes());
        let mut sockets = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let about = About {
                family: family as u8,
                protocol,
                states,
                id: &id,
            };
            sockets.extend(self.list_about(&about)?);
        }
        Ok(sockets)
    }

    fn list_about(&mut self, about: &About) -> io::Result<Vec<ConnectedSocket>> {
        for _ in 0..LIST_ATTEMPTS {
            let (mut sockets, mut is_whole) = (Vec::new(), true);
            self.ask(
                SOCK_DIAG_BY_FAMILY,
                NLM_F_DUMP,
                about,
                &mut |flags, body| {
                    is_whole &= flags & NLM_F_DUMP_INTR == 0;
                    sockets.extend(connected(body));
                    Ok(())
                },
            )?;
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
        let about = About {
            family: socket.family,
            protocol: libc::IPPROTO_UDP as u8,
            states: CONNECTED,
            id: &socket.id,
        };
        self.ask(SOCK_DESTROY, 0, &about, &mut |_, _| Ok(()))
    }

    /// Sends a request about sockets, and calls `each` with the flags and the body of each answer.
    fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        about: &About,
        each: &mut dyn FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        // `struct inet_diag_req_v2`.
        let mut request = vec![about.family, about.protocol, 0, 0];
        request.extend_from_slice(&about.states.to_ne_bytes());
        request.extend_from_slice(about.id);
        self.0.request(kind, flags, &request, each)
    }
}

/// The sockets that a request is about.
struct About<'a> {
    family: u8,
    /// IP protocol number.
    protocol: u8,
    /// One bit per state.
    states: u32,
    /// `struct inet_diag_sockid`; fields that are 0 match anything.
    id: &'a [u8; ID],
}

/// Parses a socket from its `struct inet_diag_msg`.
fn connected(body: &[u8]) -> Option<ConnectedSocket> {
    let family = *body.first()?;
    let id: [u8; ID] = *body.get(ID_AT..)?.first_chunk()?;
    let port = u16::from_be_bytes(*id[2..].first_chunk()?);
    let to = &id[20..];
    let ip: IpAddr = match i32::from(family) {
        libc::AF_INET => Ipv4Addr::from(*to.first_chunk::<4>()?).into(),
        libc::AF_INET6 => Ipv6Addr::from(*to.first_chunk::<16>()?).to_canonical(),
        _ => return None,
    };
    let words = &id[COOKIE_AT..];
    let low = u32::from_ne_bytes(*words.first_chunk()?);
    let high = u32::from_ne_bytes(*words[4..].first_chunk()?);
    Some(ConnectedSocket {
        cookie: u64::from(high) << 32 | u64::from(low),
        peer: SocketAddr::new(ip, port),
        family,
        id,
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

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

    #[test]
    fn what_is_cut_short_is_no_socket() {
        let mut body = vec![libc::AF_INET as u8, 1, 0, 0];
        body.extend_from_slice(&[1; ID]);
        assert!(connected(&body).is_some());
        assert_eq!(connected(&body[..body.len() - 1]), None);
    }
}
