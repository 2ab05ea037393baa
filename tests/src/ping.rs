//! Single echo requests, and consecutive runs of `ping` while something happens, with their summaries.

use std::io::{self, ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_net::netns::NetNs;
use socket2::{Domain, Protocol, Socket, Type};

use crate::bed::command_in;
use crate::packet::checksum;
use crate::process::run;
use crate::wait::slowness;

/// How long to wait for the reply to a single request.
const REPLY: Duration = Duration::from_secs(1);

/// No reply came, or the kernel reports that none will.
const WITHOUT_REPLY: [ErrorKind; 7] = [
    ErrorKind::WouldBlock,
    ErrorKind::TimedOut,
    ErrorKind::ConnectionRefused,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::AddrNotAvailable,
    ErrorKind::PermissionDenied,
];

/// Whether an echo request from a named network namespace is answered within a second. It spawns no process: some
/// tests send hundreds at once.
pub fn is_answered(netns: &str, address: IpAddr) -> anyhow::Result<bool> {
    match NetNs::open(netns)?.run_in(|| echo(address))? {
        Ok(()) => Ok(true),
        Err(error) if WITHOUT_REPLY.contains(&error.kind()) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot send an echo to {address}")),
    }
}

/// Sends an echo request (RFC 792, RFC 4443) and waits for its reply.
fn echo(address: IpAddr) -> io::Result<()> {
    let (domain, protocol, kind, kind_of_reply) = match address {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let mut socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.connect(&SocketAddr::new(address, 0).into())?;
    let mut request = [kind, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    // Its identifier, and a number that distinguishes it from all other requests.
    request[4..6].copy_from_slice(&fastrand::u16(..).to_be_bytes());
    request[8..].copy_from_slice(&fastrand::u64(..).to_be_bytes());
    // For ICMPv6, whose checksum also covers addresses, the kernel fills it in.
    let sum = checksum(&[&request]).to_be_bytes();
    request[2..4].copy_from_slice(&sum);
    socket.send(&request)?;
    let deadline = Instant::now() + REPLY;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let mut packet = [0; 256];
        let length = socket.read(&mut packet)?;
        // IPv4 sockets return the IP header too.
        let header = match address {
            IpAddr::V4(_) => usize::from(packet[0] & 0xf) * 4,
            IpAddr::V6(_) => 0,
        };
        let reply = packet[..length].get(header..).unwrap_or_default();
        if reply.first() == Some(&kind_of_reply) && reply.get(4..) == Some(&request[4..]) {
            return Ok(());
        }
    }
}

/// Parameters of each run of `ping`.
#[derive(Clone, Copy, Debug)]
pub struct Runs {
    /// Milliseconds between requests. Grows with the square of the machine's slowness: a slow machine does everything
    /// that many times more slowly, and each request keeps it busy that many times longer.
    pub interval: u32,
    /// How long to send requests, milliseconds.
    pub length: u32,
    /// How long to wait for the last replies, seconds.
    pub patience: u32,
}

impl Runs {
    /// A thousand requests a second where the machine is fast enough, and none is given up early.
    pub const fn dense(length: u32) -> Self {
        Self {
            interval: 1,
            length,
            patience: 10,
        }
    }
}

/// Echo requests to an address, in consecutive runs. Stopping lets the current run finish, so none is cut off.
#[derive(Debug)]
pub struct Pinging {
    ends: Ends,
    runs: JoinHandle<anyhow::Result<Summary>>,
}

/// Prevents further runs once it is dropped, for example when a test fails.
#[derive(Debug)]
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Pinging {
    /// Starts in a named network namespace.
    pub fn start(netns: &str, to: IpAddr, runs: Runs) -> Self {
        let Runs {
            interval,
            length,
            patience,
        } = runs;
        let interval = interval * slowness().pow(2);
        let count = (length / interval).max(1);
        let interval = f64::from(interval) / 1e3;
        let words = format!("-n -q -i {interval} -c {count} -W {patience} {to}");
        let ends = Ends(Arc::new(AtomicBool::new(false)));
        let (netns, may_end) = (netns.to_owned(), ends.0.clone());
        let runs = thread::spawn(move || {
            let mut sum = Summary {
                transmitted: 0,
                received: 0,
            };
            while !may_end.load(Ordering::Relaxed) {
                let ran = run(command_in(&netns, "ping").args(words.split(' ')))?;
                let one = Summary::parse(&ran.stdout)?;
                sum.transmitted += one.transmitted;
                sum.received += one.received;
            }
            Ok(sum)
        });
        Self { ends, runs }
    }

    /// Lets the current run finish, and adds up all runs.
    pub fn end(self) -> anyhow::Result<Summary> {
        let Self { ends, runs } = self;
        drop(ends);
        runs.join()
            .map_err(|_| anyhow::anyhow!("the thread panicked"))?
    }
}

/// The summary of one run of `ping`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Echo requests sent.
    pub transmitted: u64,
    /// Replies.
    pub received: u64,
}

impl Summary {
    /// Finds the line `N packets transmitted, M received, ...`.
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

    /// Requests without a reply.
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
