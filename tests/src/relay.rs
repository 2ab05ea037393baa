//! A wire between two devices that holds each packet for a set time, and may swallow some: what netem
//! does where the kernel has it.

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

use crate::process::{run, tell};

/// Room for packets that wait in a socket, bytes.
const RECEIVE_BUFFER: usize = 8 << 20;
/// The longest packet: segments that are cut later, with all headers.
const LONGEST: usize = 1 << 17;
/// Length of the header that carries what is still to be done to a packet (`struct virtio_net_hdr`).
const VNET_HEADER_LEN: usize = 10;
/// Most time between two looks whether to end.
const PAUSE: Duration = Duration::from_millis(100);

sockopt_impl!(
    /// Pass checksums and segments that are still to be made from one device to the other as they are.
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

/// Tells packets to be lost from others, by their bytes from the Ethernet header on.
type Drops = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// What a relay does to packets.
pub struct Handling {
    /// How long each packet is held at first, either way.
    hold: Duration,
    /// Whether it is waited for busily.
    busy: bool,
    /// Which packets are swallowed.
    drops: Drops,
}

impl Handling {
    /// Holds packets and loses none. Other than zero, the time is waited for busily: on a CPU of its own
    /// the relay is right to a microsecond.
    pub fn hold(hold: Duration) -> Self {
        Self {
            hold,
            busy: !hold.is_zero(),
            ..Self::pass()
        }
    }

    /// Passes packets on at once, until it is [told](Relay::set_hold) to hold them. Sleeps until they are
    /// due, and so leaves the CPU to others.
    pub fn pass() -> Self {
        Self {
            hold: Duration::ZERO,
            busy: false,
            drops: Box::new(|_| false),
        }
    }

    /// Passes packets on at once, but for those that `drops` picks by their bytes from the Ethernet
    /// header on.
    pub fn drop_if(drops: impl FnMut(&[u8]) -> bool + Send + 'static) -> Self {
        Self {
            drops: Box::new(drops),
            ..Self::pass()
        }
    }
}

/// What a relay and its thread tell each other.
#[derive(Debug, Default)]
struct Shared {
    /// How long packets are held that come from now on, nanoseconds.
    hold_ns: AtomicU64,
    /// Packets swallowed so far.
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

/// A thread that carries packets between two devices of a namespace. Ends when it is dropped.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Joins two devices of `netns`, which are up and have nothing else to do.
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
                    tell(format_args!("packets may be held for longer: {error:#}"));
                }
                let mut wire = Wire::new(ends, handling, &shared);
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = wire.turn() {
                        tell(format_args!("the relay ends: {error:#}"));
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

    /// Packets swallowed so far.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Holds packets that come from now on for so long, either way. None overtakes another.
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
            tell("the relay panicked");
        }
    }
}

/// Has the calling thread run whenever it has something to do: a wire is no slower where all processors are busy.
fn run_before_others() -> anyhow::Result<()> {
    let mut chrt = Command::new("chrt");
    chrt.args(["--fifo", "--pid", "1", &gettid().to_string()]);
    run(&mut chrt)?.success().map(drop)
}

/// A packet socket on one device of the calling thread's namespace.
fn open(device: &str) -> anyhow::Result<Socket> {
    let open = || {
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(all.into()))?;
        let address = getifaddrs()?
            .filter(|entry| entry.interface_name == device)
            .find_map(|entry| entry.address?.as_link_addr().copied());
        let address = address.context("there is no such device")?;
        bind(socket.as_raw_fd(), &address)?;
        setsockopt(&socket, VnetHeader, &true)?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
        socket.set_nonblocking(true)?;
        anyhow::Ok(socket)
    };
    open().with_context(|| format!("cannot relay packets of {device}"))
}

/// Both directions between two sockets.
struct Wire<'a> {
    ends: [Socket; 2],
    /// Packets received at an end, and when they are to leave at the other.
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

    /// Takes in what has come and lets go what is due; waits a while if that is nothing.
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

    /// Waits for a packet to come or to be due.
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

/// The length of the next packet; `None` if there is none.
fn receive(mut socket: &Socket, buffer: &mut [u8]) -> std::io::Result<Option<usize>> {
    match socket.read(buffer) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What the device cannot take is lost, as on any wire.
fn send(socket: &Socket, packet: &[u8]) -> std::io::Result<()> {
    match socket.send(packet) {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}
