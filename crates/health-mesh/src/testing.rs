//! Test support for the mesh: isolated network namespaces, an in-memory store and a responder that can be late.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use health_common::arrivals::{Arrivals, Prober};
use health_common::checksum;
use health_common::probe::{Path, ProbeId};
use health_common::rtt::{RttKey, RttRow, SOURCE_KERNEL, SOURCE_SOCKET};
use health_datapath::arrival_store::ArrivalStore;
use health_datapath::rtt_store::{Connection, LossOutcome, Measurement, RttStore};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{SockaddrIn, recvfrom};
use socket2::{Domain, Protocol, Socket, Type};

/// How long a test waits for an expected event, however busy the machine is.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Factor by which everything is slower on this machine.
pub(super) fn slowness() -> u32 {
    let times = std::env::var("HEALTH_AGENT_SLOWNESS");
    times.map_or(1, |times| times.parse().unwrap())
}

/// A network namespace that lives as long as the value.
pub(super) struct Namespace(OwnedFd);

impl Namespace {
    /// Creates one with its loopback up; `None`, with a message, without root.
    pub(super) fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return None;
        }
        let open = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            OwnedFd::from(std::fs::File::open("/proc/thread-self/ns/net").unwrap())
        };
        let namespace = Self(std::thread::spawn(open).join().unwrap());
        namespace.ip("link set lo up");
        Some(namespace)
    }

    /// Runs `work` inside, on its own thread.
    pub(super) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = || {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                work()
            };
            scope
                .spawn(inside)
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs a future inside.
    pub(super) fn block_on<F: Future>(&self, future: impl FnOnce() -> F + Send)
    where
        F::Output: Send,
    {
        self.enter(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(future());
        });
    }

    /// Runs the `ip` command inside.
    pub(super) fn ip(&self, arguments: &str) {
        self.enter(|| {
            let status = Command::new("ip")
                .args(arguments.split_whitespace())
                .status()
                .unwrap();
            assert!(status.success(), "ip {arguments}");
        });
    }

    /// Sets a value under `/proc/sys/net`.
    pub(super) fn sysctl(&self, name: &str, value: &str) {
        self.enter(|| std::fs::write(format!("/proc/sys/net/{name}"), value).unwrap());
    }

    /// Connects two namespaces with a veth pair, `eth0` in both.
    pub(super) fn join(&self, other: &Self) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.0.as_raw_fd());
        self.ip(&format!(
            "link add eth0 type veth peer name eth0 netns {path}"
        ));
        self.ip("link set eth0 up");
        other.ip("link set eth0 up");
    }
}

/// A store for tests in which no programs count arrivals.
pub(super) struct NoArrivals;

impl ArrivalStore for NoArrivals {
    fn arrivals(&self, _: Prober) -> io::Result<Option<Arrivals>> {
        Ok(None)
    }
}

/// In-memory rows.
#[derive(Default)]
pub(super) struct MemoryStore {
    rows: Mutex<HashMap<RttKey, RttRow>>,
    /// Round trips of the timestamped probes, by sequence number.
    stamped: Mutex<HashMap<(RttKey, u16), u64>>,
    followed: Mutex<HashMap<IpAddr, Path>>,
    /// Handshake time that the uplink's programs measure for each connection, in nanoseconds; 0 if not measured.
    pub(super) handshake_ns: AtomicU64,
}

impl MemoryStore {
    pub(super) fn get(&self, key: impl Into<RttKey>) -> Option<RttRow> {
        self.rows.lock().unwrap().get(&key.into()).copied()
    }

    /// Counts a round trip as the uplink's programs do.
    pub(super) fn stamp(&self, key: impl Into<RttKey>, rtt_ns: u64, sequence: u16) {
        let key = key.into();
        if let Some(row) = self.rows.lock().unwrap().get_mut(&key) {
            row.record(rtt_ns, 0, sequence, SOURCE_KERNEL);
            self.stamped.lock().unwrap().insert((key, sequence), rtt_ns);
        }
    }

    fn count_loss(&self, key: RttKey) -> io::Result<LossOutcome> {
        Ok(match self.rows.lock().unwrap().get_mut(&key) {
            Some(row) => {
                row.lost += 1;
                LossOutcome::Counted
            }
            None => LossOutcome::UnknownPeer,
        })
    }
}

impl RttStore for MemoryStore {
    fn ensure(&self, key: RttKey) -> io::Result<()> {
        self.rows
            .lock()
            .unwrap()
            .entry(key)
            .or_insert(RttRow::EMPTY);
        Ok(())
    }

    fn remove(&self, key: RttKey) -> io::Result<()> {
        self.rows.lock().unwrap().remove(&key);
        Ok(())
    }

    fn reset(&self, key: RttKey) -> io::Result<bool> {
        let mut rows = self.rows.lock().unwrap();
        Ok(rows.get_mut(&key).map(|row| *row = RttRow::EMPTY).is_some())
    }

    fn keys(&self) -> io::Result<Vec<RttKey>> {
        Ok(self.rows.lock().unwrap().keys().copied().collect())
    }

    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>> {
        Ok(self.get(key))
    }

    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()> {
        match self.rows.lock().unwrap().get_mut(&key) {
            Some(row) => row.record(rtt_ns, 0, 0, SOURCE_SOCKET),
            None => return Err(io::ErrorKind::NotFound.into()),
        }
        Ok(())
    }

    fn answered(&self, key: RttKey, probe: ProbeId, at_socket_ns: u64) -> io::Result<Measurement> {
        let stamped = self.stamped.lock().unwrap().remove(&(key, probe.sequence));
        match stamped {
            Some(rtt_ns) => Ok(Measurement::ByKernel(rtt_ns)),
            None => self
                .sample(key, at_socket_ns)
                .map(|()| Measurement::AtSocket),
        }
    }

    fn lost(&self, key: RttKey, _: ProbeId) -> io::Result<LossOutcome> {
        self.count_loss(key)
    }

    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        at_socket_ns: u64,
    ) -> io::Result<Measurement> {
        assert_ne!(connection.local.port(), 0);
        let handshake_ns = self.handshake_ns.load(Ordering::Relaxed);
        if handshake_ns == 0 {
            return self
                .sample(key, at_socket_ns)
                .map(|()| Measurement::AtSocket);
        }
        match self.rows.lock().unwrap().get_mut(&key) {
            Some(row) => row.record(handshake_ns, 0, 0, SOURCE_KERNEL),
            None => return Err(io::ErrorKind::NotFound.into()),
        }
        Ok(Measurement::ByKernel(handshake_ns))
    }

    fn follow(&self, peer: IpAddr, path: Path) -> io::Result<()> {
        self.followed.lock().unwrap().insert(peer, path);
        Ok(())
    }

    fn unfollow(&self, peer: IpAddr) -> io::Result<()> {
        self.followed.lock().unwrap().remove(&peer);
        Ok(())
    }

    fn followed(&self) -> io::Result<Vec<IpAddr>> {
        Ok(self.followed.lock().unwrap().keys().copied().collect())
    }

    fn give_up_leftovers(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome> {
        self.count_loss(key)
    }
}

/// Answers IPv4 echo requests instead of its namespace's kernel.
pub(super) struct EchoResponder {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoResponder {
    /// For each request, `delays` gets the requested address and the sequence number, and returns the delays of the
    /// replies: one reply per value.
    pub(super) fn start(
        namespace: &Namespace,
        delays: impl Fn(IpAddr, u16) -> Vec<Duration> + Send + 'static,
    ) -> Self {
        namespace.sysctl("ipv4/icmp_echo_ignore_all", "1");
        let inside = namespace.0.try_clone().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            setns(&inside, CloneFlags::CLONE_NEWNET).unwrap();
            let socket = raw_socket();
            socket
                .set_read_timeout(Some(Duration::from_millis(10)))
                .unwrap();
            let mut buffer = [0; 256];
            let mut replies: Vec<(Instant, Reply)> = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, from)) = recvfrom::<SockaddrIn>(socket.as_raw_fd(), &mut buffer)
                    && let Some(reply) = Reply::to(from.unwrap().ip(), &buffer[..len])
                {
                    for delay in delays(reply.from.into(), reply.sequence) {
                        replies.push((Instant::now() + delay, reply.clone()));
                    }
                }
                let now = Instant::now();
                for (_, reply) in replies.extract_if(.., |(at, _)| *at <= now) {
                    reply.send();
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for EchoResponder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Clone)]
struct Reply {
    from: Ipv4Addr,
    to: Ipv4Addr,
    sequence: u16,
    icmp: Vec<u8>,
}

impl Reply {
    /// The reply to a received packet, if that is an echo request without IP options.
    fn to(sender: Ipv4Addr, packet: &[u8]) -> Option<Self> {
        let mut icmp = packet[20..].to_vec();
        if icmp[0] != 8 {
            return None;
        }
        icmp[0] = 0;
        let check = u16::from_be_bytes([icmp[2], icmp[3]]);
        let check = checksum::update(check, 0x0800, 0x0000);
        icmp[2..4].copy_from_slice(&check.to_be_bytes());
        Some(Self {
            from: Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]),
            to: sender,
            sequence: u16::from_be_bytes([icmp[6], icmp[7]]),
            icmp,
        })
    }

    fn send(&self) {
        let socket = raw_socket();
        socket
            .bind(&SocketAddr::new(self.from.into(), 0).into())
            .unwrap();
        socket
            .send_to(&self.icmp, &SocketAddr::new(self.to.into(), 0).into())
            .unwrap();
    }
}

fn raw_socket() -> Socket {
    Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4)).unwrap()
}
