//! What monitoring sees: `/metrics` in strict OpenMetrics text, and `/healthz`.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use health_agent::api::monitor::Liveness;
use nix::sys::signal::Signal;
use tests::bed::Node;
use tests::{Bed, wait_for};

const SOON: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(2);
const METRICS_PORT: u16 = 9962;
const HEALTHZ_PORT: u16 = 9879;

/// Status code and body of `GET path`, asked from within the node's namespace.
fn get(node: &Node, address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let response = node.run_in(|| -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    })??;
    let (head, body) = response.split_once("\r\n\r\n").context("no HTTP")?;
    let code = head.split(' ').nth(1).context("no status line")?.parse()?;
    Ok((code, body.to_owned()))
}

/// Samples by name and labels, the labels in the order they are written.
type Samples = BTreeMap<String, f64>;

fn scrape(node: &Node) -> anyhow::Result<Samples> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT));
    let (code, body) = get(node, address, "/metrics")?;
    ensure!(code == 200, "{code}: {body}");
    parse(&body).with_context(|| format!("not OpenMetrics:\n{body}"))
}

/// Reads OpenMetrics text, and refuses what is not described, repeated, or out of order.
fn parse(text: &str) -> anyhow::Result<Samples> {
    let body = text.strip_suffix("# EOF\n").context("no end")?;
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut family = None;
    let mut samples = Samples::new();
    for line in body.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').context("no help")?;
            ensure!(!help.is_empty(), "no help for {name}");
            ensure!(!kinds.contains_key(name), "{name} comes twice");
            family = Some(name);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').context("no type")?;
            ensure!(
                family == Some(name),
                "the type of {name} is not below its help"
            );
            kinds.insert(name, kind);
        } else {
            let family = family.context("a sample without a description")?;
            let (series, value) = line.rsplit_once(' ').context("no value")?;
            let name = series.split('{').next().unwrap_or_default();
            let suffix = name.strip_prefix(family);
            let suffix = suffix.with_context(|| format!("{name} stands under {family}"))?;
            let allowed: &[&str] = match *kinds.get(family).context("no type")? {
                "counter" => &["_total"],
                "gauge" => &[""],
                "info" => &["_info"],
                "histogram" => &["_sum", "_count", "_bucket"],
                kind => bail!("{family} is a {kind}"),
            };
            ensure!(allowed.contains(&suffix), "{name} is no name for its type");
            check_labels(&series[name.len()..]).with_context(|| series.to_owned())?;
            let value: f64 = value.parse().with_context(|| line.to_owned())?;
            let first = samples.insert(series.to_owned(), value).is_none();
            ensure!(first, "{series} comes twice");
        }
    }
    Ok(samples)
}

/// `{name="value",...}` or nothing; our values hold no quotes.
fn check_labels(labels: &str) -> anyhow::Result<()> {
    if labels.is_empty() {
        return Ok(());
    }
    let inner = labels.strip_prefix('{').and_then(|l| l.strip_suffix('}'));
    for label in inner.context("no braces")?.split(',') {
        let (name, value) = label.split_once('=').context("no label")?;
        let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        ensure!(!name.is_empty() && name.chars().all(in_name), "{name}");
        ensure!(value.len() >= 2 && value.starts_with('"') && value.ends_with('"'));
    }
    Ok(())
}

fn status(node: &Node, kind: &str, status: &str) -> String {
    format!(
        "health_agent_node_health_connectivity_status{{source_cluster=\"default\",\
         source_node_name=\"{}\",type=\"{kind}\",status=\"{status}\"}}",
        node.name()
    )
}

fn probes(kind: &str, protocol: &str, result: &str) -> String {
    format!(
        "health_agent_node_health_probes_total{{type=\"{kind}\",protocol=\"{protocol}\",\
         result=\"{result}\"}}"
    )
}

/// Counters and parts of histograms.
fn is_monotone(series: &str) -> bool {
    let name = series.split('{').next().unwrap_or_default();
    ["_total", "_sum", "_count", "_bucket"]
        .iter()
        .any(|suffix| name.ends_with(suffix))
}

#[test]
#[ignore = "needs root"]
fn metrics_follow_a_peer_that_dies_comes_back_and_leaves() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--probe-interval 500ms --probe-timeout 200ms")
        .start()?;
    bed.wait_all_reachable(SOON)?;
    let (node, peer) = (bed.node(1), bed.node(2));

    let healthy = scrape(node)?;
    for kind in ["node", "endpoint"] {
        assert_eq!(healthy[&status(node, kind, "reachable")], 2.0);
        assert_eq!(healthy[&status(node, kind, "unreachable")], 0.0);
        for protocol in ["icmp", "http"] {
            let count = healthy[&probes(kind, protocol, "answered")];
            assert!(count >= 2.0, "{kind} {protocol}: {count}");
            let class = format!(
                "source_cluster=\"default\",source_node_name=\"{}\",type=\"{kind}\",\
                 protocol=\"{protocol}\",address_type=\"primary\"}}",
                node.name()
            );
            let latency = "health_agent_node_health_connectivity_latency_seconds";
            assert_eq!(healthy[&format!("{latency}_count{{{class}")], count);
            assert_eq!(
                healthy[&format!("{latency}_bucket{{le=\"+Inf\",{class}")],
                count
            );
            let sum = healthy[&format!("{latency}_sum{{{class}")];
            assert!(sum > 0.0 && sum < count * 0.2, "{sum} s in {count}");
        }
    }
    assert_eq!(healthy["health_agent_unreachable_nodes"], 0.0);
    assert_eq!(healthy["health_agent_datapath_maps_readable"], 1.0);
    let forwards = |series: &String| series.starts_with("health_agent_forward_count_total{");
    assert!(healthy.keys().any(forwards), "{healthy:?}");
    let failing = |samples: &Samples| -> Vec<String> {
        let names = samples.keys().filter(|series| series.contains("_failing{"));
        names.cloned().collect()
    };
    assert_eq!(failing(&healthy), [""; 0]);

    peer.kill_agent(Signal::SIGKILL)?;
    let degraded = wait_for("both HTTP paths to fail", SOON, || {
        let samples = scrape(node)?;
        Ok((failing(&samples).len() == 2).then_some(samples))
    })?;
    for kind in ["node", "endpoint"] {
        assert_eq!(degraded[&status(node, kind, "reachable")], 1.0);
        assert_eq!(degraded[&status(node, kind, "unreachable")], 1.0);
        assert!(degraded[&probes(kind, "http", "lost")] >= 1.0);
    }
    for series in failing(&degraded) {
        let target = format!("target_node_name=\"{}\"", peer.name());
        assert!(series.contains(&target), "{series}");
        assert!(series.contains("protocol=\"http\""), "{series}");
    }
    assert_eq!(degraded["health_agent_unreachable_nodes"], 1.0);
    assert_eq!(degraded["health_agent_unreachable_health_endpoints"], 1.0);

    bed.write_nodes_file(&tests::bed::registry(&bed.nodes()[..1]))?;
    let alone = wait_for("the peer to leave the metrics", SOON, || {
        let samples = scrape(node)?;
        Ok(failing(&samples).is_empty().then_some(samples))
    })?;
    assert_eq!(alone[&status(node, "node", "reachable")], 1.0);
    for (series, before) in degraded.iter().filter(|(series, _)| is_monotone(series)) {
        let now = alone.get(series);
        assert!(
            now.is_some_and(|now| now >= before),
            "{series} fell: {now:?}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn healthz_is_the_agents_own_whatever_peers_do() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args("--probe-interval 500ms --probe-timeout 200ms")
        .start()?;
    bed.wait_all_reachable(SOON)?;
    let node = bed.node(1);
    bed.node(2).kill_agent(Signal::SIGKILL)?;
    wait_for("the peer to be unreachable", SOON, || {
        Ok((node.cli("status")?.code == Some(3)).then_some(()))
    })?;
    for address in [
        SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ_PORT)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, HEALTHZ_PORT)),
    ] {
        let (code, body) = get(node, address, "/healthz")?;
        assert_eq!(code, 200, "{body}");
        let liveness: Liveness = serde_json::from_str(&body)?;
        assert_eq!(liveness.state, "Ok", "{body}");
        assert!(liveness.failing.is_empty(), "{body}");
    }
    Ok(())
}
