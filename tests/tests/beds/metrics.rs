//! `/metrics` in all its formats, and the alerts based on it.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::Signal;
use tests::bed::Node;
use tests::http::{METRICS_PORT, get, get_as};
use tests::process::{run, run_with_input};
use tests::{Bed, PATIENCE, wait_for};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";
const CLASSIC: &str = "text/plain; version=0.0.4";

/// The metrics in the requested format, unparsed.
fn scrape_text(node: &Node, format: &str) -> anyhow::Result<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT));
    let (code, content_type, body) = get_as(node, address, "/metrics", format)?;
    ensure!(code == 200, "{code}: {body}");
    ensure!(
        content_type.starts_with(format),
        "{content_type} instead of {format}"
    );
    Ok(body)
}

/// Values by name and labels, with the labels in the order in which they are written.
pub(super) type Samples = BTreeMap<String, f64>;

pub(super) fn scrape(node: &Node) -> anyhow::Result<Samples> {
    let body = scrape_text(node, OPEN_METRICS)?;
    parse(&body).with_context(|| format!("not OpenMetrics:\n{body}"))
}

/// Parses OpenMetrics text, and rejects undescribed, repeated or misplaced samples.
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
                "summary" => &["", "_sum", "_count"],
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

/// Checks that the labels are empty or have the form `{name="value",...}`. The agent's values contain no quotes.
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

/// Whether the series is a counter or part of a histogram.
fn is_monotone(series: &str) -> bool {
    let name = series.split('{').next().unwrap_or_default();
    ["_total", "_sum", "_count", "_bucket"]
        .iter()
        .any(|suffix| name.ends_with(suffix))
}

#[test]
#[ignore = "needs root"]
fn metrics_follow_a_peer_that_dies_comes_back_and_leaves() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).probing(500, 200).start()?;
    bed.wait_all_reachable(PATIENCE)?;
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
    for series in [
        "readers",
        "events_total",
        "lost_events_total{cause=\"ring-full\"}",
        "lost_events_total{cause=\"slow-reader\"}",
    ] {
        let name = format!("health_agent_monitor_{series}");
        assert_eq!(healthy[&name], 0.0, "{name}: nobody monitors");
    }
    let failing = |samples: &Samples| -> Vec<String> {
        let names = samples.keys().filter(|series| series.contains("_failing{"));
        names.cloned().collect()
    };
    assert_eq!(failing(&healthy), [""; 0]);

    peer.kill_agent(Signal::SIGKILL)?;
    let degraded = wait_for("both HTTP paths to fail", PATIENCE, || {
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
    let alone = wait_for("the peer to leave the metrics", PATIENCE, || {
        let samples = scrape(node)?;
        Ok(failing(&samples).is_empty().then_some(samples))
    })?;
    assert_eq!(alone[&status(node, "node", "reachable")], 1.0);
    // Series about the peer itself disappear with it.
    let lasting = |series: &str| is_monotone(series) && !series.contains("target_node_name=");
    for (series, before) in degraded.iter().filter(|(series, _)| lasting(series)) {
        let now = alone.get(series);
        assert!(
            now.is_some_and(|now| now >= before),
            "{series} fell: {now:?}"
        );
    }
    Ok(())
}

/// Checks the metrics with promtool.
fn lint(text: &str) -> anyhow::Result<()> {
    let mut promtool = Command::new("promtool");
    let ran = run_with_input(promtool.args(["check", "metrics"]), text)?;
    let said = format!("{}{}", ran.stdout, ran.stderr);
    // promtool also succeeds if it only has remarks.
    ensure!(ran.code == Some(0) && said.trim().is_empty(), "{said}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn promtool_finds_no_fault_with_few_series_or_with_all() -> anyhow::Result<()> {
    for (flag, healthy_peers) in [("", 0), ("--metrics-per-target", 2)] {
        let bed = Bed::builder()
            .nodes(3)
            .ipv6(true)
            .probing(500, 200)
            .agent_args(flag)
            .start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let node = bed.node(1);
        lint(&scrape_text(node, CLASSIC)?).context("with all reachable")?;

        let failing = bed.node(3);
        failing.kill_agent(Signal::SIGKILL)?;
        let name = failing.name();
        let status = |text: &str, name: &str, status: u8| {
            let series = format!("target_node_name=\"{name}\"");
            text.lines()
                .filter(|line| line.starts_with("health_agent_node_connectivity_status{"))
                .filter(|line| line.contains(&series) && line.ends_with(&format!(" {status}")))
                .count()
        };
        let has_latency_of_the_dead = |text: &str| {
            text.lines().any(|line| {
                line.starts_with("health_agent_node_connectivity_latency_seconds{")
                    && line.contains(&format!("target_node_name=\"{name}\""))
                    && line.contains("protocol=\"http\"")
            })
        };
        let text = wait_for("the peer to fail on all addresses", PATIENCE, || {
            let text = scrape_text(node, CLASSIC)?;
            let is_dead = status(&text, name, 0) == 2 && !has_latency_of_the_dead(&text);
            Ok(is_dead.then_some(text))
        })?;
        lint(&text).context("with a failing peer")?;
        assert_eq!(
            status(&text, bed.node(2).name(), 1),
            healthy_peers,
            "{text}"
        );
    }
    Ok(())
}

/// A Prometheus server, which is killed on drop.
struct Prometheus {
    server: Child,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    const PORT: u16 = 9090;

    /// Starts a server in the node's namespace that scrapes the node's agent every second.
    fn start(node: &Node, flags: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("prometheus.yml");
        fs::write(
            &config,
            format!(
                "global: {{scrape_interval: 1s}}\n\
                 scrape_configs:\n\
                 - job_name: health-agent\n  \
                   static_configs: [{{targets: ['127.0.0.1:{METRICS_PORT}']}}]\n"
            ),
        )?;
        let server = node
            .command("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().display()))
            .arg(format!("--web.listen-address=127.0.0.1:{}", Self::PORT))
            .args(flags.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run prometheus")?;
        Ok(Self {
            server,
            _folder: folder,
        })
    }

    /// The current samples of a PromQL expression.
    fn query(node: &Node, expression: &str) -> anyhow::Result<Vec<serde_json::Value>> {
        let mut body = Self::get(node, &format!("query?query={expression}"))?;
        serde_json::from_value(body["data"]["result"].take()).context("no result")
    }

    /// A response from the server's HTTP API.
    fn get(node: &Node, path: &str) -> anyhow::Result<serde_json::Value> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, Self::PORT));
        let (code, body) = get(node, address, &format!("/api/v1/{path}"))?;
        ensure!(code == 200, "{code}: {body}");
        Ok(serde_json::from_str(&body)?)
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // The process of nsenter has become the server.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
#[ignore = "needs root"]
fn a_prometheus_server_takes_the_agent_for_a_good_target() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let _server = Prometheus::start(node, "")?;
    wait_for("the target to be up", PATIENCE, || {
        let up = Prometheus::query(node, "up")?;
        ensure!(up.len() == 1, "{up:?}");
        Ok((up[0]["value"][1] == "1").then_some(()))
    })?;
    let reachable =
        "health_agent_node_health_connectivity_status%7Bstatus%3D%22reachable%22%7D%3D%3D2";
    for (expression, series) in [
        ("health_agent_uptime_seconds%3E0", 1),
        ("health_agent_build_info", 1),
        (reachable, 2),
        ("health_agent_node_health_probes_total", 8),
        (
            "health_agent_node_health_connectivity_latency_seconds_count%3E0",
            4,
        ),
    ] {
        let found = Prometheus::query(node, expression)?;
        assert_eq!(found.len(), series, "{expression}: {found:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_prometheus_server_with_native_histograms_gets_them() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).probing(500, 200).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let _server = Prometheus::start(node, "--enable-feature=native-histograms")?;
    let latency = "health_agent_node_health_connectivity_latency_seconds";
    let found = wait_for("native histograms", PATIENCE, || {
        let targets = Prometheus::get(node, "targets")?;
        let error = &targets["data"]["activeTargets"][0]["lastError"];
        ensure!(error.as_str().unwrap_or_default() == "", "{error}");
        let found = Prometheus::query(node, latency)?;
        ensure!(found.len() <= 4, "{found:?}");
        Ok((found.len() == 4).then_some(found))
    })?;
    for sample in &found {
        let histogram = &sample["histogram"][1];
        let number = |value: &serde_json::Value| value.as_str().and_then(|v| v.parse::<f64>().ok());
        let count = number(&histogram["count"]).context("no count")?;
        let buckets = histogram["buckets"].as_array().context("no buckets")?;
        let in_buckets: f64 = buckets.iter().filter_map(|bucket| number(&bucket[3])).sum();
        assert_eq!(in_buckets, count, "{sample}");
        assert!(count >= 2.0, "{sample}");
        for bucket in buckets {
            let (low, high) = (number(&bucket[1]), number(&bucket[2]));
            let (low, high) = low.zip(high).context("no bounds")?;
            // 2^(1/8): the same resolution as that of the rows.
            assert!((high / low - 1.0905).abs() < 0.001, "{sample}");
            assert!(high < 1.0, "{sample}");
        }
    }
    let quantile = Prometheus::query(
        node,
        &format!("histogram_quantile(0.5,{latency}%7Btype%3D%22node%22%7D)%3E0"),
    )?;
    assert_eq!(quantile.len(), 2, "{quantile:?}");
    for expression in [
        "health_agent_node_health_rtt_seconds%7Bquantile%3D%220.99%22,protocol!%3D%22tcp%22%7D%3E0",
        "health_agent_node_health_rtt_seconds_count%7Bprotocol!%3D%22tcp%22%7D%3E0",
    ] {
        let found = Prometheus::query(node, expression)?;
        assert_eq!(found.len(), 4, "{expression}: {found:?}");
    }
    Ok(())
}

#[test]
fn alerts_do_what_their_tests_say_and_read_metrics_there_are() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let rules = root.join("deploy/prometheus/alerts.yaml");
    let tests = root.join("deploy/prometheus/alerts_test.yaml");
    for (action, file) in [("check", &rules), ("test", &tests)] {
        run(Command::new("promtool").args([action, "rules"]).arg(file))?.success()?;
    }
    let page = fs::read_to_string(root.join("docs/metrics.md"))?;
    let rules = fs::read_to_string(rules)?;
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let used: Vec<_> = rules
        .split(|c| !in_name(c))
        .filter_map(|word| word.strip_prefix("health_agent_"))
        .collect();
    assert!(used.len() > 8, "{used:?}");
    for name in used {
        ensure!(page.contains(&format!("| `{name}` |")), "no metric {name}");
    }
    Ok(())
}
