//! The listings of maps and programs reflect the traffic, with and without an agent.

use std::net::IpAddr;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Number of requests sent, and the size of their IP packets: 20 bytes of IP, 8 of ICMP and 100 of payload.
const ECHOES: u64 = 5;
const ECHO_BYTES: u64 = 128;

/// Two nodes. The second one has pinged the health endpoint of the first.
struct PingedBed {
    bed: Bed,
    endpoint: IpAddr,
    answered_before: u64,
}

impl PingedBed {
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(2).start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let endpoint = bed.node(1).health_ipv4()?;
        let answered_before = answered(bed.node(1))?;
        bed.node(2)
            .exec(&format!("ping -q -n -i 0.01 -s 100 -c {ECHOES} {endpoint}"))?;
        Ok(Self {
            bed,
            endpoint,
            answered_before,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }
}

fn rows(node: &Node, listing: &str) -> anyhow::Result<Vec<Value>> {
    match node.listing(listing)? {
        Value::Array(rows) => Ok(rows),
        other => anyhow::bail!("{listing} is not a list: {other}"),
    }
}

fn answered(node: &Node) -> anyhow::Result<u64> {
    Ok(rows(node, "bpf metrics list")?
        .iter()
        .filter(|row| row["reason"] == "Echo answered")
        .filter_map(|row| row["packets"].as_u64())
        .sum())
}

fn is_from_peer(row: &&Value) -> bool {
    row["protocol"] == "ICMP" && row["direction"] == "in" && row["source"] == "172.30.0.2"
}

/// The entry of the pinging program; that node's agent has an entry of its own.
fn ping_entry(pinged: &PingedBed) -> anyhow::Result<Value> {
    rows(pinged.node(), "bpf ct list")?
        .iter()
        .filter(is_from_peer)
        .find(|row| row["rx-bytes"] == ECHOES * ECHO_BYTES)
        .cloned()
        .context("no entry of the ping")
}

#[test]
#[ignore = "needs root"]
fn conntrack_counts_both_directions() -> anyhow::Result<()> {
    let pinged = PingedBed::start()?;
    let entry = ping_entry(&pinged)?;
    assert_eq!(entry["destination"], pinged.endpoint.to_string());
    for direction in ["rx", "tx"] {
        assert_eq!(entry[format!("{direction}-packets")], ECHOES);
        assert_eq!(entry[format!("{direction}-bytes")], ECHOES * ECHO_BYTES);
    }

    let id = rows(pinged.node(), "endpoint list")?[0]["id"].clone();
    let of_endpoint = rows(pinged.node(), &format!("bpf ct list {id}"))?;
    assert!(
        of_endpoint
            .iter()
            .any(|row| row["rx-bytes"] == entry["rx-bytes"])
    );
    let text = pinged.node().cli("bpf ct list")?.success()?;
    let line = format!("-> {}:0 ", pinged.endpoint);
    assert!(
        text.lines()
            .any(|row| row.starts_with("ICMP IN 172.30.0.2:") && row.contains(&line))
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn answers_are_counted() -> anyhow::Result<()> {
    let pinged = PingedBed::start()?;
    // The agents' own probes count too.
    assert!(answered(pinged.node())? >= pinged.answered_before + ECHOES);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn probes_of_the_agent_have_times_and_translations_of_their_own() -> anyhow::Result<()> {
    let pinged = PingedBed::start()?;
    let node = pinged.node();
    let peer = pinged.bed.node(2).ipv4().to_string();
    let times = rows(node, "bpf rtt list")?;
    let to_peer = times
        .iter()
        .find(|row| row["peer"] == peer.as_str() && row["protocol"] == "ICMP")
        .context("no times of the peer")?;
    assert_eq!(to_peer["source"], "kernel");
    assert_eq!(to_peer["path"], "host");
    assert_eq!(to_peer["lost"], 0);
    let number = |field: &str| to_peer[field].as_u64().unwrap_or_default();
    assert!(number("samples") > 0, "{to_peer}");
    assert!(
        0 < number("min-ns") && number("min-ns") <= number("max-ns"),
        "{to_peer}"
    );

    let translations = rows(node, "bpf nat list")?;
    for direction in ["out", "in"] {
        let translation = translations
            .iter()
            .find(|row| {
                row["direction"] == direction
                    && (row["destination"] == peer.as_str() || row["source"] == peer.as_str())
            })
            .with_context(|| format!("no translation {direction}"))?;
        assert_eq!(translation["host-local"], true);
        assert_eq!(translation["translated-address"], "172.30.0.1");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn programs_and_maps_are_listed_and_each_map_can_be_dumped() -> anyhow::Result<()> {
    let pinged = PingedBed::start()?;
    let node = pinged.node();
    let programs = rows(node, "bpf prog list")?;
    for (program, hook) in [
        ("from_endpoint", "lxc_health/ingress"),
        ("to_endpoint", "lxc_health/egress"),
        ("from_netdev", "eth0/ingress"),
        ("to_netdev", "eth0/egress"),
    ] {
        let row = programs
            .iter()
            .find(|row| row["name"] == program)
            .with_context(|| format!("no program {program}"))?;
        assert_eq!(row["attached"], serde_json::json!([hook]), "{program}");
        assert!(row["verified-instructions"].as_u64() > Some(0), "{program}");
    }

    let maps = rows(node, "bpf map list")?;
    for name in [
        "HEALTH_CONFIG",
        "HEALTH_CT4",
        "HEALTH_CT6",
        "HEALTH_CT_ANY4",
        "HEALTH_CT_ANY6",
        "HEALTH_ENDPOINTS",
        "HEALTH_INFLIGHT",
        "HEALTH_METRICS",
        "HEALTH_NAT4",
        "HEALTH_NAT6",
        "HEALTH_NAT_ANY4",
        "HEALTH_NAT_ANY6",
        "HEALTH_RTT",
    ] {
        assert!(maps.iter().any(|row| row["name"] == name), "no map {name}");
    }
    for map in &maps {
        let name = map["name"].as_str().context("a map without a name")?;
        if map["kind"] == "ringbuf" {
            continue;
        }
        let is_empty = || anyhow::Ok(rows(node, &format!("bpf map dump {name}"))?.is_empty());
        let is_dumped_empty = is_empty()?;
        let Some(count) = map["entries"].as_u64() else {
            continue;
        };
        if is_dumped_empty == (count == 0) {
            continue;
        }
        // Between the count and the dump, the first entry may have appeared or the last one disappeared.
        let what = format!("the dump of {name} to be as its count");
        wait_for(&what, PATIENCE, || {
            let maps = rows(node, "bpf map list")?;
            let map = maps.iter().find(|row| row["name"] == name);
            let count = map.and_then(|map| map["entries"].as_u64());
            Ok((count.map(|count| count == 0) == Some(is_empty()?)).then_some(()))
        })?;
    }
    let unknown = node.cli("bpf map dump NO_SUCH_MAP")?;
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.stderr.contains("HEALTH_CT4"), "{}", unknown.stderr);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn listings_need_no_agent() -> anyhow::Result<()> {
    let pinged = PingedBed::start()?;
    pinged.node().kill_agent(Signal::SIGKILL)?;
    ping_entry(&pinged)?;
    for listing in ["nat", "rtt", "metrics", "map", "prog", "endpoint"] {
        let rows = rows(pinged.node(), &format!("bpf {listing} list"))?;
        assert!(!rows.is_empty(), "{listing}");
    }
    Ok(())
}
