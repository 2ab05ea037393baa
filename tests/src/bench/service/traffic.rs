//! What a client does, and how fast.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_net::netns::NetNs;
use socket2::SockRef;

use super::server::{BACKLOG, Server, run_on};
use crate::bench::parts::median;
use crate::bench::requests::quantile;
use crate::{PATIENCE, slowness};

/// Connections of a round: fewer than a client has ports; and how many of them wait at a time to be taken.
const CONNECTIONS: usize = 10_000;
const WAITING: usize = 2_000;
const _: () = assert!(WAITING < BACKLOG && CONNECTIONS.is_multiple_of(WAITING));
/// Datagrams of one flow in a round.
const DATAGRAMS: u32 = 100_000;
/// Requests on one connection in a round.
const REQUESTS: u32 = 10_000;
/// How many times less of each is done on a machine without a processor of its own.
const FEWER_WHEN_SLOW: u32 = 10;
/// Whether anybody answers at all is known after this time.
const SOON: Duration = Duration::from_secs(2);

/// Where a client sends, by what it does.
pub(super) struct Targets {
    /// Where it connects; in turns.
    pub(super) connect: Vec<SocketAddr>,
    pub(super) datagrams: SocketAddr,
    pub(super) echo: SocketAddr,
}

/// What rounds of one client found.
#[derive(Default)]
pub(super) struct Rates {
    /// What `connect` took.
    connects: Vec<Duration>,
    /// A second, by round.
    connections: Vec<f64>,
    datagrams: Vec<f64>,
    requests: Vec<f64>,
}

impl Targets {
    /// Whether connections from this namespace come about.
    pub(super) fn are_served(&self, client: &NetNs) -> anyhow::Result<bool> {
        let target = self.connect.first().context("no target")?;
        let connected = client.run_in(|| TcpStream::connect_timeout(target, SOON))?;
        Ok(connected.is_ok())
    }

    /// One round of everything, from this namespace on this processor to these servers; without `into`, to warm up.
    pub(super) fn run(
        &self,
        client: &NetNs,
        cpu: usize,
        servers: &[Server],
        into: Option<&mut Rates>,
    ) -> anyhow::Result<()> {
        let mut round = Rates::default();
        client.run_in(|| {
            run_on(cpu)?;
            self.connect(servers, &mut round)?;
            self.send(&mut round)?;
            self.ask(&mut round)
        })??;
        if let Some(into) = into {
            into.connects.extend(round.connects);
            into.connections.extend(round.connections);
            into.datagrams.extend(round.datagrams);
            into.requests.extend(round.requests);
        }
        Ok(())
    }

    fn connect(&self, servers: &[Server], round: &mut Rates) -> anyhow::Result<()> {
        let mut targets = self.connect.iter().cycle();
        let mut took = Duration::ZERO;
        let waiting = WAITING / fewer() as usize;
        for _ in 0..CONNECTIONS / WAITING {
            let start = Instant::now();
            for target in targets.by_ref().take(waiting) {
                let begun = Instant::now();
                let stream = TcpStream::connect(target)
                    .with_context(|| format!("cannot connect to {target}"))?;
                round.connects.push(begun.elapsed());
                // Closed by a reset, so that no port waits for a minute.
                SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
            }
            took += start.elapsed();
            servers.iter().try_for_each(Server::drain)?;
        }
        round
            .connections
            .push(round.connects.len() as f64 / took.as_secs_f64());
        Ok(())
    }

    fn send(&self, round: &mut Rates) -> anyhow::Result<()> {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect(self.datagrams)?;
        socket.send(&[0; 18])?;
        let start = Instant::now();
        let count = DATAGRAMS / fewer();
        for _ in 0..count {
            socket.send(&[0; 18])?;
        }
        round.datagrams.push(rate(count, start));
        Ok(())
    }

    fn ask(&self, round: &mut Rates) -> anyhow::Result<()> {
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
        round.requests.push(rate(count, start));
        Ok(())
    }
}

/// Medians of all rounds, and what `connect` took in all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Medians {
    pub(super) connect_p50_us: f64,
    pub(super) connect_p99_us: f64,
    pub(super) connections: f64,
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
            datagrams: median(self.datagrams)?,
            requests: median(self.requests)?,
        })
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
