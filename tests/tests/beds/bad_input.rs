//! Unsolicited or malformed input from the network, such as bad HTTP and forged echo replies. It is reported for what
//! it is, and changes nothing else.

use std::fs;
use std::io::{ErrorKind, Read as _, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_common::checksum;
use health_mesh::proof::HelloKeys;
use health_model::api::{ConnectivityStatus, HealthStatus, NodeStatus};
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use nix::sys::socket::{SockaddrIn, recvfrom};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tests::bed::Node;
use tests::{Bed, PATIENCE, hello, wait_for};

const HEALTH_PORT: u16 = 4240;
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9962);
/// Interval between checks of the stop flag.
const PAUSE: Duration = Duration::from_millis(10);

/// What an impostor sends in place of an agent's response.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// These bytes. The connection stays open.
    Bytes(&'static [u8]),
    /// The response of an agent with the public key, followed by these bytes, repeated forever.
    Proven(&'static [u8]),
    /// These bytes, followed by the second ones, repeated forever.
    Endless(&'static [u8], &'static [u8]),
    /// These bytes, one per second.
    Slow(&'static [u8]),
    /// Nothing. The connection is closed.
    Closed,
    /// A reset.
    Reset,
}

/// An impostor that listens on the health port of a namespace and sends responses. Stops when dropped.
struct Impostor {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Impostor {
    fn start(namespace: &str, port: u16, answer: Answer) -> anyhow::Result<Self> {
        let listener = NetNs::open(namespace)?.run_in(|| listen(port))??;
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::new(AtomicU64::new(0));
        let thread = thread::spawn({
            let (stop, asked) = (stop.clone(), asked.clone());
            move || {
                thread::scope(|scope| {
                    while !stop.load(Ordering::Relaxed) {
                        match listener.accept() {
                            Ok((stream, _)) => {
                                asked.fetch_add(1, Ordering::Relaxed);
                                let stop = &stop;
                                // The thread stops when the client does.
                                scope.spawn(move || drop(give(stream, answer, stop)));
                            }
                            Err(_) => thread::sleep(PAUSE),
                        }
                    }
                });
            }
        });
        Ok(Self {
            stop,
            asked,
            thread: Some(thread),
        })
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in the thread is not the test's concern.
            let _ = thread.join();
        }
    }
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn give(mut stream: TcpStream, answer: Answer, stop: &AtomicBool) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PAUSE))?;
    stream.set_write_timeout(Some(PAUSE))?;
    if let Answer::Reset = answer {
        return SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    }
    let mut request = [0; 1024];
    let len = wait_readable(&mut stream, &mut request, stop)?;
    if len == 0 {
        return Ok(());
    }
    let endless = |stream: &mut TcpStream, head: &[u8], more: &[u8]| {
        stream.write_all(head)?;
        while !stop.load(Ordering::Relaxed) {
            match stream.write_all(more) {
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
        Ok(())
    };
    match answer {
        Answer::Closed | Answer::Reset => return Ok(()),
        Answer::Bytes(bytes) => stream.write_all(bytes)?,
        Answer::Endless(head, more) => endless(&mut stream, head, more)?,
        Answer::Proven(more) => {
            let head = hello::answer(&HelloKeys::default(), &request[..len]);
            endless(&mut stream, &head.unwrap_or_default(), more)?;
        }
        Answer::Slow(bytes) => {
            for byte in bytes.iter().cycle() {
                stream.write_all(&[*byte])?;
                let next = Instant::now() + Duration::from_secs(1);
                while Instant::now() < next && !stop.load(Ordering::Relaxed) {
                    thread::sleep(PAUSE);
                }
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
            }
        }
    }
    wait_readable(&mut stream, &mut request, stop).map(drop)
}

/// Reads from the stream. Returns the number of bytes read; 0 at the end of the stream, or when it is time to stop.
fn wait_readable(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    stop: &AtomicBool,
) -> std::io::Result<usize> {
    while !stop.load(Ordering::Relaxed) {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
    Ok(0)
}

#[test]
#[ignore = "needs root"]
fn bad_http_is_reported_for_what_it_is_and_costs_nothing() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(3).probing(500, 500).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (observer, peer) = (bed.node(1), bed.node(2));
    // The peer's health endpoint and its echo replies outlive the agent; its listeners do not.
    peer.kill_agent(Signal::SIGKILL)?;
    let pid = observer.agent_pid()?;
    let (memory, sockets) = (resident_kib(pid)?, open_sockets(pid)?);
    let elsewhere = Impostor::start(peer.name(), 4241, Answer::Closed)?;

    const ENDLESS_HEADER: Answer = Answer::Endless(b"HTTP/1.1 200 OK\r\nX: ", &[b'x'; 65536]);
    const ENDLESS_HEADERS: Answer = Answer::Endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n");
    const NOT_FOUND_HERE: &[u8] =
        b"HTTP/1.1 302 Found\r\nLocation: http://172.30.0.2:4241/hello\r\nContent-Length: 0\r\n\r\n";
    const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\nHealth-Endpoint: 10.244.2.99\r\n\r\n";
    const REFUSAL: &[u8] = b"HTTP/1.1 401 Unauthorized\r\n\r\n";
    const OOPS: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n";
    for (answer, status, cause) in [
        (ENDLESS_HEADER, "Malformed response", "bad-answer"),
        (ENDLESS_HEADERS, "Malformed response", "bad-answer"),
        (
            Answer::Slow(b"HTTP/1.1 200 OK\r\n"),
            "Response timed out",
            "agent-down",
        ),
        (Answer::Bytes(b""), "Response timed out", "agent-down"),
        (
            Answer::Bytes(NOT_FOUND_HERE),
            "Unexpected status 302",
            "bad-answer",
        ),
        (
            Answer::Bytes(b"SSH-2.0-OpenSSH_9.2\r\n"),
            "Malformed response",
            "bad-answer",
        ),
        (Answer::Bytes(OOPS), "Unexpected status 500", "bad-answer"),
        // Another service that listens there does not make the node unreachable, and is not trusted.
        (
            Answer::Bytes(PLAIN),
            "Response without proof of the mesh key",
            "no-key",
        ),
        (Answer::Bytes(REFUSAL), "Mesh key refused", "wrong-key"),
        (Answer::Reset, "Connection reset by peer", "bad-answer"),
        (
            Answer::Closed,
            "Connection closed without a response",
            "bad-answer",
        ),
    ] {
        let impostors = [peer.name().to_owned(), format!("health-{}", peer.name())]
            .map(|namespace| Impostor::start(&namespace, HEALTH_PORT, answer));
        let impostors = impostors.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let reported = || {
            // The status may still be that of the previous response.
            ensure!(impostors.iter().all(|i| i.asked() >= 3), "not asked yet");
            let report = observer.status()?;
            let node = node(&report, &peer.full_name())?;
            let https: Vec<&str> = results(node)
                .filter_map(|(icmp, http)| {
                    icmp.filter(|icmp| icmp.is_ok())?;
                    http.map(|http| http.status.as_str())
                })
                .collect();
            let diagnosis = node.diagnosis.as_ref().map(|d| d.cause.as_str());
            let right = https == [status, status] && diagnosis == Some(cause);
            ensure!(right, "{https:?}, {diagnosis:?}");
            Ok(Some(report))
        };
        let report = wait_for(&format!("{status} after {answer:?}"), PATIENCE, reported)?;
        for other in [observer, bed.node(3)] {
            let node = node(&report, &other.full_name())?;
            let all_well = results(node)
                .flat_map(|(icmp, http)| [icmp, http])
                .all(|result| result.is_some_and(ConnectivityStatus::is_ok));
            assert!(all_well && node.diagnosis.is_none(), "{answer:?}: {node:?}");
        }
    }

    assert!(
        !peer_addresses(observer, peer)?.contains(&"10.244.2.99".parse()?),
        "an address was learned from somebody without the key"
    );
    // A valid head followed by an endless body is a valid response: the body is not read.
    let endless = Answer::Proven(&[b'x'; 65536]);
    let _impostors = [
        Impostor::start(peer.name(), HEALTH_PORT, endless)?,
        Impostor::start(&format!("health-{}", peer.name()), HEALTH_PORT, endless)?,
    ];
    wait_for("the peer to answer", PATIENCE, || {
        let report = observer.status()?;
        let answers = results(node(&report, &peer.full_name())?)
            .all(|(_, http)| http.is_some_and(ConnectivityStatus::is_ok));
        Ok(answers.then_some(()))
    })?;

    assert_eq!(elsewhere.asked(), 0, "redirects are not followed");
    let grown = resident_kib(pid)?.saturating_sub(memory);
    assert!(grown < 8 << 10, "memory grew by {grown} KiB");
    wait_for("the sockets to be closed", PATIENCE, || {
        Ok((open_sockets(pid)? <= sockets + 8).then_some(()))
    })
}

/// The addresses of a node's health endpoint that an observer knows.
fn peer_addresses(observer: &Node, peer: &Node) -> anyhow::Result<Vec<IpAddr>> {
    let report = observer.status()?;
    let endpoint = node(&report, &peer.full_name())?.health_endpoint.iter();
    Ok(endpoint
        .flat_map(|group| group.paths().map(|path| path.ip))
        .collect())
}

/// The ICMP and HTTP results for all addresses of a node.
fn results(
    node: &NodeStatus,
) -> impl Iterator<Item = (Option<&ConnectivityStatus>, Option<&ConnectivityStatus>)> {
    let endpoint = node.health_endpoint.iter().flat_map(|group| group.paths());
    let paths = node.host.paths().chain(endpoint);
    paths.map(|path| (path.icmp.as_ref(), path.http.as_ref()))
}

fn node<'a>(report: &'a HealthStatus, name: &str) -> anyhow::Result<&'a NodeStatus> {
    let mut nodes = report.nodes.iter();
    nodes
        .find(|node| node.name == name)
        .with_context(|| format!("{name} is not in the report"))
}

fn resident_kib(pid: Pid) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB");
    Ok(kib.parse()?)
}

fn open_sockets(pid: Pid) -> anyhow::Result<usize> {
    let is_socket = |path: &Path| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    Ok(entries.flatten().filter(|e| is_socket(&e.path())).count())
}

/// An echo request as a node received it.
#[derive(Clone, Debug)]
struct Request {
    /// ICMP header and payload.
    icmp: Vec<u8>,
}

impl Request {
    /// Builds the reply to this request; `edit` changes its ICMP header and payload before the checksum is computed.
    fn reply(&self, edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut icmp = self.icmp.clone();
        icmp[0] = 0;
        edit(&mut icmp);
        icmp[2..4].fill(0);
        let mut words = [0; PROBE_WORDS];
        for (word, pair) in words.iter_mut().zip(icmp.chunks_exact(2)) {
            *word = u16::from_ne_bytes([pair[0], pair[1]]);
        }
        let check = !checksum::fold(checksum::sum(&words));
        icmp[2..4].copy_from_slice(&check.to_ne_bytes());
        icmp
    }
}

fn add_to(icmp: &mut [u8], at: usize, number: u16) {
    let value = u16::from_be_bytes([icmp[at], icmp[at + 1]]).wrapping_add(number);
    icmp[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// More 16-bit words than a probe has; unused words are zero.
const PROBE_WORDS: usize = 64;
const IDENTIFIER: usize = 4;
const SEQUENCE: usize = 6;
const PAYLOAD: usize = 8;

/// A raw ICMP socket of a node.
struct Wire(Socket);

impl Wire {
    fn open(node: &Node) -> anyhow::Result<Self> {
        let open = || -> std::io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
            socket.set_read_timeout(Some(PAUSE))?;
            Ok(socket)
        };
        Ok(Self(node.run_in(open)??))
    }

    /// Returns the next echo request from `from`, if one arrives soon.
    fn request(&self, from: Ipv4Addr) -> Option<Request> {
        let mut buffer = [0; 512];
        let (len, sender) = recvfrom::<SockaddrIn>(self.0.as_raw_fd(), &mut buffer).ok()?;
        let header_len = usize::from(buffer[0] & 0x0f) * 4;
        let icmp = buffer.get(header_len..len)?;
        (sender?.ip() == from && icmp[0] == 8).then(|| Request {
            icmp: icmp.to_vec(),
        })
    }

    fn send(&self, to: Ipv4Addr, icmp: &[u8]) -> anyhow::Result<()> {
        self.0.send_to(icmp, &SocketAddr::from((to, 0)).into())?;
        Ok(())
    }
}

/// Number of replies that the agent counts as ignored for this reason.
fn ignored(node: &Node, reason: &str) -> anyhow::Result<u64> {
    let body = node.run_in(|| -> std::io::Result<String> {
        let mut stream = TcpStream::connect(METRICS)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut body = String::new();
        stream.read_to_string(&mut body)?;
        Ok(body)
    })??;
    let series = format!("health_agent_ignored_icmp_replies_total{{reason=\"{reason}\"}} ");
    let value = body.lines().find_map(|line| line.strip_prefix(&series));
    value
        .with_context(|| format!("no {series} in:\n{body}"))?
        .parse()
        .with_context(|| series.clone())
}

const REASONS: [&str; 4] = [
    "unexpected",
    "wrong-source",
    "wrong-payload",
    "unmatched-error",
];

/// The round-trip rows, without their counts of late and duplicate replies.
fn round_trips(node: &Node) -> anyhow::Result<serde_json::Value> {
    let mut rows = node.listing("bpf rtt list")?;
    for row in rows.as_array_mut().into_iter().flatten() {
        for count in ["late", "duplicates"] {
            row.as_object_mut().and_then(|row| row.remove(count));
        }
    }
    Ok(rows)
}

#[test]
#[ignore = "needs root"]
fn forged_late_and_duplicate_replies_change_nothing_and_are_counted() -> anyhow::Result<()> {
    // After the first probes, the agents send only those that are requested.
    let bed = Bed::builder()
        .nodes(3)
        .agent_args("--probe-interval 1h")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (observer, peer) = (bed.node(1), bed.node(2));
    let to = observer.ipv4();
    let wire = Wire::open(peer)?;
    observer.cli("status --probe")?.success()?;
    let request = wait_for("a probe", PATIENCE, || Ok(wire.request(to)))?;

    let reported = || {
        let mut status = observer.status()?;
        // Parts of the agent may lag on a busy machine.
        status.local.problems.clear();
        anyhow::Ok((status, round_trips(observer)?))
    };
    let before = reported()?;
    let mut counts = REASONS.map(|reason| ignored(observer, reason));
    let counted = |expected: [u64; 4]| {
        wait_for(&format!("{expected:?} to be counted"), PATIENCE, || {
            let now = REASONS.map(|reason| ignored(observer, reason).unwrap_or_default());
            ensure!(now == expected, "{now:?}");
            Ok(Some(()))
        })
    };
    let mut expected = [0; 4];
    for (number, count) in expected.iter_mut().zip(&mut counts) {
        *number = *count
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error:#}"))?;
    }
    // These probes were answered long ago, so the replies are late or duplicates.
    wire.send(to, &request.reply(|_| {}))?;
    expected[0] += 1;
    counted(expected)?;
    // The tag in the payload does not match a different sequence number.
    wire.send(to, &request.reply(|icmp| icmp[PAYLOAD] ^= 0xff))?;
    wire.send(to, &request.reply(|icmp| add_to(icmp, SEQUENCE, 9000)))?;
    expected[2] += 2;
    counted(expected)?;
    // Replies to other processes do not even reach the agent's socket. Another reply of the first kind follows, to show
    // that the previous one has been handled.
    wire.send(to, &request.reply(|icmp| add_to(icmp, IDENTIFIER, 1)))?;
    wire.send(to, &request.reply(|_| {}))?;
    expected[0] += 1;
    counted(expected)?;
    assert_eq!(reported()?, before);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nobody_can_answer_for_another() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(3)
        .agent_args("--probe-interval 1h")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (observer, forger, silent) = (bed.node(1), bed.node(2), bed.node(3));
    let to = observer.ipv4();
    silent.exec("sysctl -q -w net.ipv4.icmp_echo_ignore_all=1")?;
    let (near, far) = (Wire::open(silent)?, Wire::open(forger)?);
    let samples = || -> anyhow::Result<serde_json::Value> {
        let rows = round_trips(observer)?;
        let silent = silent.ipv4().to_string();
        let is_row = |row: &&serde_json::Value| {
            row["peer"] == silent.as_str() && row["path"] == "host" && row["protocol"] == "ICMP"
        };
        let row = rows.as_array().into_iter().flatten().find(is_row);
        Ok(row.with_context(|| format!("no row in {rows}"))?["samples"].clone())
    };
    let before = samples()?;

    // Each probe to the silent node is answered by another node, and by the silent node itself with different sequence
    // numbers and payloads.
    let probing = AtomicBool::new(true);
    thread::scope(|scope| {
        let forging = scope.spawn(|| -> anyhow::Result<u32> {
            let mut forged = 0;
            while probing.load(Ordering::Relaxed) {
                let Some(request) = near.request(to) else {
                    continue;
                };
                far.send(to, &request.reply(|_| {}))?;
                near.send(to, &request.reply(|icmp| icmp[PAYLOAD] ^= 0xff))?;
                near.send(to, &request.reply(|icmp| add_to(icmp, SEQUENCE, 9000)))?;
                near.send(to, &request.reply(|icmp| add_to(icmp, IDENTIFIER, 1)))?;
                forged += 1;
            }
            Ok(forged)
        });
        let probed = observer.cli("status --probe");
        probing.store(false, Ordering::Relaxed);
        let forged = forging.join().map_err(|_| anyhow::anyhow!("panicked"))??;
        assert!(forged > 1, "{forged} forged");
        assert_eq!(probed?.code, Some(3), "something is unreachable");
        let expected = u64::from(forged);
        for (reason, expected) in [("wrong-source", expected), ("wrong-payload", 2 * expected)] {
            assert!(ignored(observer, reason)? >= expected, "{reason}");
        }
        Ok::<_, anyhow::Error>(())
    })?;

    let report = observer.status()?;
    let icmp = |name: &str| -> anyhow::Result<String> {
        let node = node(&report, name)?;
        let icmp = node.host.primary_address.icmp.as_ref();
        Ok(icmp.context("no result")?.status.clone())
    };
    assert_eq!(icmp(&silent.full_name())?, "Connection timed out");
    assert_eq!(icmp(&forger.full_name())?, "");
    assert_eq!(samples()?, before);
    Ok(())
}
