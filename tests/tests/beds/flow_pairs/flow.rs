//! One flow: its socket, its requests and the replies.

use std::io::{self, ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{SockaddrStorage, recvfrom};
use socket2::{Domain, Protocol, Socket, Type};

use super::table::Kind;

/// Delay before a datagram is sent again.
const AGAIN: Duration = Duration::from_millis(700);
/// Size of an echo request's header.
const ECHO_HEADER: usize = 8;

/// Opens a socket bound to `port` in the calling thread's namespace and, unless its kind is
/// [`Kind::Unconnected`], starts connecting it.
pub(super) fn open(kind: Kind, port: u16, destination: SocketAddr) -> io::Result<Socket> {
    let domain = Domain::for_address(destination);
    let (unspecified, icmp): (IpAddr, _) = match destination {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Protocol::ICMPV4),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), Protocol::ICMPV6),
    };
    let socket = match kind {
        Kind::Tcp => Socket::new(domain, Type::STREAM, None)?,
        Kind::Udp | Kind::Unconnected => Socket::new(domain, Type::DGRAM, None)?,
        Kind::Echo => Socket::new(domain, Type::DGRAM, Some(icmp))?,
    };
    socket.set_nonblocking(true)?;
    if kind != Kind::Echo {
        socket.set_reuse_address(true)?;
    }
    if destination.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&SocketAddr::new(unspecified, port).into())?;
    if kind == Kind::Unconnected {
        return Ok(socket);
    }
    match socket.connect(&destination.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::EINPROGRESS as i32) => Ok(socket),
        connected => connected.map(|()| socket),
    }
}

/// A flow of a pair.
pub(super) struct Flow {
    socket: Arc<Socket>,
    kind: Kind,
    destination: SocketAddr,
    /// Prefix of all requests of the flow.
    prefix: String,
    /// Makes each request unique.
    asked: u32,
    question: String,
    sent_at: Option<Instant>,
    is_answered: bool,
    /// Bytes of an incomplete line.
    line: Vec<u8>,
}

impl Flow {
    pub(super) fn new(
        socket: Arc<Socket>,
        kind: Kind,
        destination: SocketAddr,
        port: u16,
        index: usize,
    ) -> Self {
        Self {
            socket,
            kind,
            destination,
            prefix: format!("{port}-{index}"),
            asked: 0,
            question: String::new(),
            sent_at: None,
            is_answered: true,
            line: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> Arc<Socket> {
        self.socket.clone()
    }

    pub(super) fn destination(&self) -> SocketAddr {
        self.destination
    }

    pub(super) fn question(&self) -> &str {
        &self.question
    }

    pub(super) fn is_answered(&self) -> bool {
        self.is_answered
    }

    pub(super) fn set_answered(&mut self) {
        self.is_answered = true;
    }

    /// Sets the request to send next.
    pub(super) fn prepare(&mut self, question: &str) {
        question.clone_into(&mut self.question);
        (self.sent_at, self.is_answered) = (None, false);
    }

    /// Sets a new request that was not sent before.
    pub(super) fn prepare_next(&mut self) {
        self.asked += 1;
        self.prepare(&format!("{}-{}", self.prefix, self.asked));
    }

    /// Sends the request, unless it is already on its way.
    pub(super) fn send(&mut self) -> io::Result<()> {
        let is_due = match self.sent_at {
            None => true,
            // The first datagram may wait for neighbour resolution.
            Some(at) => self.kind != Kind::Tcp && at.elapsed() > AGAIN,
        };
        if self.is_answered || !is_due {
            return Ok(());
        }
        let sent = match self.kind {
            Kind::Tcp => self.socket.send(format!("{}\n", self.question).as_bytes()),
            Kind::Udp => self.socket.send(self.question.as_bytes()),
            Kind::Unconnected => {
                let to = self.destination.into();
                self.socket.send_to(self.question.as_bytes(), &to)
            }
            Kind::Echo => self.socket.send(&self.echo_request()),
        };
        match sent {
            Ok(_) => self.sent_at = Some(Instant::now()),
            // The socket is not connected yet.
            Err(error) if is_early(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Builds an echo request; the kernel fills in its checksum and identifier.
    fn echo_request(&self) -> Vec<u8> {
        let kind = if self.destination.is_ipv4() { 8 } else { 128 };
        let mut request = vec![kind, 0, 0, 0, 0, 0, 0, self.asked as u8];
        request.extend_from_slice(self.question.as_bytes());
        request
    }

    /// Returns the next reply without its line ending, and its source.
    pub(super) fn receive(&mut self) -> io::Result<Option<(String, SocketAddr)>> {
        if self.kind == Kind::Tcp {
            return Ok(self.receive_line()?.map(|line| (line, self.destination)));
        }
        let mut buffer = [0; 512];
        let received = recvfrom::<SockaddrStorage>(self.socket.as_raw_fd(), &mut buffer);
        let (length, from) = match received.map_err(io::Error::from) {
            Err(error) if is_early(&error) => return Ok(None),
            received => received?,
        };
        let mut from = from
            .as_ref()
            .and_then(socket_addr)
            .ok_or(ErrorKind::InvalidData)?;
        let bytes = &buffer[..length];
        let text = match self.kind {
            Kind::Echo => {
                // Echo replies have no ports.
                from.set_port(self.destination.port());
                bytes.get(ECHO_HEADER..).unwrap_or_default()
            }
            _ => bytes,
        };
        Ok(Some((String::from_utf8_lossy(text).into_owned(), from)))
    }

    fn receive_line(&mut self) -> io::Result<Option<String>> {
        let mut byte = [0];
        loop {
            match (&*self.socket).read(&mut byte) {
                Ok(0) => return Err(io::Error::other("the connection was closed")),
                Ok(_) if byte == *b"\n" => {
                    let line = String::from_utf8_lossy(&self.line).into_owned();
                    self.line.clear();
                    return Ok(Some(line));
                }
                Ok(_) => self.line.extend(byte),
                Err(error) if is_early(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the server has closed the connection.
    pub(super) fn is_over(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 512];
        match (&*self.socket).read(&mut buffer) {
            Ok(0) => Ok(true),
            Ok(_) => Ok(false),
            Err(error) if is_early(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes the connection end with a reset when its socket is closed.
    pub(super) fn reset(&self) {
        if self.kind == Kind::Tcp {
            // A connection that is already over needs no reset.
            let _ = self.socket.set_linger(Some(Duration::ZERO));
        }
    }
}

fn socket_addr(from: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = from.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| Some(SocketAddr::V6((*from.as_sockaddr_in6()?).into())))
}

/// Whether a call failed only because it is too early, and should be repeated later.
fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::NotConnected
    )
}
