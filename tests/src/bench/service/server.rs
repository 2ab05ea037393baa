//! Endpoints of services that do as little as possible with each connection.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use health_net::netns::NetNs;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};

use super::cluster::{BACKEND_ECHO_PORT, BACKEND_PORT};
use crate::bench::sent::{SNMP, snmp};
use crate::process::print_line;

/// Length of the accept queue, which is the kernel's default limit.
pub(super) const BACKLOG: usize = 4096;
/// Maximum time between two checks of the stop flag if no client connects.
const PAUSE: Duration = Duration::from_millis(500);

/// A server that accepts connections and datagrams, and echoes on one connection at a time. It stops on drop.
pub(super) struct Server {
    /// No thread waits for connections, so none is woken during measurements.
    waiting: TcpListener,
    /// Never read: the kernel drops excess datagrams without an ICMP error.
    _datagrams: UdpSocket,
    /// Counters of the server's namespace, no matter which thread reads the file.
    counters: File,
    stop: Arc<AtomicBool>,
    echo: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server in a namespace, which echoes on this CPU.
    pub(super) fn start(netns: &NetNs, cpu: usize) -> anyhow::Result<Self> {
        let open = || {
            let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, BACKEND_PORT))?;
            let waiting = listen(BACKEND_PORT)?;
            waiting.set_nonblocking(true)?;
            let counters = File::open(SNMP)?;
            io::Result::Ok((waiting, listen(BACKEND_ECHO_PORT)?, datagrams, counters))
        };
        let (waiting, echoing, datagrams, counters) =
            netns.run_in(open)?.context("cannot listen")?;
        let stop = Arc::new(AtomicBool::new(false));
        let echo = thread::Builder::new().name("echo".to_owned()).spawn({
            let stop = stop.clone();
            move || {
                if let Err(error) = run_on(cpu).and_then(|()| echo_all(&echoing, &stop)) {
                    print_line(format_args!("bench: a server stopped: {error:#}"));
                }
            }
        })?;
        Ok(Self {
            waiting,
            _datagrams: datagrams,
            counters,
            stop,
            echo: Some(echo),
        })
    }

    /// Makes the kernel silently drop all segments of clients that connect, or stop dropping them.
    pub(super) fn set_deaf(&self, is_deaf: bool) -> anyhow::Result<()> {
        // A program with the single instruction "return", whose value is the number of bytes to keep of each packet.
        let code = (libc::BPF_RET | libc::BPF_K) as u16;
        let bytes = if is_deaf { 0 } else { u32::MAX };
        SockRef::from(&self.waiting)
            .attach_filter(&[SockFilter::new(code, 0, 0, bytes)])
            .context("cannot attach a socket filter")
    }

    /// Number of packets ever delivered to a protocol in the server's namespace, whether or not a socket had space for
    /// them.
    pub(super) fn delivered(&self) -> anyhow::Result<u64> {
        let mut counters = &self.counters;
        let mut text = String::new();
        counters.rewind()?;
        counters.read_to_string(&mut text)?;
        snmp(&text, "Ip", "InDelivers").context("no counter of delivered packets")
    }

    /// Accepts and closes all queued connections, at most [`BACKLOG`].
    pub(super) fn drain(&self) -> anyhow::Result<()> {
        loop {
            match self.waiting.accept() {
                Ok(stream) => drop(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error).context("cannot accept"),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(echo) = self.echo.take()
            && echo.join().is_err()
        {
            print_line("bench: a server panicked");
        }
    }
}

/// Pins the calling thread to one CPU.
pub(super) fn run_on(cpu: usize) -> anyhow::Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &cpus).with_context(|| format!("cannot run on CPU {cpu}"))
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    // Also the timeout of `accept`.
    socket.set_read_timeout(Some(PAUSE))?;
    socket.bind(&std::net::SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG as i32)?;
    Ok(socket.into())
}

fn echo_all(listener: &TcpListener, stop: &AtomicBool) -> anyhow::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            // The client handles errors.
            Ok((stream, _)) => drop(echo(stream, stop)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::ConnectionAborted
                ) => {}
            Err(error) => return Err(error).context("cannot accept"),
        }
    }
    Ok(())
}

fn echo(mut stream: TcpStream, stop: &AtomicBool) -> io::Result<()> {
    SockRef::from(&stream).set_tcp_nodelay(true)?;
    stream.set_read_timeout(Some(PAUSE))?;
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => stream.write_all(&buffer[..length])?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
