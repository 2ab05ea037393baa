//! Generates a client's traffic and measures its rate.

use std::io::{IoSlice, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use health_net::netns::NetNs;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, sendmmsg};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::server::{BACKLOG, Server, run_on};
use crate::bench::parts::median;
use crate::bench::requests::quantile;
use crate::conntrack::script::SYN;
use crate::packet::{Ipv4, Tcp};
use crate::{PATIENCE, slowness};

/// Number of connections per round, which is below the number of a client's ports, and number of connections that wait
/// to be accepted at a time.
const CONNECTIONS: usize = 10_000;
const WAITING: usize = 2_000;
const _: () = assert!(WAITING < BACKLOG && CONNECTIONS.is_multiple_of(WAITING));
/// Number of datagrams of one flow per round.
const DATAGRAMS: u32 = 100_000;
/// Number of SYNs per round, each from a different source port outside the kernel's ephemeral range; the first port;
/// and the number of SYNs per system call.
const FLOWS: u32 = 30_000;
const FIRST_PORT: u16 = 1_024;
const AT_ONCE: usize = 64;
/// Fraction of the SYNs that must arrive for the rate to be valid.
const ARRIVING: f64 = 0.99;
const IP_PROTOCOL_TCP: u8 = 6;
/// Number of requests on one connection per round.
const REQUESTS: u32 = 10_000;
/// Divisor for all counts on a slow machine.
const FEWER_WHEN_SLOW: u32 = 10;
/// Time after which it is certain whether anything answers.
const SOON: Duration = Duration::from_secs(2);

/// A client's destinations by type of traffic.
pub(super) struct Targets {
    /// Targets of connections, which are used in turn.
    pub(super) connect: Vec<SocketAddr>,
    pub(super) datagrams: SocketAddr,
    pub(super) echo: SocketAddr,
}

/// Types of traffic.
#[derive(Clone, Copy, Debug)]
pub(super) enum Traffic {
    /// TCP connections, one after another.
    Connections,
    /// Unanswered SYNs, each of which starts a different flow.
    Flows,
    /// Datagrams of one flow.
    Datagrams,
    /// Requests on one connection.
    Requests,
}

impl Traffic {
    pub(super) const ALL: [Self; 4] = [
        Self::Connections,
        Self::Flows,
        Self::Datagrams,
        Self::Requests,
    ];
}

/// Results of a client's rounds.
#[derive(Default)]
pub(super) struct Rates {
    /// Durations of `connect`.
    connects: Vec<Duration>,
    /// Rates per second, one per round.
    connections: Vec<f64>,
    flows: Vec<f64>,
    datagrams: Vec<f64>,
    requests: Vec<f64>,
}

impl Targets {
    /// Whether connections from this namespace succeed.
    pub(super) fn are_served(&self, client: &NetNs) -> anyhow::Result<bool> {
        let target = self.connect.first().context("no target")?;
        let connected = client.run_in(|| TcpStream::connect_timeout(target, SOON))?;
        Ok(connected.is_ok())
    }

    /// Runs a round of one type of traffic, from this namespace on this CPU to these servers.
    pub(super) fn run(
        &self,
        what: Traffic,
        client: &NetNs,
        cpu: usize,
        servers: &[Server],
        rates: &mut Rates,
    ) -> anyhow::Result<()> {
        client.run_in(|| {
            run_on(cpu)?;
            match what {
                Traffic::Connections => self.connect(servers, rates),
                Traffic::Flows => self.begin(servers, rates),
                Traffic::Datagrams => self.send(rates),
                Traffic::Requests => self.ask(rates),
            }
        })?
    }

    fn connect(&self, servers: &[Server], rates: &mut Rates) -> anyhow::Result<()> {
        let mut targets = self.connect.iter().cycle();
        let mut took = Duration::ZERO;
        let waiting = WAITING / fewer() as usize;
        let times = CONNECTIONS / WAITING;
        for _ in 0..times {
            let start = Instant::now();
            for target in targets.by_ref().take(waiting) {
                let begun = Instant::now();
                let stream = TcpStream::connect(target)
                    .with_context(|| format!("cannot connect to {target}"))?;
                rates.connects.push(begun.elapsed());
                // Closed with a reset, so that the port is not blocked for a minute (TIME_WAIT).
                SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
            }
            took += start.elapsed();
            servers.iter().try_for_each(Server::drain)?;
        }
        rates
            .connections
            .push((times * waiting) as f64 / took.as_secs_f64());
        Ok(())
    }

    /// Sends unanswered SYNs from a raw socket, to which whole packets are passed to minimise overhead. Only the SYNs
    /// that arrive are counted.
    fn begin(&self, servers: &[Server], rates: &mut Rates) -> anyhow::Result<()> {
        let count = FLOWS / fewer();
        let syns = self.syns(count)?;
        let raw = Protocol::from(libc::IPPROTO_RAW);
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(raw))?;
        let delivered = || -> anyhow::Result<u64> { servers.iter().map(Server::delivered).sum() };
        servers
            .iter()
            .try_for_each(|server| server.set_deaf(true))?;
        let before = delivered()?;
        let start = Instant::now();
        for syns in syns.chunks(AT_ONCE) {
            let slices: Vec<_> = syns.iter().map(|(_, it)| [IoSlice::new(it)]).collect();
            let targets: Vec<_> = syns.iter().map(|(target, _)| Some(*target)).collect();
            let mut headers = MultiHeaders::preallocate(syns.len(), None);
            let sent = sendmmsg(
                socket.as_raw_fd(),
                &mut headers,
                &slices,
                &targets,
                [],
                MsgFlags::empty(),
            )?;
            ensure!(sent.count() == syns.len(), "a packet was not sent");
        }
        let took = start.elapsed();
        let arrived = delivered()? - before;
        servers
            .iter()
            .try_for_each(|server| server.set_deaf(false))?;
        ensure!(
            arrived as f64 >= f64::from(count) * ARRIVING,
            "{arrived} of {count} SYNs arrived"
        );
        rates.flows.push(arrived as f64 / took.as_secs_f64());
        Ok(())
    }

    /// Builds this many SYNs, each from a different port, with their destinations.
    fn syns(&self, count: u32) -> anyhow::Result<Vec<(SockaddrStorage, Vec<u8>)>> {
        let first = *self.connect.first().context("no target")?;
        let source = own_address(first)?;
        let syn = |(number, target): (u32, &SocketAddr)| {
            let SocketAddr::V4(target) = target else {
                bail!("{target} is not an IPv4 address");
            };
            let ports = ((u32::from(FIRST_PORT) + number).try_into()?, target.port());
            let ip = Ipv4 {
                protocol: IP_PROTOCOL_TCP,
                ..Ipv4::icmp(source, *target.ip())
            };
            let segment = Tcp::between(ports, SYN).segment(source.into(), (*target.ip()).into());
            let to = SocketAddr::from((*target.ip(), 0));
            Ok((SockaddrStorage::from(to), ip.packet(&segment)))
        };
        let targets = self.connect.iter().cycle();
        (0..count).zip(targets).map(syn).collect()
    }

    fn send(&self, rates: &mut Rates) -> anyhow::Result<()> {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect(self.datagrams)?;
        socket.send(&[0; 18])?;
        let start = Instant::now();
        let count = DATAGRAMS / fewer();
        for _ in 0..count {
            socket.send(&[0; 18])?;
        }
        rates.datagrams.push(rate(count, start));
        Ok(())
    }

    fn ask(&self, rates: &mut Rates) -> anyhow::Result<()> {
        let mut stream = TcpStream::connect(self.echo)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let start = Instant::now();
        let count = REQUESTS / fewer();
        for _ in 0..count {
            let mut byte = [1];
            stream.write_all(&byte)?;
            stream.read_exact(&mut byte)?;
        }
        rates.requests.push(rate(count, start));
        Ok(())
    }
}

/// Medians over all rounds, and percentiles of `connect` over all rounds together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Medians {
    pub(super) connect_p50_us: f64,
    pub(super) connect_p99_us: f64,
    pub(super) connections: f64,
    pub(super) flows: f64,
    pub(super) datagrams: f64,
    pub(super) requests: f64,
}

impl Rates {
    pub(super) fn medians(mut self) -> anyhow::Result<Medians> {
        self.connects.sort_unstable();
        let us = |part| anyhow::Ok(quantile(&self.connects, part)?.as_secs_f64() * 1e6);
        Ok(Medians {
            connect_p50_us: us(0.5)?,
            connect_p99_us: us(0.99)?,
            connections: median(self.connections)?,
            flows: median(self.flows)?,
            datagrams: median(self.datagrams)?,
            requests: median(self.requests)?,
        })
    }
}

/// The source address of packets to this target.
fn own_address(target: SocketAddr) -> anyhow::Result<Ipv4Addr> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(target)?;
    match socket.local_addr()?.ip() {
        IpAddr::V4(address) => Ok(address),
        IpAddr::V6(address) => bail!("packets to {target} leave from {address}"),
    }
}

fn fewer() -> u32 {
    match slowness() {
        1 => 1,
        _ => FEWER_WHEN_SLOW,
    }
}

fn rate(count: u32, start: Instant) -> f64 {
    f64::from(count) / start.elapsed().as_secs_f64()
}
