//! Opens the flows of many pairs in parallel, and checks who answers them.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tests::slowness;

use super::flow::{Flow, open};
use super::server::{BYE, CLOSE, STILL};
use super::side::{OUTSIDE, Side, name};
use super::table::{Client, Kind, Pair, State, Way};

/// How long to wait for the flows of pairs that may fail.
pub(super) const SOON: Duration = Duration::from_secs(3);
/// Polling interval.
const PAUSE: Duration = Duration::from_millis(5);
/// Number of pairs open at a time.
const BATCH: usize = 400;

/// Opens each pair from its own port. Returns the pairs that failed, with the reasons.
pub(super) fn run(
    side: &Side,
    pairs: &[Pair],
    patience: Duration,
) -> anyhow::Result<BTreeMap<Pair, String>> {
    let mut failed = BTreeMap::new();
    for some in pairs.chunks(BATCH) {
        let mut batch = Batch {
            side,
            open: some.iter().copied().map(Open::new).collect(),
            patience: patience * slowness(),
        };
        batch.run()?;
        for open in batch.open {
            if let Some(error) = open.failed {
                failed.insert(open.pair, error);
            }
        }
    }
    Ok(failed)
}

/// Number of ports that pairs have used, by protocol and IP version.
static PORTS: [AtomicU16; 6] = [const { AtomicU16::new(0) }; 6];

/// The next port for a kind of pair, so that no pair meets the remains of another. Most of these ports are in the range
/// from which agents choose ports for translated flows.
fn next_port(pair: &Pair) -> u16 {
    let protocol = match pair.kind {
        Kind::Tcp => 0,
        Kind::Udp | Kind::Unconnected => 2,
        Kind::Echo => 4,
    };
    let count = PORTS[protocol + usize::from(pair.is_v4)].fetch_add(1, Ordering::Relaxed);
    match count % 4 {
        0 => 11_000 + count / 4 % 18_000,
        _ => 33_000 + count % 32_000,
    }
}

/// A pair whose flows are being opened.
struct Open {
    pair: Pair,
    port: u16,
    flows: [Option<Flow>; 2],
    failed: Option<String>,
    /// Whether the current step is done.
    is_done: bool,
}

impl Open {
    fn new(pair: Pair) -> Self {
        Self {
            pair,
            port: next_port(&pair),
            flows: [None, None],
            failed: None,
            is_done: false,
        }
    }

    /// Sends due requests, and reads replies until each of these flows has its own.
    fn ask(&mut self, asked: &[usize]) -> io::Result<bool> {
        for index in asked {
            if let Some(flow) = &mut self.flows[*index] {
                flow.send()?;
            }
        }
        for index in asked {
            // Anything after the reply, such as the end of the connection, is left to a later step.
            while self.is_waiting(*index)
                && let Some((text, from)) = self.receive(*index)?
            {
                self.judge(*index, &text, from)?;
            }
        }
        Ok(!asked.iter().any(|index| self.is_waiting(*index)))
    }

    fn is_waiting(&self, index: usize) -> bool {
        self.flows[index]
            .as_ref()
            .is_some_and(|flow| !flow.is_answered())
    }

    fn receive(&mut self, index: usize) -> io::Result<Option<(String, SocketAddr)>> {
        match &mut self.flows[index] {
            Some(flow) => flow.receive(),
            None => Ok(None),
        }
    }

    /// Checks a reply that arrived at a flow's socket.
    fn judge(&mut self, index: usize, text: &str, from: SocketAddr) -> io::Result<()> {
        let is_one_socket = self.pair.kind == Kind::Unconnected && self.pair.has_one_client();
        let name = match self.pair.flows[0].1 {
            Way::Outside => OUTSIDE,
            _ => name(self.pair.target),
        };
        for (of, flow) in self.flows.iter_mut().enumerate() {
            let Some(flow) = flow else {
                continue;
            };
            if flow.is_answered() || !text.ends_with(flow.question()) {
                continue;
            }
            let wanted = match self.pair.kind {
                Kind::Echo => flow.question().to_owned(),
                _ => format!("{name} {}", flow.question()),
            };
            if text != wanted {
                return Err(io::Error::other(format!("the answer is {text:?}")));
            }
            if of != index && !is_one_socket {
                return Err(io::Error::other("the answer comes to the other socket"));
            }
            if from != flow.destination() {
                let why = format!("{} was asked, {from} answers", flow.destination());
                return Err(io::Error::other(why));
            }
            flow.set_answered();
        }
        Ok(())
    }

    /// Reads what the server still sends on the first flow, whose client has closed its side.
    fn hear(&mut self) -> io::Result<bool> {
        while let Some((text, _)) = self.receive(0)? {
            if text.ends_with(STILL) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads pending data on the first flow, if its client has closed its side.
    fn drain(&mut self) -> io::Result<bool> {
        if self.pair.state == State::HalfClosed {
            while self.receive(0)?.is_some() {}
        }
        Ok(true)
    }

    /// Whether the server of the first flow has closed the connection.
    fn is_over(&mut self) -> io::Result<bool> {
        match &mut self.flows[0] {
            Some(flow) => flow.is_over(),
            None => Ok(true),
        }
    }
}

/// A batch of pairs. Each step runs for all of them before the next one starts.
struct Batch<'a> {
    side: &'a Side,
    open: Vec<Open>,
    patience: Duration,
}

impl Batch<'_> {
    fn run(&mut self) -> anyhow::Result<()> {
        self.open(0)?;
        self.ask("the first flow alone", &[0]);
        self.change_first();
        self.open(1)?;
        self.ask("the second flow", &[1]);
        // Data from before does not show that the flow is still alive.
        self.wait("the first flow beside the second", Open::drain);
        self.wait("the first flow beside the second", |open| {
            match open.pair.state {
                State::HalfClosed => open.hear(),
                _ => Ok(true),
            }
        });
        for (what, asked) in [
            ("the first flow beside the second", &[0][..]),
            ("the second flow again", &[1]),
            ("both flows at once", &[0, 1]),
        ] {
            self.ask_some(what, asked, |pair| match asked {
                [1] => true,
                _ => pair.state == State::Open,
            });
        }
        for open in &self.open {
            for flow in open.flows.iter().flatten() {
                flow.reset();
            }
        }
        Ok(())
    }

    /// Opens the sockets of one flow of each pair, in the namespaces of their clients.
    fn open(&mut self, index: usize) -> anyhow::Result<()> {
        for client in Client::ALL {
            let mut wanted = Vec::new();
            for (at, open) in self.open.iter_mut().enumerate() {
                let Open { pair, port, .. } = open;
                let (from, way) = pair.flows[index];
                if from != client || open.failed.is_some() {
                    continue;
                }
                let destination = self.side.destination(pair, way)?;
                let shares = pair.kind == Kind::Unconnected && pair.has_one_client();
                match &open.flows[0] {
                    Some(first) if index == 1 && shares => {
                        let socket = first.socket();
                        open.flows[1] = Some(Flow::new(socket, pair.kind, destination, *port, 1));
                    }
                    _ => wanted.push((at, pair.kind, *port, destination)),
                }
            }
            let sockets = self.side.namespace(client)?.run_in(|| {
                let opened = wanted.iter();
                let opened = opened.map(|(_, kind, port, to)| open(*kind, *port, *to));
                opened.collect::<Vec<_>>()
            })?;
            for ((at, kind, port, to), socket) in wanted.into_iter().zip(sockets) {
                let open = &mut self.open[at];
                match socket {
                    Ok(socket) => {
                        let flow = Flow::new(Arc::new(socket), kind, to, port, index);
                        open.flows[index] = Some(flow);
                    }
                    Err(error) => {
                        let which = ["first", "second"][index];
                        open.failed = Some(format!("opening the {which} flow: {error}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Brings the first flow into the state in which the second one must meet it.
    fn change_first(&mut self) {
        for open in &mut self.open {
            let question = match open.pair.state {
                State::ClosedByClient => BYE,
                State::ClosedByServer => CLOSE,
                _ => continue,
            };
            if let Some(flow) = &mut open.flows[0] {
                flow.prepare(question);
            }
        }
        self.wait("the first flow says that it ends", |open| {
            match open.pair.state {
                State::ClosedByClient | State::ClosedByServer => open.ask(&[0]),
                _ => Ok(true),
            }
        });
        for open in &mut self.open {
            let Some(flow) = &open.flows[0] else {
                continue;
            };
            match open.pair.state {
                State::HalfClosed | State::ClosedByClient => {
                    if let Err(error) = flow.socket().shutdown(Shutdown::Write) {
                        open.failed = Some(format!("closing the first flow: {error}"));
                    }
                }
                State::Reset => flow.reset(),
                State::Open | State::ClosedByServer => {}
            }
        }
        self.wait("the first flow ends", |open| match open.pair.state {
            State::HalfClosed => open.hear(),
            State::ClosedByClient | State::ClosedByServer => open.is_over(),
            State::Open | State::Reset => Ok(true),
        });
        for open in &mut self.open {
            if !open.pair.state.goes_on() {
                open.flows[0] = None;
            }
        }
    }

    fn ask(&mut self, what: &str, asked: &[usize]) {
        self.ask_some(what, asked, |_| true);
    }

    fn ask_some(&mut self, what: &str, asked: &[usize], is_asked: impl Fn(&Pair) -> bool) {
        for open in &mut self.open {
            for index in asked {
                if let Some(flow) = &mut open.flows[*index] {
                    flow.prepare_next();
                }
            }
        }
        self.wait(what, |open| {
            if is_asked(&open.pair) {
                open.ask(asked)
            } else {
                Ok(true)
            }
        });
    }

    /// Polls all pairs that have not failed, until the step is done for each of them or time runs out.
    fn wait(&mut self, what: &str, mut look: impl FnMut(&mut Open) -> io::Result<bool>) {
        let start = Instant::now();
        loop {
            let is_late = start.elapsed() > self.patience;
            let mut waits = false;
            for open in &mut self.open {
                if open.failed.is_some() || open.is_done {
                    continue;
                }
                match look(open) {
                    Ok(true) => open.is_done = true,
                    Ok(false) if is_late => open.failed = Some(format!("{what}: no answer")),
                    Ok(false) => waits = true,
                    Err(error) => open.failed = Some(format!("{what}: {error}")),
                }
            }
            if !waits {
                break;
            }
            thread::sleep(PAUSE);
        }
        for open in &mut self.open {
            open.is_done = false;
        }
    }
}
