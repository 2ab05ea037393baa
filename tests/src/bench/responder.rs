//! Answers `GET /hello` for all peers, as cheaply as a process can, so that the measurement is about the prober.

use std::io::{ErrorKind, Read as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use health_mesh::proof::HelloKeys;
use nix::sys::socket::setsockopt;
use nix::time::{ClockId, clock_gettime};
use nix::{setsockopt_impl, sockopt_impl};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::Node;
use crate::hello;
use crate::process::print_line;

const BACKLOG: i32 = 4096;
/// Maximum size of a request. Those of probes have about 330 bytes.
const REQUEST_LEN: usize = 1024;
/// How many seconds the kernel waits for a request before accepting a connection anyway.
const REQUEST_PATIENCE: i32 = 5;
/// Maximum time between two checks of the stop flag if no client connects.
const PAUSE: Duration = Duration::from_millis(100);

/// Response to requests that are not authenticated with the mesh's keys.
const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";

sockopt_impl!(
    /// Accepts connections only after their first bytes have arrived.
    DeferAccept,
    SetOnly,
    libc::IPPROTO_TCP,
    libc::TCP_DEFER_ACCEPT,
    i32
);

/// A thread that serves on every address of a node's namespace. It stops on drop.
#[derive(Debug)]
pub(super) struct Responder {
    cpu_ns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// Starts a responder that listens on TCP `port`.
    pub(super) fn start(node: &Node, port: u16) -> anyhow::Result<Self> {
        let listener = node
            .run_in(|| listen(port))?
            .with_context(|| format!("cannot listen on port {port} in {}", node.name()))?;
        let cpu_ns = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("responder".to_owned()).spawn({
            let (cpu_ns, stop) = (cpu_ns.clone(), stop.clone());
            move || serve(&listener, &cpu_ns, &stop)
        })?;
        Ok(Self {
            cpu_ns,
            stop,
            thread: Some(thread),
        })
    }

    /// User and system time that the responder has used so far.
    pub(super) fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("bench: the responder panicked");
        }
    }
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    setsockopt(&socket, DeferAccept, &REQUEST_PATIENCE)?;
    // Also the timeout of `accept`.
    socket.set_read_timeout(Some(PAUSE))?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn serve(listener: &TcpListener, cpu_ns: &AtomicU64, stop: &AtomicBool) {
    let keys = HelloKeys::default();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            // A broken connection is the client's problem.
            Ok((stream, _)) => drop(answer(stream, &keys)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                print_line(format_args!("bench: the responder stopped: {error}"));
                return;
            }
        }
        if let Ok(time) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID) {
            let time = Duration::from(time);
            cpu_ns.store(time.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

fn answer(mut stream: TcpStream, keys: &HelloKeys) -> std::io::Result<()> {
    let mut request = [0; REQUEST_LEN];
    let len = stream.read(&mut request)?;
    if len == 0 {
        return Ok(());
    }
    let proven = hello::answer(keys, &request[..len]);
    // MSG_MORE, so that the FIN is sent in the same segment.
    SockRef::from(&stream).send_with_flags(proven.as_deref().unwrap_or(ANSWER), libc::MSG_MORE)?;
    Ok(())
}
