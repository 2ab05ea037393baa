//! A UDP server that replies with its name, and its client.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use health_net::netns::NetNs;
use socket2::{Domain, Socket, Type};

use super::backend::PORT;
use super::bind::bind;
use super::client::Answer;
use crate::conntrack::packets::{self, IP_PROTOCOL_UDP};
use crate::process::print_line;

/// Maximum time between two checks of the stop flag.
const PAUSE: Duration = Duration::from_millis(100);
/// Buffer size, which fits the longest datagram.
const LONGEST: usize = 1 << 16;

/// A thread that replies to datagrams at all addresses of a namespace. It stops on drop.
#[derive(Debug)]
pub(super) struct DatagramServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DatagramServer {
    pub(super) fn start(netns: &NetNs, name: &str) -> anyhow::Result<Self> {
        let socket = netns.run_in(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)))?;
        let socket = socket.with_context(|| format!("{name} cannot bind port {PORT}"))?;
        socket.set_read_timeout(Some(PAUSE))?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("datagrams".to_owned()).spawn({
            let (stop, name) = (stop.clone(), name.to_owned());
            move || {
                if let Err(error) = serve(&socket, &name, &stop) {
                    print_line(format_args!(
                        "{name} has stopped answering datagrams: {error}"
                    ));
                }
            }
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for DatagramServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("a server of datagrams panicked");
        }
    }
}

fn serve(socket: &UdpSocket, name: &str, stop: &AtomicBool) -> io::Result<()> {
    let mut buffer = vec![0; LONGEST];
    while !stop.load(Ordering::Relaxed) {
        match socket.recv_from(&mut buffer) {
            Ok((length, peer)) => {
                // The client may be gone, or policy may drop the reply.
                let _ = socket.send_to(&reply_to(&buffer[..length], name, peer), peer);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionRefused
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A backend's reply to a datagram: its name, the client's address, and the datagram.
pub fn reply_to(datagram: &[u8], name: &str, peer: SocketAddr) -> Vec<u8> {
    let ip = peer.ip().to_canonical();
    let mut reply = format!("{name} {ip} ").into_bytes();
    reply.extend_from_slice(datagram);
    reply
}

/// A client's socket, connected to a service.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    namespace: String,
    target: SocketAddr,
    /// Number of questions so far, which makes each question unique.
    asked: u64,
}

impl Datagrams {
    /// Opens a socket in a named namespace, with an ephemeral port.
    pub fn open(namespace: &str, target: SocketAddr) -> anyhow::Result<Self> {
        Self::open_from(namespace, 0, target)
    }

    /// Like [`open`](Self::open), but with this port, which other sockets may use too.
    pub fn open_from(namespace: &str, port: u16, target: SocketAddr) -> anyhow::Result<Self> {
        let open = || {
            let socket = Socket::new(Domain::for_address(target), Type::DGRAM, None)?;
            bind(&socket, port, target)?;
            socket.connect(&target.into())?;
            io::Result::Ok(UdpSocket::from(socket))
        };
        let socket = NetNs::open(namespace)?.run_in(open)?;
        Ok(Self {
            socket: socket.with_context(|| format!("{namespace} to {target}"))?,
            namespace: namespace.to_owned(),
            target,
            asked: 0,
        })
    }

    /// The socket's local address and port.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Sends a unique question and waits up to `patience` for the reply. Returns `None` if there is none. ICMP errors
    /// are returned as errors of the socket.
    pub fn ask(&mut self, patience: Duration) -> io::Result<Option<Answer>> {
        self.asked += 1;
        let question = self.asked.to_string();
        self.ask_with(question.as_bytes(), patience)
    }

    /// Like [`ask`](Self::ask), but with this question, which the reply must contain.
    pub fn ask_with(&mut self, question: &[u8], patience: Duration) -> io::Result<Option<Answer>> {
        self.socket.send(question)?;
        self.hear(question, patience)
    }

    /// Like [`ask_with`](Self::ask_with), but sends the question in fragments, starting with the last.
    pub fn ask_backwards(
        &mut self,
        question: &[u8],
        patience: Duration,
    ) -> anyhow::Result<Option<Answer>> {
        // Fragments that fit the MTU of every path (RFC 8200 section 5).
        const SIZE: usize = 1200;
        let own = self.socket.local_addr()?;
        let (hosts, ports) = (
            (own.ip(), self.target.ip()),
            (own.port(), self.target.port()),
        );
        let datagram = packets::udp(hosts, ports, question);
        self.asked += 1;
        let id = ports.0.wrapping_add(self.asked as u16);
        let sender = NetNs::open(&self.namespace)?.run_in(|| self.raw())??;
        let to = SocketAddr::new(self.target.ip(), 0).into();
        for fragment in packets::fragments(hosts, IP_PROTOCOL_UDP, &datagram, id, SIZE)
            .iter()
            .rev()
        {
            sender.send_to(fragment, &to)?;
        }
        Ok(self.hear(question, patience)?)
    }

    /// Opens a raw socket that sends packets with their IP headers.
    fn raw(&self) -> io::Result<Socket> {
        let domain = Domain::for_address(self.target);
        let socket = Socket::new(domain, Type::RAW, Some(libc::IPPROTO_RAW.into()))?;
        match self.target {
            SocketAddr::V4(_) => socket.set_header_included_v4(true)?,
            SocketAddr::V6(_) => socket.set_header_included_v6(true)?,
        }
        Ok(socket)
    }

    /// Waits for the reply to a question.
    fn hear(&self, question: &[u8], patience: Duration) -> io::Result<Option<Answer>> {
        self.socket.set_read_timeout(Some(patience))?;
        let mut buffer = vec![0; LONGEST];
        loop {
            let length = match self.socket.recv(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                received => received?,
            };
            let (answer, rest) = Answer::read(&buffer[..length]).map_err(io::Error::other)?;
            // Skip late replies to earlier questions.
            if rest == question {
                return Ok(Some(answer));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_names_the_backend_and_the_client() {
        let reply = reply_to(b"7", "web-1", "[::ffff:10.0.0.1]:5".parse().unwrap());
        assert_eq!(reply, b"web-1 10.0.0.1 7");
    }
}
