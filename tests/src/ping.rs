//! Echo requests: single ones, and a dense sequence while something happens.

use std::io::{self, ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_net::netns::NetNs;
use nix::poll::{PollFd, PollFlags, ppoll};
use socket2::{Domain, Protocol, Socket, Type};

use crate::packet::checksum;
use crate::wait::slowness;

/// How long to wait for the reply to a single request.
const REPLY: Duration = Duration::from_secs(1);

/// Errors that mean that no reply came or that the kernel reports that none will come.
const WITHOUT_REPLY: [ErrorKind; 7] = [
    ErrorKind::WouldBlock,
    ErrorKind::TimedOut,
    ErrorKind::ConnectionRefused,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::AddrNotAvailable,
    ErrorKind::PermissionDenied,
];

/// Whether an echo request from a named network namespace is answered within a second. Spawns no process, as some tests
/// send hundreds of requests at once.
pub fn is_answered(netns: &str, address: IpAddr) -> anyhow::Result<bool> {
    let answered = NetNs::open(netns)?.run_in(|| echo(address))?;
    let answered = unless_unreachable(answered);
    Ok(answered
        .with_context(|| format!("cannot send an echo to {address}"))?
        .is_some())
}

/// Sends one echo request after the other to an address.
#[derive(Debug)]
pub struct Echoing(EchoSocket);

impl Echoing {
    /// Opens a socket in a named network namespace.
    pub fn start(netns: &str, address: IpAddr) -> anyhow::Result<Self> {
        let socket = NetNs::open(netns)?.run_in(|| EchoSocket::connect(address))?;
        socket
            .map(Self)
            .with_context(|| format!("cannot send echoes to {address}"))
    }

    /// Sends a request, and waits this long for its reply. Returns whether it came.
    pub fn is_answered(&mut self, patience: Duration) -> anyhow::Result<bool> {
        let deadline = Instant::now() + patience;
        let body = fastrand::u64(..);
        unless_unreachable(self.0.send(fastrand::u16(..), body))?;
        while let Some(Some(answered)) = unless_unreachable(self.0.reply(deadline))? {
            if answered == body {
                return Ok(true);
            }
        }
        // An error came at once: the next request waits as long as if there were none.
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        Ok(false)
    }
}

/// Sends an echo request and waits for its reply.
fn echo(address: IpAddr) -> io::Result<()> {
    let mut socket = EchoSocket::connect(address)?;
    let body = fastrand::u64(..);
    socket.send(fastrand::u16(..), body)?;
    let deadline = Instant::now() + REPLY;
    while let Some(answered) = socket.reply(deadline)? {
        if answered == body {
            return Ok(());
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// A raw socket for exchanging echoes with one address (RFC 792, RFC 4443).
#[derive(Debug)]
struct EchoSocket {
    socket: Socket,
    address: IpAddr,
}

impl EchoSocket {
    const HEADER_LEN: usize = 8;

    fn connect(address: IpAddr) -> io::Result<Self> {
        let (domain, protocol) = match address {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
        socket.set_nonblocking(true)?;
        socket.connect(&SocketAddr::new(address, 0).into())?;
        Ok(Self { socket, address })
    }

    /// Sends a request with this identifier. The reply has the same body.
    fn send(&mut self, id: u16, body: u64) -> io::Result<()> {
        let kind = if self.address.is_ipv4() { 8 } else { 128 };
        let mut request = [0; Self::HEADER_LEN + size_of::<u64>()];
        request[0] = kind;
        request[4..6].copy_from_slice(&id.to_be_bytes());
        request[Self::HEADER_LEN..].copy_from_slice(&body.to_be_bytes());
        // The kernel fills in the ICMPv6 checksum, which also covers the addresses.
        let sum = checksum(&[&request]).to_be_bytes();
        request[2..4].copy_from_slice(&sum);
        self.socket.send(&request).map(|_| ())
    }

    /// Returns the body of the next reply, no matter who sent the request, or `None` if there is no reply before the
    /// deadline.
    fn reply(&mut self, deadline: Instant) -> io::Result<Option<u64>> {
        let kind = if self.address.is_ipv4() { 0 } else { 129 };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if ppoll(&mut ready, Some(left.into()), None)? == 0 {
                return Ok(None);
            }
            let mut packet = [0; 256];
            let length = match self.socket.read(&mut packet) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                length => length?,
            };
            // Raw IPv4 sockets return the IP header too.
            let header = match self.address {
                IpAddr::V4(_) => usize::from(packet[0] & 0xf) * 4,
                IpAddr::V6(_) => 0,
            };
            let message = packet[..length].get(header..).unwrap_or_default();
            let body = message.get(Self::HEADER_LEN..).map(<[u8; 8]>::try_from);
            if let (Some(&first), Some(Ok(body))) = (message.first(), body)
                && first == kind
            {
                return Ok(Some(u64::from_be_bytes(body)));
            }
        }
    }
}

/// How often to send echoes. A `ping` process that sends one per millisecond keeps a CPU busy.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Milliseconds between requests on a fast machine, multiplied by the square of the machine's slowness: a slow
    /// machine takes that many times longer for everything, including each request.
    pub interval: u32,
    /// Number of consecutive requests with the same identifier, which belong to the same flow.
    pub flow: usize,
    /// How long to wait for the last replies.
    pub patience: Duration,
}

impl Pace {
    /// A thousand requests per second on a fast machine, with a long wait for the last replies.
    pub const DENSE: Self = Self {
        interval: 1,
        flow: 1_500,
        patience: Duration::from_secs(10),
    };
}

/// A running sequence of echo requests to an address.
#[derive(Debug)]
pub struct Pinging {
    ends: Ends,
    thread: JoinHandle<anyhow::Result<Summary>>,
}

/// Stops further requests when dropped, for example when a test fails.
#[derive(Debug)]
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Pinging {
    /// Starts sending from a named network namespace.
    pub fn start(netns: &str, to: IpAddr, pace: Pace) -> Self {
        let ends = Ends(Arc::new(AtomicBool::new(false)));
        let (netns, may_end) = (netns.to_owned(), ends.0.clone());
        let thread = thread::spawn(move || {
            let mut socket = NetNs::open(&netns)?.run_in(|| EchoSocket::connect(to))??;
            ping(&mut socket, pace, &may_end)
                .with_context(|| format!("cannot exchange echoes with {to}"))
        });
        Self { ends, thread }
    }

    /// Stops sending and waits for the last replies.
    pub fn end(self) -> anyhow::Result<Summary> {
        let Self { ends, thread } = self;
        drop(ends);
        thread
            .join()
            .map_err(|_| anyhow::anyhow!("the thread panicked"))?
    }
}

/// Sends echoes until `may_end` is true, then waits for the outstanding replies.
fn ping(socket: &mut EchoSocket, pace: Pace, may_end: &AtomicBool) -> io::Result<Summary> {
    let interval = Duration::from_millis(u64::from(pace.interval * slowness().pow(2)));
    let mut echoes = Echoes {
        token: fastrand::u32(..),
        answered: Vec::new(),
        received: 0,
    };
    let mut id = 0;
    let mut next = Instant::now();
    while !may_end.load(Ordering::Relaxed) {
        if echoes.answered.len().is_multiple_of(pace.flow) {
            id = fastrand::u16(..);
        }
        unless_unreachable(socket.send(id, echoes.next()))?;
        next = (next + interval).max(Instant::now());
        while echoes.hear(socket, next)? {}
    }
    let deadline = Instant::now() + pace.patience;
    while echoes.received < echoes.answered.len() as u64 && echoes.hear(socket, deadline)? {}
    Ok(Summary {
        transmitted: echoes.answered.len() as u64,
        received: echoes.received,
    })
}

/// The requests sent so far, and which of them were answered.
struct Echoes {
    /// Distinguishes these requests from all others.
    token: u32,
    /// Whether each request was answered, by its number.
    answered: Vec<bool>,
    /// Number of answered requests.
    received: u64,
}

impl Echoes {
    /// The body of the next request.
    fn next(&mut self) -> u64 {
        let number = self.answered.len() as u64;
        self.answered.push(false);
        u64::from(self.token) << 32 | number
    }

    /// Receives a reply and marks its request as answered. Returns false if none arrives before the deadline.
    fn hear(&mut self, socket: &mut EchoSocket, deadline: Instant) -> io::Result<bool> {
        let body = match unless_unreachable(socket.reply(deadline))? {
            None => return Ok(true),
            Some(None) => return Ok(false),
            Some(Some(body)) => body,
        };
        let number = (body & u64::from(u32::MAX)) as usize;
        let its = self.answered.get_mut(number);
        if let Some(answered) = its.filter(|_| body >> 32 == u64::from(self.token)) {
            self.received += u64::from(!*answered);
            *answered = true;
        }
        Ok(true)
    }
}

/// `None` if the kernel reports that a request will not be answered.
fn unless_unreachable<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if WITHOUT_REPLY.contains(&error.kind()) => Ok(None),
        result => result.map(Some),
    }
}

/// How many echoes were sent and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Echo requests sent.
    pub transmitted: u64,
    /// Replies received.
    pub received: u64,
}

impl Summary {
    /// Parses the line `N packets transmitted, M received, ...` in the output of `ping`.
    pub fn parse(output: &str) -> anyhow::Result<Self> {
        let line = output
            .lines()
            .find(|line| line.contains(" packets transmitted, "))
            .with_context(|| format!("no summary in the output of ping: {output}"))?;
        let count = |what: &str| {
            line.split(", ")
                .find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
                .with_context(|| format!("no number {what} in: {line}"))
        };
        Ok(Self {
            transmitted: count("packets transmitted")?,
            received: count("received")?,
        })
    }

    /// Number of requests without a reply.
    pub fn lost(&self) -> u64 {
        self.transmitted.saturating_sub(self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::Summary;

    #[test]
    fn a_summary_is_found() {
        let output = "PING 10.244.1.7 (10.244.1.7) 56(84) bytes of data.\n.\n\
                      --- 10.244.1.7 ping statistics ---\n\
                      1000 packets transmitted, 998 received, +1 errors, 0.2% packet loss, time 9ms\n";
        let summary = Summary::parse(output).unwrap();
        assert_eq!((summary.transmitted, summary.received), (1000, 998));
        assert_eq!(summary.lost(), 2);
        assert!(Summary::parse("ping: unknown host").is_err());
    }
}
