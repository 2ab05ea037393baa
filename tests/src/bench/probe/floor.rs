//! The floor: one thread that performs the same exchanges with only the necessary system calls.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_net::tcp::forget_after_fin;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use nix::time::{ClockId, clock_gettime};
use socket2::SockRef;

use super::Mechanism;
use super::targets::{grpc_request, is_grpc_answer};
use crate::Node;

/// Exchanges that become due within this time start together.
const TURN: Duration = Duration::from_millis(1);
/// The request of the agent's prober (see `health-probe`), apart from a few bytes.
const HTTP_REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: 10.99.0.1:8080\r\nUser-Agent: kube-probe/1.35\r\nAccept: */*\r\nConnection: close\r\n\r\n";
/// Maximum number of exchanges in progress. On a busy machine, further exchanges wait, as they do in the agent.
const UNDER_WAY_MAX: u32 = 4096;
/// Maximum size of a target's response in bytes.
const ANSWER_MAX: usize = 512;

/// CPU time per probe of the floor in us: at this rate, for this time, alternating between all mechanisms, to this many
/// addresses.
pub(super) fn cost(
    node: &Node,
    addresses: u32,
    per_second: f64,
    window: Duration,
) -> anyhow::Result<f64> {
    node.run_in(|| {
        let thread = thread::spawn(move || exchange(addresses, per_second, window));
        thread
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the reference panicked")))
    })?
}

/// A connection in progress.
struct Exchange {
    mechanism: Mechanism,
    stream: TcpStream,
    is_connected: bool,
    answer: Vec<u8>,
}

fn exchange(addresses: u32, per_second: f64, window: Duration) -> anyhow::Result<f64> {
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    // Indexed by file descriptor.
    let mut exchanges: Vec<Option<Exchange>> = Vec::new();
    let (mut begun, mut ended) = (0_u32, 0_u32);
    let cpu = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let used = cpu()?;
    let start = Instant::now();
    loop {
        let elapsed = start.elapsed();
        let is_over = elapsed >= window;
        if is_over && begun == ended {
            break;
        }
        ensure!(
            elapsed < window + super::PATIENCE,
            "{} of {begun} exchanges did not finish",
            begun - ended
        );
        let due = if is_over {
            begun
        } else {
            (elapsed.as_secs_f64() * per_second) as u32
        };
        while begun < due && begun - ended < UNDER_WAY_MAX {
            let exchange = Exchange::begin(begun, addresses)?;
            let fd = usize::try_from(exchange.stream.as_raw_fd())?;
            if exchanges.len() <= fd {
                exchanges.resize_with(fd + 1, || None);
            }
            let known = exchanges[fd].insert(exchange);
            let interests = Interest::READABLE | Interest::WRITABLE;
            poll.registry()
                .register(&mut known.stream, Token(fd), interests)?;
            begun += 1;
        }
        match poll.poll(&mut events, Some(TURN)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            let Some(place) = exchanges.get_mut(event.token().0) else {
                continue;
            };
            if let Some(exchange) = place
                && exchange.go_on()?
            {
                *place = None;
                ended += 1;
            }
        }
    }
    let used = cpu()? - used;
    Ok(used.as_secs_f64() * 1e6 / f64::from(ended))
}

impl Exchange {
    fn begin(number: u32, addresses: u32) -> anyhow::Result<Self> {
        let mechanism = Mechanism::ALL[number as usize % Mechanism::ALL.len()];
        let [_, _, high, low] = (number % addresses).to_be_bytes();
        let address = SocketAddr::from((Ipv4Addr::new(10, 99, high, low), mechanism.port()));
        let stream = TcpStream::connect(address).with_context(|| address.to_string())?;
        Ok(Self {
            mechanism,
            stream,
            is_connected: false,
            answer: Vec::new(),
        })
    }

    /// Does as much as possible without blocking. Returns whether the exchange is complete.
    fn go_on(&mut self) -> anyhow::Result<bool> {
        if !self.is_connected {
            if let Some(error) = self.stream.take_error()? {
                return Err(error.into());
            }
            self.is_connected = true;
            match self.mechanism {
                Mechanism::Http => {
                    SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))?;
                    self.stream.write_all(HTTP_REQUEST)?;
                }
                Mechanism::Tcp => {
                    forget_after_fin(&self.stream)?;
                    return Ok(true);
                }
                Mechanism::Grpc => {
                    forget_after_fin(&self.stream)?;
                    self.stream.write_all(&grpc_request())?;
                }
            }
        }
        let mut buffer = [0; ANSWER_MAX];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(true),
                Ok(read) => self.answer.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.mechanism == Mechanism::Grpc && is_grpc_answer(&self.answer))
    }
}
