//! Servers that reply with their name, to each line with a line and to each datagram with a datagram.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_net::netns::NetNs;
use mio::net::{TcpListener, TcpStream, UdpSocket};
use mio::{Events, Interest, Poll, Token};
use tests::process::print_line;
use tests::served::PORT;

/// Interval at which a server sends lines to clients that have closed their side.
const TICK: Duration = Duration::from_millis(100);
/// Request to close the connection after the reply.
pub(super) const CLOSE: &str = "close";
/// Request to close the connection once the client has closed its side.
pub(super) const BYE: &str = "bye";
/// Line that a server sends after the client has closed its side.
pub(super) const STILL: &str = "still";

const LISTENER: Token = Token(0);
const DATAGRAMS: Token = Token(1);
const FIRST: usize = 2;

/// A thread that serves all addresses of a namespace until it is dropped.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(netns: &NetNs, name: &str) -> anyhow::Result<Self> {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
        let open = || io::Result::Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?));
        let (listener, datagrams) = netns
            .run_in(open)?
            .with_context(|| format!("{name} cannot listen"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name(name.to_owned()).spawn({
            let (stop, name) = (stop.clone(), name.to_owned());
            move || {
                if let Err(error) = serve(listener, datagrams, &name, &stop) {
                    print_line(format_args!("{name} has stopped serving: {error}"));
                }
            }
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("a server of pairs panicked");
        }
    }
}

/// A connection and its state.
struct Connection {
    stream: TcpStream,
    line: Vec<u8>,
    says_bye: bool,
    is_half_closed: bool,
}

impl Connection {
    /// Replies to the data that has arrived. Returns whether the connection stays open.
    fn go_on(&mut self, name: &str) -> io::Result<bool> {
        let mut buffer = [0; 512];
        loop {
            let length = match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.is_half_closed = true;
                    return Ok(!self.says_bye);
                }
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            };
            for byte in &buffer[..length] {
                if *byte != b'\n' {
                    self.line.push(*byte);
                    continue;
                }
                let line = String::from_utf8_lossy(&self.line).into_owned();
                self.line.clear();
                writeln!(self.stream, "{name} {line}")?;
                self.says_bye |= line == BYE;
                if line == CLOSE {
                    return Ok(false);
                }
            }
        }
    }
}

fn serve(
    mut listener: TcpListener,
    mut datagrams: UdpSocket,
    name: &str,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    poll.registry()
        .register(&mut listener, LISTENER, Interest::READABLE)?;
    poll.registry()
        .register(&mut datagrams, DATAGRAMS, Interest::READABLE)?;
    let mut connections: HashMap<Token, Connection> = HashMap::new();
    let mut next = FIRST;
    let mut last = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        match poll.poll(&mut events, Some(TICK)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            match event.token() {
                LISTENER => {
                    while let Ok((mut stream, _)) = listener.accept() {
                        let token = Token(next);
                        next += 1;
                        poll.registry()
                            .register(&mut stream, token, Interest::READABLE)?;
                        let connection = Connection {
                            stream,
                            line: Vec::new(),
                            says_bye: false,
                            is_half_closed: false,
                        };
                        connections.insert(token, connection);
                    }
                }
                DATAGRAMS => answer_all(&datagrams, name),
                token => {
                    let lasts = connections
                        .get_mut(&token)
                        .is_some_and(|connection| connection.go_on(name).unwrap_or(false));
                    if !lasts {
                        connections.remove(&token);
                    }
                }
            }
        }
        if last.elapsed() >= TICK {
            last = Instant::now();
            connections.retain(|_, connection| {
                !connection.is_half_closed || writeln!(connection.stream, "{name} {STILL}").is_ok()
            });
        }
    }
    Ok(())
}

fn answer_all(socket: &UdpSocket, name: &str) {
    let mut buffer = [0; 512];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, peer)) => {
                let mut answer = format!("{name} ").into_bytes();
                answer.extend_from_slice(&buffer[..length]);
                // The client may already be gone.
                let _ = socket.send_to(&answer, peer);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            // An ICMP error about an earlier reply.
            Err(_) => {}
        }
    }
}
