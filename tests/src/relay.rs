//! A wire between two devices that delays each packet by a set time and may drop some, like netem on kernels that have
//! it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_net::netns::NetNs;
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{bind, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use nix::unistd::gettid;
use nix::{setsockopt_impl, sockopt_impl};
use socket2::{Domain, Socket, Type};

use crate::process::{print_line, run};

/// Size of a socket's receive buffer in bytes.
const RECEIVE_BUFFER: usize = 8 << 20;
/// Maximum packet size: a GSO packet that is yet to be segmented, with all headers.
const LONGEST: usize = 1 << 17;
/// Length of the header that describes a packet's pending offloads (`struct virtio_net_hdr`).
const VNET_HEADER_LEN: usize = 10;
/// Maximum time between two checks of the stop flag.
const PAUSE: Duration = Duration::from_millis(100);

sockopt_impl!(
    /// Passes partial checksums and unsegmented packets from one device to the other unchanged.
    VnetHeader,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_VNET_HDR,
    bool
);

/// Whether a frame is an IPv4 echo request.
pub fn is_echo_request(frame: &[u8]) -> bool {
    const TYPE_AT: usize = 12;
    const PROTOCOL_AT: usize = 23;
    const ICMP_AT: usize = 34;
    frame.get(TYPE_AT..TYPE_AT + 2) == Some(&[8, 0])
        && frame.get(PROTOCOL_AT) == Some(&1)
        && frame.get(ICMP_AT) == Some(&8)
}

/// Decides whether to drop a packet, given its bytes from the Ethernet header on.
type Drops = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// How a relay treats packets.
pub struct Handling {
    /// Initial delay per packet, in either direction.
    hold: Duration,
    /// Whether to busy-wait for the end of the delay.
    busy: bool,
    /// Which packets to drop.
    drops: Drops,
}

impl Handling {
    /// Delays packets and drops none. Busy-waits unless the delay is zero: with a CPU to itself, the relay is accurate
    /// to a microsecond.
    pub fn hold(hold: Duration) -> Self {
        Self {
            hold,
            busy: !hold.is_zero(),
            ..Self::pass()
        }
    }

    /// Passes packets on immediately until [`Relay::set_hold`] sets a delay. Sleeps until packets are due, which leaves
    /// the CPU to other threads.
    pub fn pass() -> Self {
        Self {
            hold: Duration::ZERO,
            busy: false,
            drops: Box::new(|_| false),
        }
    }

    /// Passes packets on immediately, except those that `drops` selects by their bytes from the Ethernet header on.
    pub fn drop_if(drops: impl FnMut(&[u8]) -> bool + Send + 'static) -> Self {
        Self {
            drops: Box::new(drops),
            ..Self::pass()
        }
    }
}

/// State shared by a relay and its thread.
#[derive(Debug, Default)]
struct Shared {
    /// Delay of packets that arrive from now on, in nanoseconds.
    hold_ns: AtomicU64,
    /// Packets dropped so far.
    dropped: AtomicU64,
}

impl Shared {
    fn set_hold(&self, hold: Duration) {
        let ns = u64::try_from(hold.as_nanos()).unwrap_or(u64::MAX);
        self.hold_ns.store(ns, Ordering::Relaxed);
    }

    fn hold(&self) -> Duration {
        Duration::from_nanos(self.hold_ns.load(Ordering::Relaxed))
    }
}

/// A thread that carries packets between two devices of a namespace. It stops on drop.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Joins two devices of `netns` that are up and otherwise unused.
    pub fn start(netns: &NetNs, devices: [&str; 2], handling: Handling) -> anyhow::Result<Self> {
        let [a, b] = devices;
        let ends = netns.run_in(|| anyhow::Ok([open(a)?, open(b)?]))??;
        let shared = Arc::new(Shared::default());
        shared.set_hold(handling.hold);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("relay".to_owned()).spawn({
            let (shared, stop) = (shared.clone(), stop.clone());
            move || {
                if !handling.busy
                    && let Err(error) = run_before_others()
                {
                    print_line(format_args!("packets may be delayed longer: {error:#}"));
                }
                let mut wire = Wire::new(ends, handling, &shared);
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = wire.turn() {
                        print_line(format_args!("the relay stopped: {error:#}"));
                        return;
                    }
                }
            }
        })?;
        Ok(Self {
            shared,
            stop,
            thread: Some(thread),
        })
    }

    /// Packets dropped so far.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Sets the delay of packets that arrive from now on, in either direction. Packets are never reordered.
    pub fn set_hold(&self, hold: Duration) {
        self.shared.set_hold(hold);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("the relay panicked");
        }
    }
}

/// Gives the calling thread real-time priority, so that the wire is no slower when all CPUs are busy.
fn run_before_others() -> anyhow::Result<()> {
    let mut chrt = Command::new("chrt");
    chrt.args(["--fifo", "--pid", "1", &gettid().to_string()]);
    run(&mut chrt)?.success().map(drop)
}

/// Opens a packet socket on a device of the calling thread's namespace.
fn open(device: &str) -> anyhow::Result<Socket> {
    let open = || {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(all.into()))?;
        let address = getifaddrs()?
            .filter(|entry| entry.interface_name == device)
            .find_map(|entry| entry.address?.as_link_addr().copied());
        let address = address.context("no such device")?;
        bind(socket.as_raw_fd(), &address)?;
        setsockopt(&socket, VnetHeader, &true)?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
        socket.set_nonblocking(true)?;
        anyhow::Ok(socket)
    };
    open().with_context(|| format!("cannot relay packets of {device}"))
}

/// A pair of sockets, and the packets in both directions.
struct Wire<'a> {
    ends: [Socket; 2],
    /// Packets received at each end, and when to send them at the other end.
    held: [VecDeque<(Instant, Vec<u8>)>; 2],
    handling: Handling,
    shared: &'a Shared,
    buffer: Vec<u8>,
}

impl<'a> Wire<'a> {
    fn new(ends: [Socket; 2], handling: Handling, shared: &'a Shared) -> Self {
        Self {
            ends,
            held: Default::default(),
            handling,
            shared,
            buffer: vec![0; LONGEST],
        }
    }

    /// Receives packets and sends those that are due. Sleeps if it received none and does not busy-wait.
    fn turn(&mut self) -> anyhow::Result<()> {
        let mut received = false;
        for end in 0..2 {
            while let Some(len) = receive(&self.ends[end], &mut self.buffer)? {
                received = true;
                let packet = &self.buffer[..len];
                if packet
                    .get(VNET_HEADER_LEN..)
                    .is_some_and(&mut self.handling.drops)
                {
                    self.shared.dropped.fetch_add(1, Ordering::Relaxed);
                } else {
                    let due = Instant::now() + self.shared.hold();
                    self.held[end].push_back((due, packet.to_vec()));
                }
            }
        }
        for end in 0..2 {
            while let Some((_, packet)) =
                self.held[end].pop_front_if(|(due, _)| *due <= Instant::now())
            {
                send(&self.ends[1 - end], &packet)?;
            }
        }
        if !self.handling.busy && !received {
            self.sleep()?;
        }
        Ok(())
    }

    /// Waits until a packet arrives or is due.
    fn sleep(&self) -> anyhow::Result<()> {
        let next = self.held.iter().filter_map(|held| held.front()).min();
        let pause = next.map_or(PAUSE, |(due, _)| {
            due.saturating_duration_since(Instant::now()).min(PAUSE)
        });
        let [a, b] = &self.ends;
        let mut ends = [a, b].map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
        match ppoll(&mut ends, Some(TimeSpec::from_duration(pause)), None) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for packets"),
        }
    }
}

/// Receives the next packet and returns its length, or `None` if none is waiting.
fn receive(mut socket: &Socket, buffer: &mut [u8]) -> std::io::Result<Option<usize>> {
    match socket.read(buffer) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Sends a packet. If the device cannot take it, the packet is lost, as on any wire.
fn send(socket: &Socket, packet: &[u8]) -> std::io::Result<()> {
    match socket.send(packet) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}
