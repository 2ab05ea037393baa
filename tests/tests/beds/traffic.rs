//! Round trips of real TCP connections: those of the probes, and other traffic.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use health_model::api::RttSource;
use serde_json::Value;
use tests::{Bed, Node, PATIENCE, wait_for};

const PORT: u16 = 5001;
/// Bytes per write: many full-sized segments.
const CHUNK: usize = 256 * 1024;
/// Above any round trip on one machine, however busy.
const PLAUSIBLE_NS: u64 = 1_000_000_000;

/// The row of `bpf rtt list` for an address and a protocol.
fn row(node: &Node, peer: IpAddr, protocol: &str) -> anyhow::Result<Option<Value>> {
    let Value::Array(rows) = node.listing("bpf rtt list")? else {
        anyhow::bail!("the rows are no list");
    };
    Ok(rows
        .into_iter()
        .find(|row| row["peer"] == peer.to_string() && row["protocol"] == protocol))
}

fn samples(node: &Node, peer: IpAddr, protocol: &str) -> anyhow::Result<u64> {
    let row = row(node, peer, protocol)?;
    Ok(row.and_then(|row| row["samples"].as_u64()).unwrap_or(0))
}

/// A server in one node's namespace and a client in another's. The client sends until this is dropped.
struct Traffic<'scope> {
    stop: &'scope AtomicBool,
}

impl<'scope> Traffic<'scope> {
    fn start<'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        stop: &'scope AtomicBool,
        (from, to): (&'scope Node, &'scope Node),
        address: IpAddr,
    ) -> anyhow::Result<Self> {
        let address = SocketAddr::new(address, PORT);
        let listener = to.run_in(|| TcpListener::bind(address))??;
        let client = from.run_in(|| TcpStream::connect(address))??;
        let (server, _) = listener.accept()?;
        scope.spawn(move || drain(server));
        scope.spawn(move || send(client, stop));
        Ok(Self { stop })
    }
}

impl Drop for Traffic<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn send(mut to: TcpStream, stop: &AtomicBool) {
    let chunk = vec![0; CHUNK];
    while !stop.load(Ordering::Relaxed) && to.write_all(&chunk).is_ok() {
        // Leaves CPU time for the agents.
        thread::sleep(Duration::from_millis(5));
    }
}

fn drain(mut from: TcpStream) {
    let mut buffer = vec![0; CHUNK];
    while from.read(&mut buffer).is_ok_and(|len| len > 0) {}
}

#[test]
#[ignore = "needs root"]
fn connections_to_peers_are_timed_in_the_kernel() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));
    for address in peer.addresses() {
        assert_eq!(row(node, address, "TCP")?, None, "no traffic yet");
        let stop = AtomicBool::new(false);
        thread::scope(|scope| -> anyhow::Result<()> {
            let _traffic = Traffic::start(scope, &stop, (node, peer), address)?;
            // More samples than the handshake alone provides.
            let found = wait_for("round trips of data", PATIENCE, || {
                let row = row(node, address, "TCP")?;
                Ok(row.filter(|row| row["samples"].as_u64() > Some(5)))
            })?;
            assert_eq!(found["path"], "host");
            assert_eq!(found["source"], "kernel");
            assert_eq!(found["lost"], 0);
            for figure in ["min-ns", "p50-ns", "max-ns"] {
                let ns = found[figure].as_u64().context("a time")?;
                assert!((1..PLAUSIBLE_NS).contains(&ns), "{figure} of {found}");
            }
            Ok(())
        })?;
        // The peer only times the handshake, because it receives no data to time.
        let back = node.addresses().into_iter();
        for back in back.filter(|back| back.is_ipv4() == address.is_ipv4()) {
            let row = row(peer, back, "TCP")?.context("the handshake")?;
            assert_eq!(row["source"], "kernel");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn http_probes_report_the_round_trip_of_their_handshake() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args("--passive-rtt off")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    for peer in &node.status()?.nodes {
        let is_local = peer.name == node.full_name();
        let endpoint = peer.health_endpoint.iter();
        for path in peer
            .host
            .paths()
            .chain(endpoint.flat_map(|group| group.paths()))
        {
            let http = path.http.as_ref().context("an HTTP result")?;
            let connect = http.connect_latency.context("a time of the connection")?;
            let total = http.total_latency.context("a time of the answer")?;
            assert!(0 < http.latency && http.latency <= connect && connect < total);
            let row = row(node, path.ip, "HTTP")?.context("an HTTP row")?;
            let (source, name) = if is_local {
                // The connection does not cross an uplink.
                (RttSource::Socket, "socket")
            } else {
                (RttSource::Kernel, "kernel")
            };
            assert_eq!(http.rtt_source, Some(source), "{path:?}");
            assert_eq!(row["source"], name, "{row}");
        }
    }
    // A different client connects to that port.
    let before = samples(node, bed.node(2).ipv4().into(), "HTTP")?;
    for _ in 0..3 {
        assert_eq!(node.hello(bed.node(2).ipv4().into())?, 200);
    }
    let after = samples(node, bed.node(2).ipv4().into(), "HTTP")?;
    assert!(after < before + 3, "{before} round trips, then {after}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_busy_peer_is_probed_less_often_by_icmp_and_as_often_by_http() -> anyhow::Result<()> {
    const PROBES: u64 = 20;
    let bed = Bed::builder()
        .nodes(2)
        .probing(300, 300)
        .agent_args("--passive-relief 5")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));
    let address = IpAddr::from(peer.ipv4());
    // The number of ICMP probes sent during `http` HTTP probes.
    let icmp_of = |http: u64| -> anyhow::Result<u64> {
        let counts = || {
            anyhow::Ok((
                samples(node, address, "ICMP")?,
                samples(node, address, "HTTP")?,
            ))
        };
        let (icmp_before, http_before) = counts()?;
        wait_for("HTTP probes", PATIENCE, || {
            let (icmp, now) = counts()?;
            Ok((now >= http_before + http).then_some(icmp - icmp_before))
        })
    };
    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> anyhow::Result<()> {
        let _traffic = Traffic::start(scope, &stop, (node, peer), address)?;
        wait_for("round trips of data", PATIENCE, || {
            Ok((samples(node, address, "TCP")? > 5).then_some(()))
        })?;
        let icmp = icmp_of(PROBES)?;
        // One in five, plus the probes that follow lost or late ones on a busy machine.
        assert!((1..=PROBES * 2 / 3).contains(&icmp), "{icmp} ICMP probes");
        Ok(())
    })?;
    let icmp = icmp_of(PROBES)?;
    assert!(icmp >= PROBES * 2 / 3, "{icmp} ICMP probes without traffic");
    Ok(())
}
