//! Round trips that take longer than before are reported with the paths, the start time, and whether the network or the
//! peer's host is slow. The report is about no other node, and stays as long as the fault does.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::api::{Diagnosis, Protocol, Reachability, TargetHistory};
use health_net::netns::NetNs;
use jiff::Timestamp;
use nix::sys::signal::Signal;
use tests::relay::{Handling, Relay};
use tests::{Bed, Node, PATIENCE, slowness, wait_for};

/// How long the relay holds packets, times the slowness of the machine: far longer than a busy machine delays a round
/// trip.
const HOLD: Duration = Duration::from_millis(30);
/// Time between two probes of a target, and the probe timeout, in milliseconds. On slow machines,
/// [`Builder::probing`](tests::bed::Builder::probing) extends both, and so does this test: where four agents overload a
/// CPU, all of them are slow.
const INTERVAL_MS: u32 = 300;
/// Answers per target that establish the usual round trip.
const USUAL: u64 = 30;
/// Answers before a shift that may count as its start: one in ten exceeds the usual round trip.
const DOUBTFUL: u64 = 10;
/// Number of replies per target during which a diagnosis must stay in place.
const LASTING: u64 = 30;

/// Four nodes that probe each other often, with all addresses answering. The nodes whose reports are checked took no
/// measurements while the others started.
fn bed() -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(4)
        .ipv6(true)
        .probing(INTERVAL_MS * slowness(), INTERVAL_MS * slowness())
        .agent_args("--path-mtu-interval off")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    for index in [3, 1] {
        let node = bed.node(index);
        node.kill_agent(Signal::SIGTERM)?;
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    Ok(bed)
}

/// A node's diagnosis of another node.
fn diagnosis(by: &Node, of: &Node) -> anyhow::Result<Option<Diagnosis>> {
    let status = by.status()?;
    let peer = status.nodes.into_iter().find(|n| n.name == of.full_name());
    Ok(peer.context("the node is not in the report")?.diagnosis)
}

/// Waits until each target on `of` has answered this many more probes.
fn wait_answers(by: &Node, of: &Node, answers: u64) -> anyhow::Result<()> {
    let samples = || -> anyhow::Result<Vec<u64>> {
        let rows = by.listing(&format!("bpf rtt list --peer {}", of.name()))?;
        let rows = rows.as_array().context("no rows")?;
        let probed = rows.iter().filter(|row| row["protocol"] != "tcp");
        Ok(probed.filter_map(|row| row["samples"].as_u64()).collect())
    };
    let before = samples()?;
    ensure!(!before.is_empty(), "{} is not measured", of.name());
    let waited = wait_for("answers", PATIENCE, || {
        let now = samples()?;
        let enough = now
            .iter()
            .zip(&before)
            .all(|(now, old)| now - old >= answers);
        Ok((now.len() == before.len() && enough).then_some(()))
    });
    waited.with_context(|| seen(by, of, diagnosis(by, of).ok().flatten().as_ref()))
}

/// Waits until few echoes take as long as the held ones will. A round trip within the usual range does not count as a
/// shift.
fn wait_steady(by: &Node, of: &Node) -> anyhow::Result<()> {
    let most = HOLD * slowness() / 2;
    let is_steady = |target: &TargetHistory| {
        let mut nine_tenths = target.windows.iter().map(|window| window.p90_ns);
        nine_tenths.all(|p90| p90.is_some_and(|p90| Duration::from_nanos(p90) < most))
    };
    let waited = wait_for("steady echoes", PATIENCE, || {
        let mut shown = by.listing(&format!("node get {}", of.name()))?;
        let history: Vec<TargetHistory> = serde_json::from_value(shown["history"].take())?;
        let mut echoes = history.iter().filter(|t| t.protocol == Protocol::Icmp);
        ensure!(!history.is_empty(), "{} has no history", of.name());
        Ok(echoes.all(is_steady).then_some(()))
    });
    waited.with_context(|| seen(by, of, None))
}

/// Makes a relay hold packets to a node's own addresses between the programs on its uplink and its stack. Packets to
/// its endpoints are not affected.
fn relay_to_stack(node: &Node) -> anyhow::Result<Relay> {
    let uplink: serde_json::Value = serde_json::from_str(&node.exec("ip -json link show eth0")?)?;
    let mac = uplink[0]["address"].as_str().context("no MAC address")?;
    for command in [
        "ip link add late0 type veth peer name late1",
        "ip link add late2 type veth peer name late3",
    ] {
        node.exec(command)?;
    }
    // The stack only accepts packets sent to the MAC address of the receiving device.
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
    // On kernels without TCX, the agent's own filters have already created the qdisc.
    if !node.exec("tc qdisc show dev eth0")?.contains("clsact") {
        node.exec("tc qdisc add dev eth0 clsact")?;
    }
    let ipv6 = node.ipv6().context("the bed has IPv6")?;
    let ipv4 = node.ipv4();
    // Neighbour discovery must stay on the device whose neighbours are resolved.
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

/// The time since which round trips are slow, from a diagnosis.
fn since(reported: &str) -> anyhow::Result<Timestamp> {
    let (_, rest) = reported.split_once(", since ").context("since when?")?;
    let time = rest.split([';', ',']).next().unwrap_or(rest);
    Ok(time.parse()?)
}

/// Waits until `by` reports a latency shift of `of` that contains these words.
fn wait_reported(by: &Node, of: &Node, words: &str) -> anyhow::Result<Diagnosis> {
    let mut last = None;
    let reported = wait_for(words, PATIENCE, || {
        last = diagnosis(by, of)?;
        let wanted = |reported: &Diagnosis| {
            reported.cause == "latency-shift" && reported.message.contains(words)
        };
        Ok(last.clone().filter(wanted))
    });
    reported.with_context(|| seen(by, of, last.as_ref()))
}

/// What a node reports about another node, for error messages.
fn seen(by: &Node, of: &Node, reported: Option<&Diagnosis>) -> String {
    let shown = by.cli(&format!("status --verbose --node {}", of.name()));
    let shown = shown.map(|ran| ran.stdout).unwrap_or_default();
    format!("{} of {}: {reported:#?}\n{shown}", by.name(), of.name())
}

/// Waits until `by` reports nothing about `of`, or only a report with the words in `but`, which is returned.
fn wait_quiet(by: &Node, of: &Node, but: Option<&str>) -> anyhow::Result<Option<Diagnosis>> {
    let mut last = None;
    let quiet = wait_for("no diagnosis", PATIENCE, || {
        last = diagnosis(by, of)?;
        let is_quiet = last
            .as_ref()
            .is_none_or(|reported| but.is_some_and(|but| reported.message.contains(but)));
        Ok(is_quiet.then_some(()))
    });
    quiet.with_context(|| seen(by, of, last.as_ref()))?;
    Ok(last)
}

/// The report that other nodes must make about a node whose packets are held.
struct ExpectedReport {
    /// Where the delay occurs.
    place: &'static str,
    /// Number of addresses whose echoes are slow. HTTP is not counted: agents answer it, and on a busy machine they may
    /// be slow at any address.
    slow_addresses: usize,
    /// What the node itself reports about the other nodes, if anything.
    by_itself: &'static str,
}

/// Slows the second node down, checks the reports, and releases the node.
fn slow_down(bed: &Bed, relay: &Relay, expected: &ExpectedReport) -> anyhow::Result<()> {
    let [near, slow, far, other] = [1, 2, 3, 4].map(|index| bed.node(index));
    for by in [near, far] {
        wait_answers(by, slow, USUAL)?;
        wait_steady(by, slow)?;
        wait_quiet(by, slow, None)?;
    }

    // The report has whole seconds.
    let earliest = Timestamp::now() - Duration::from_secs(1);
    wait_answers(near, slow, DOUBTFUL)?;
    relay.set_hold(HOLD * slowness());
    for by in [near, far] {
        wait_reported(by, slow, expected.place)?;
    }
    // The report stays as long as the fault.
    wait_answers(near, slow, LASTING)?;
    let reported = wait_reported(near, slow, expected.place)?;
    println!(
        "{}\n  - {}",
        reported.message,
        reported.evidence.join("\n  - ")
    );
    let by_icmp = |reported: &&String| reported.starts_with("ICMP");
    let echoes = reported.evidence.iter().filter(by_icmp).count();
    assert_eq!(echoes, expected.slow_addresses, "{reported:#?}");
    for reported in reported.evidence.iter().chain([&reported.message]) {
        let since = since(reported)?;
        ensure!((earliest..Timestamp::now()).contains(&since), "{reported}");
    }
    // On a busy machine, an HTTP answer may miss its timeout.
    let waited = wait_for("the node to be degraded", PATIENCE, || {
        let status = near.status()?;
        let node = status.nodes.iter().find(|n| n.name == slow.full_name());
        let node = node.context("the node is not in the report")?;
        Ok((node.reachability() == Reachability::Degraded).then_some(()))
    });
    waited.with_context(|| seen(near, slow, Some(&reported)))?;
    // The times in the diagnosis change with each answer.
    wait_for("the diagnosis in the table", PATIENCE, || {
        let reported = wait_reported(near, slow, expected.place)?;
        let shown = near.cli("status --verbose --node hnode2")?.success()?;
        Ok(shown
            .contains(&format!("Diagnosis:   {}", reported.message))
            .then_some(()))
    })?;

    for by in [near, far, other] {
        for of in [near, far, other] {
            wait_quiet(by, of, None)?;
        }
        if let Some(reported) = wait_quiet(slow, by, Some(expected.by_itself))? {
            println!("by itself: {}", reported.message);
        }
    }

    relay.set_hold(Duration::ZERO);
    for node in [near, far, other] {
        wait_quiet(node, slow, None)?;
        wait_quiet(slow, node, None)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_slow_network_is_distinguished_from_a_slow_host() -> anyhow::Result<()> {
    let bed = bed()?;
    let relay = bed.relay(bed.node(2), Handling::pass())?;
    let expected = ExpectedReport {
        place: "of the increase in the network",
        slow_addresses: 4,
        by_itself: "of the increase in the network",
    };
    slow_down(&bed, &relay, &expected)
}

#[test]
#[ignore = "needs root"]
fn a_slow_host_is_distinguished_from_a_slow_network() -> anyhow::Result<()> {
    let bed = bed()?;
    let relay = relay_to_stack(bed.node(2))?;
    let expected = ExpectedReport {
        place: "of the increase in the peer's host; its health endpoint, for which eBPF answers, is as \
                fast as before",
        slow_addresses: 2,
        by_itself: "of the increase in this host",
    };
    slow_down(&bed, &relay, &expected)
}
