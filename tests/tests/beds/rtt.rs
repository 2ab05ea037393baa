//! Every probe of an agent is counted exactly once, whatever happens to it on the path.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::ensure;
use health_datapath::dump::Pinned;
use health_model::settings::Location;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use tests::bed::{BPFFS, FABRIC};
use tests::relay::{Handling, Relay, is_echo_request};
use tests::{Bed, Node, PATIENCE, wait_for};

/// Byte range of the source address in an Ethernet frame with an IPv4 packet.
const SOURCE: std::ops::Range<usize> = 26..30;
/// The relay drops one in this many echo requests of the node.
const ONE_OF: u64 = 3;

/// The echo requests of the first node that the relay between the two nodes has seen.
#[derive(Default)]
struct RelayTally {
    requests: AtomicU64,
    /// Whether the relay drops some requests.
    lossy: AtomicBool,
}

/// Two nodes whose agents probe each other only by ICMP, joined by a relay that drops some of the first node's requests
/// while `lossy` is set.
fn bed(lossy: bool) -> anyhow::Result<(Relay, Arc<RelayTally>, Bed)> {
    let bed = Bed::builder()
        .nodes(2)
        .without_agents()
        .agent_args("--probe http=off --probe-interval 100ms --probe-timeout 100ms")
        .start()?;
    let own = bed.node(1).ipv4();
    let seen = Arc::new(RelayTally::default());
    seen.lossy.store(lossy, Ordering::Relaxed);
    let drops = {
        let seen = seen.clone();
        move |frame: &[u8]| {
            if !is_echo_request(frame) || frame[SOURCE] != own.octets() {
                return false;
            }
            let number = seen.requests.fetch_add(1, Ordering::Relaxed);
            seen.lossy.load(Ordering::Relaxed) && number.is_multiple_of(ONE_OF)
        }
    };
    for node in bed.nodes() {
        bed.cut_off(node)?;
    }
    let devices = [bed.node(1).name(), bed.node(2).name()];
    let relay = Relay::start(&NetNs::open(FABRIC)?, devices, Handling::drop_if(drops))?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    Ok((relay, seen, bed))
}

/// Counters for a peer in a node's maps.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    samples: u64,
    lost: u64,
    inflight: u64,
}

impl Counts {
    fn of(node: &Node, peer: IpAddr) -> anyhow::Result<Self> {
        let pinned = Pinned::open(&Location {
            instance: node.name().to_owned(),
            runtime_dir: node.runtime_dir(),
            state_dir: node.runtime_dir(),
            bpf_root: BPFFS.into(),
        })?;
        let mut counts = Self::default();
        pinned.each_rtt(&mut |key, row| {
            if key.peer.to_ip() == peer {
                counts.samples += row.samples;
                counts.lost += row.lost;
            }
        })?;
        let inflight = pinned.inflight()?;
        let to_peer = inflight
            .iter()
            .filter(|(_, probe)| probe.peer.to_ip() == peer);
        counts.inflight = to_peer.count() as u64;
        Ok(counts)
    }
}

#[test]
#[ignore = "needs root"]
fn as_many_probes_are_lost_as_were_dropped() -> anyhow::Result<()> {
    const DROPPED: u64 = 10;
    const ANSWERED: u64 = 20;
    let (relay, seen, bed) = bed(false)?;
    let (node, peer) = (bed.node(1), bed.node(2).ipv4().into());
    wait_for("answers", PATIENCE, || {
        Ok((Counts::of(node, peer)?.samples >= ANSWERED).then_some(()))
    })?;
    assert_eq!(Counts::of(node, peer)?.lost, 0);

    seen.lossy.store(true, Ordering::Relaxed);
    wait_for("requests to be dropped", PATIENCE, || {
        Ok((relay.dropped() >= DROPPED).then_some(()))
    })?;
    seen.lossy.store(false, Ordering::Relaxed);
    let lossy = wait_for("all of them to be given up", PATIENCE, || {
        let counts = Counts::of(node, peer)?;
        Ok((counts.lost >= relay.dropped()).then_some(counts))
    })?;
    assert_eq!(lossy.lost, relay.dropped(), "{lossy:?}");

    // Meanwhile, no answered probe is counted as lost, and no lost probe is counted twice.
    wait_for("more answers", PATIENCE, || {
        Ok((Counts::of(node, peer)?.samples >= lossy.samples + ANSWERED).then_some(()))
    })?;
    assert_eq!(Counts::of(node, peer)?.lost, relay.dropped());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn samples_losses_and_probes_in_flight_are_all_that_were_sent() -> anyhow::Result<()> {
    const REQUESTS: u64 = 60;
    let (relay, seen, bed) = bed(true)?;
    let (node, peer) = (bed.node(1), bed.node(2).ipv4().into());
    let requests = || seen.requests.load(Ordering::Relaxed);
    wait_for("enough requests", PATIENCE, || {
        Ok((requests() >= REQUESTS).then_some(()))
    })?;
    // The agent is killed while probes are in flight.
    node.kill_agent(Signal::SIGKILL)?;
    let counts = wait_for("the sum", PATIENCE, || {
        let counts = Counts::of(node, peer)?;
        let sum = counts.samples + counts.lost + counts.inflight;
        ensure!(sum == requests(), "{counts:?} of {} requests", requests());
        Ok(Some(counts))
    })?;
    assert!(counts.samples > 0 && counts.lost > 0, "{counts:?}");
    assert!(
        counts.lost + counts.inflight >= relay.dropped(),
        "{counts:?}"
    );
    Ok(())
}
