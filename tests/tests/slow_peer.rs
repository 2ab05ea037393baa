//! Round trips that take longer than they used to: told with the paths, since when, and whether the time
//! goes to the network or to the peer's host; of nobody else, for as long as it lasts.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_agent::api::types::Diagnosis;
use health_agent::net::netns::NetNs;
use tests::relay::{Handling, Relay};
use tests::{Bed, Node, PATIENCE, wait_for};

/// How long packets are held: far above all that a busy machine adds to a round trip.
const HOLD: Duration = Duration::from_millis(30);
/// Answers of each target that tell what is usual.
const USUAL: u64 = 30;
/// Answers of each target for which a verdict has to stand.
const LASTING: u64 = 60;

/// Four nodes that probe each other often, with all addresses answering.
fn bed() -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(4)
        .ipv6(true)
        .agent_args("--probe-interval 300ms --probe-timeout 300ms --path-mtu-interval off")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok(bed)
}

/// A node's diagnosis of another.
fn diagnosis(by: &Node, of: &Node) -> anyhow::Result<Option<Diagnosis>> {
    let status = by.status()?;
    let peer = status.nodes.into_iter().find(|n| n.name == of.full_name());
    Ok(peer.context("the node is not in the report")?.diagnosis)
}

/// Waits until each target of `of` was answered so many times more.
fn wait_answers(by: &Node, of: &Node, answers: u64) -> anyhow::Result<()> {
    let samples = || -> anyhow::Result<Vec<u64>> {
        let rows = by.listing(&format!("bpf rtt list --peer {}", of.name()))?;
        let rows = rows.as_array().context("no rows")?;
        let probed = rows.iter().filter(|row| row["protocol"] != "tcp");
        Ok(probed.filter_map(|row| row["samples"].as_u64()).collect())
    };
    let before = samples()?;
    ensure!(!before.is_empty(), "{} is not measured", of.name());
    wait_for("answers", Duration::from_secs(30), || {
        let now = samples()?;
        let enough = now
            .iter()
            .zip(&before)
            .all(|(now, old)| now - old >= answers);
        Ok((now.len() == before.len() && enough).then_some(()))
    })
}

/// Has what a node's stack receives on its own addresses held by a relay, behind the programs on its
/// uplink. What its endpoints receive stays as it was.
fn relay_to_stack(node: &Node) -> anyhow::Result<Relay> {
    let uplink: serde_json::Value = serde_json::from_str(&node.exec("ip -json link show eth0")?)?;
    let mac = uplink[0]["address"].as_str().context("no MAC address")?;
    for command in [
        "ip link add late0 type veth peer name late1",
        "ip link add late2 type veth peer name late3",
    ] {
        node.exec(command)?;
    }
    // The stack takes packets for its own that are addressed to the device they come by.
    node.exec(&format!("ip link set late3 address {}", mac))?;
    for device in ["late0", "late1", "late2", "late3"] {
        node.exec(&format!("ip link set {device} addrgenmode none"))?;
        node.exec(&format!("ip link set {device} up"))?;
        node.exec(&format!("sysctl -q -w net.ipv4.conf.{device}.rp_filter=0"))?;
    }
    node.exec("sysctl -q -w net.ipv4.conf.all.rp_filter=0")?;
    let relay = Relay::start(
        &NetNs::open(node.name())?,
        ["late1", "late2"],
        Handling::pass(),
    )?;
    node.exec("tc qdisc add dev eth0 clsact")?;
    let ipv6 = node.ipv6().context("the bed has IPv6")?;
    let ipv4 = node.ipv4();
    // Neighbour discovery stays with the device whose neighbours are asked for.
    for matches in [
        format!("ip u32 match ip dst {ipv4}"),
        format!("ipv6 u32 match ip6 dst {ipv6} match ip6 protocol 6 0xff"),
        format!("ipv6 u32 match ip6 dst {ipv6} match ip6 protocol 58 0xff match u8 128 0xff at 40"),
    ] {
        node.exec(&format!(
            "tc filter add dev eth0 ingress protocol {matches} action mirred egress redirect dev late0"
        ))?;
    }
    Ok(relay)
}

#[test]
#[ignore = "needs root"]
fn exp_network() -> anyhow::Result<()> {
    let bed = bed()?;
    let relay = bed.relay(bed.node(2), Handling::pass())?;
    exp(&bed, relay, 2)
}

#[test]
#[ignore = "needs root"]
fn exp_host() -> anyhow::Result<()> {
    let bed = bed()?;
    let relay = relay_to_stack(bed.node(2))?;
    exp(&bed, relay, 2)
}

fn exp(bed: &Bed, relay: Relay, slow: usize) -> anyhow::Result<()> {
    let t = std::time::Instant::now();
    wait_answers(bed.node(1), bed.node(slow), USUAL)?;
    println!("{:?} usual", t.elapsed());
    let show = |label: &str| -> anyhow::Result<()> {
        println!("==== {label} {:?}", t.elapsed());
        for by in bed.nodes() {
            for of in bed.nodes() {
                if let Some(d) = diagnosis(by, of)? {
                    println!("{} of {}: {} {}", by.name(), of.name(), d.cause, d.message);
                    for e in d.evidence {
                        println!("      - {e}");
                    }
                }
            }
        }
        Ok(())
    };
    show("before")?;
    relay.set_hold(HOLD);
    for i in 0..12 {
        std::thread::sleep(Duration::from_millis(1000));
        show(&format!("slow {i}"))?;
    }
    println!("{}", bed.node(1).cli("status")?.stdout);
    println!("{}", bed.node(1).cli("bpf rtt list -o wide")?.stdout);
    relay.set_hold(Duration::ZERO);
    for i in 0..8 {
        std::thread::sleep(Duration::from_millis(1000));
        show(&format!("after {i}"))?;
    }
    Ok(())
}
