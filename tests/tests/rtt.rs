//! Each probe of an agent is accounted for once, whatever becomes of it on the way.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use health_agent::net::netns::NetNs;
use nix::sys::signal::Signal;
use tests::bed::FABRIC;
use tests::relay::{Handling, Relay, is_echo_request};
use tests::{Bed, Node, wait_for};

const SOON: Duration = Duration::from_secs(20);
/// Where the source stands in an IPv4 packet behind its Ethernet header.
const SOURCE: std::ops::Range<usize> = 26..30;
/// Every so many echo requests of the node are lost.
const ONE_OF: u64 = 7;

/// What the relay between two nodes saw of the first one's echo requests.
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    /// Whether it loses some of them.
    lossy: AtomicBool,
}

/// Two nodes whose agents probe each other by ICMP alone, joined by a relay that loses some of the
/// first one's requests while it is told to.
fn bed() -> anyhow::Result<(Relay, Arc<Seen>, Bed)> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--probe http=off --probe-interval 100ms --probe-timeout 200ms")
        .start()?;
    let own = bed.node(1).ipv4();
    for node in bed.nodes() {
        bed.cut_off(node)?;
    }
    let seen = Arc::new(Seen::default());
    let devices = [bed.node(1).name(), bed.node(2).name()];
    let relay = Relay::start(
        &NetNs::open(FABRIC)?,
        devices,
        Handling::drop_if({
            let seen = seen.clone();
            move |frame| {
                if !is_echo_request(frame) || frame[SOURCE] != own.octets() {
                    return false;
                }
                let number = seen.requests.fetch_add(1, Ordering::Relaxed);
                seen.lossy.load(Ordering::Relaxed) && number.is_multiple_of(ONE_OF)
            }
        }),
    )?;
    Ok((relay, seen, bed))
}

/// Samples and losses of one peer.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    samples: u64,
    lost: u64,
}

fn counts(node: &Node, peer: IpAddr) -> anyhow::Result<Counts> {
    let rows = node.listing("bpf rtt list")?;
    let rows = rows.as_array().context("no list of rows")?;
    let of_peer = rows
        .iter()
        .filter(|row| row["peer"] == peer.to_string() && row["protocol"] == "ICMP");
    of_peer.into_iter().try_fold(Counts::default(), |counts, row| {
        let count = |name: &str| row[name].as_u64().with_context(|| format!("no {name}: {row}"));
        Ok(Counts {
            samples: counts.samples + count("samples")?,
            lost: counts.lost + count("lost")?,
        })
    })
}

fn inflight(node: &Node, peer: IpAddr) -> anyhow::Result<u64> {
    let probes = node.listing("bpf map dump HEALTH_INFLIGHT")?;
    let probes = probes.as_array().context("no list of probes")?;
    let to_peer = probes
        .iter()
        .filter(|probe| probe.to_string().contains(&format!("\"{peer}\"")));
    Ok(to_peer.count() as u64)
}
