//! Checks the output in both formats, and that the metrics page documents it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use health_common::metrics::{Direction, Reason};
use health_common::rtt::{PROTOCOL_TCP, Reply, RttKey, RttRow, SOURCE_KERNEL, bucket};
use health_mesh::{HelloRequestCounts, IgnoredReplyCounts};
use health_model::api::{
    ControllerStatus, HealthStatus, LargerPackets, PathMtuStatus, RegistryState, RejectedEntry,
};
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as model;
use prost::Message as _;

use super::super::figures::ReloadCounts;
use super::super::samples;
use super::super::totals::Totals;
use super::*;

fn text(snapshot: Snapshot, format: Format) -> String {
    let mut text = Vec::new();
    write(snapshot, format, &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

fn figures() -> Figures {
    let registry = RegistryState {
        registry: "etcd:http://[::1]:2379".to_owned(),
        cluster: "default".to_owned(),
        last_read: Timestamp::from_second(100).unwrap(),
        stale: Some("connection refused".to_owned()),
        stale_since: Timestamp::from_second(100).ok(),
        rejected: vec![RejectedEntry {
            key: "/nodes/\"odd\"".to_owned(),
            reason: "no address".to_owned(),
        }],
    };
    Figures {
        report: HealthStatus::default(),
        per_target: false,
        registries: vec![registry],
        ignored_replies: IgnoredReplyCounts {
            wrong_source: 7,
            ..IgnoredReplyCounts::default()
        },
        hello_requests: HelloRequestCounts {
            malformed: 3,
            no_proof: 5,
            ..HelloRequestCounts::default()
        },
        malformed_answers: 0,
        healthy: true,
        configured_interval: Duration::from_secs(5),
        probe_rate: 1000,
        repairs: BTreeMap::from([("pin-lost".to_owned(), 2)]),
        reloads: ReloadCounts {
            succeeded: 2,
            failed: 1,
        },
        controllers: vec![ControllerStatus {
            name: "node-registry".to_owned(),
            interval: None,
            successes: 3,
            failures: 4,
            consecutive_failures: 2,
            last_success: None,
            last_failure: None,
            last_error: None,
        }],
        collections: samples::collections(),
        endpoints: Some(samples::endpoints()),
        policy_lag: None,
        events: samples::events(),
        containers: Some(samples::containers()),
        uptime: Duration::from_millis(1_500),
    }
}

fn snapshot(report: &HealthStatus, per_target: bool) -> Snapshot {
    let mut row = RttRow::EMPTY;
    row.record(20_000, 0, 0, SOURCE_KERNEL);
    let reply = Reply {
        remote_ns: 500_000,
        ..Reply::new(2_000_000)
    };
    assert!(row.record_reply(bucket(reply.rtt_ns), &reply, 0, 0, SOURCE_KERNEL));
    row.lost = 4;
    row.late = 1;
    row.duplicates = 3;
    let passive = RttKey {
        protocol: PROTOCOL_TCP,
        ..samples::key(2)
    };
    let mut totals = Totals::default();
    let mut summary = samples::summary(report, per_target);
    let rows = samples::Rows(vec![(samples::key(2), row), (passive, row)]);
    totals.read(&rows, &mut summary).unwrap();
    Snapshot {
        figures: figures(),
        summary,
        now: Timestamp::from_second(130).unwrap(),
        maps_readable: true,
        counters: vec![
            MetricRow {
                reason: Reason::EchoAnswered as u8,
                direction: Direction::Ingress as u8,
                packets: 3,
                bytes: 294,
            },
            MetricRow {
                reason: Reason::EventLost as u8,
                direction: Direction::Ingress as u8,
                packets: 3,
                bytes: 294,
            },
            MetricRow {
                reason: Reason::InvalidSource as u8,
                direction: Direction::Egress as u8,
                packets: 1,
                bytes: 98,
            },
        ],
        probes: totals
            .by_class()
            .map(|(class, probes)| (class, probes.clone()))
            .collect(),
        before: BTreeMap::new(),
    }
}

fn shown(change: impl FnOnce(&mut Snapshot)) -> String {
    let mut snapshot = snapshot(&samples::report(), false);
    change(&mut snapshot);
    text(snapshot, Format::OpenMetrics)
}

#[test]
fn every_metric_is_shown_with_its_labels() {
    let text = shown(|_| {});
    let status = |status, count| {
        format!(
            "health_agent_node_health_connectivity_status{{source_cluster=\"default\",\
                 source_node_name=\"n1\",type=\"node\",status=\"{status}\"}} {count}"
        )
    };
    let latency = "health_agent_node_health_connectivity_latency_seconds";
    let registry = |what, value: f64| {
        format!(
            "health_agent_registry_{what}{{registry=\"etcd:http://[::1]:2379\",\
                 cluster=\"default\"}} {value:?}"
        )
    };
    let collection =
        |what, labels, value| format!("health_agent_datapath_conntrack_gc_{what}{labels} {value}");
    let target = "source_cluster=\"default\",source_node_name=\"n1\",\
                      target_cluster=\"default\",target_node_name=\"n2\",\
                      target_node_type=\"remote_intra_cluster\"";
    let icmp = format!(
        "{target},target_node_ip=\"10.0.0.2\",type=\"node\",protocol=\"icmp\",\
             address_type=\"primary\""
    );
    let class = "source_cluster=\"default\",source_node_name=\"n1\",type=\"node\",\
                     protocol=\"icmp\",address_type=\"primary\"";
    for line in [
        format!(
            "health_agent_build_info{{version=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION")
        ),
        "health_agent_uptime_seconds 1.5".to_owned(),
        "health_agent_datapath_maps_readable 1".to_owned(),
        "health_agent_ignored_icmp_replies_total{reason=\"wrong-source\"} 7".to_owned(),
        "health_agent_malformed_hello_headers_total{of=\"request\"} 3".to_owned(),
        "health_agent_refused_hello_requests_total{reason=\"no-proof\"} 5".to_owned(),
        "health_agent_healthy 1".to_owned(),
        "health_agent_probe_interval_seconds 10.0".to_owned(),
        "health_agent_configured_probe_interval_seconds 5.0".to_owned(),
        "health_agent_probe_rate_limit 1000".to_owned(),
        registry("stale", 1.0),
        registry("age_seconds", 30.0),
        registry("rejected_entries", 1.0),
        "health_agent_registry_nodes{cluster=\"default\"} 3".to_owned(),
        "health_agent_node_diagnosis{cause=\"agent-down\"} 1".to_owned(),
        "health_agent_target_diagnosis_info{target_cluster=\"default\",\
             target_node_name=\"n2\",cause=\"agent-down\"} 1"
            .to_owned(),
        format!("health_agent_node_connectivity_status{{{target},type=\"node\"}} 0"),
        format!("health_agent_node_connectivity_latency_seconds{{{icmp}}} 0.002"),
        format!("health_agent_node_connectivity_probes_total{{{icmp},result=\"answered\"}} 2"),
        format!("health_agent_node_connectivity_probes_total{{{icmp},result=\"lost\"}} 4"),
        "health_agent_repairs_total{cause=\"pin-lost\"} 2".to_owned(),
        "health_agent_settings_reloads_total{result=\"success\"} 2".to_owned(),
        "health_agent_settings_reloads_total{result=\"failure\"} 1".to_owned(),
        "health_agent_controllers_group_runs_total{group_name=\"node-registry\",status=\"failure\"} 4".to_owned(),
        "health_agent_controllers_consecutive_failures{group_name=\"node-registry\"} 2".to_owned(),
        "health_agent_controllers_failing 1".to_owned(),
        "health_agent_monitor_readers 0".to_owned(),
        "health_agent_monitor_events_total 20".to_owned(),
        "health_agent_monitor_lost_events_total{cause=\"ring-full\"} 3".to_owned(),
        "health_agent_monitor_lost_events_total{cause=\"slow-reader\"} 4".to_owned(),
        "health_agent_bpf_map_pressure{map_name=\"HEALTH_CT4\"} 0.25".to_owned(),
        collection("interval_seconds", "", "300.0"),
        collection(
            "runs_total",
            "{family=\"ipv4\",status=\"completed\",cause=\"pressure\"}",
            "1",
        ),
        collection(
            "runs_total",
            "{family=\"ipv6\",status=\"uncompleted\"}",
            "1",
        ),
        collection(
            "duration_seconds_bucket",
            "{le=\"0.016\",family=\"ipv4\",status=\"completed\"}",
            "1",
        ),
        collection(
            "duration_seconds_bucket",
            "{le=\"+Inf\",family=\"ipv4\",status=\"completed\"}",
            "1",
        ),
        collection(
            "duration_seconds_sum",
            "{family=\"ipv4\",status=\"completed\"}",
            "0.005",
        ),
        collection("entries", "{family=\"ipv4\",status=\"deleted\"}", "3"),
        collection("entries", "{family=\"ipv4\",status=\"alive\"}", "5"),
        collection("deleted_entries_total", "{family=\"ipv4\"}", "3"),
        collection("refreshed_entries_total", "{family=\"ipv4\"}", "1"),
        "health_agent_datapath_nat_gc_entries{family=\"ipv4\",status=\"deleted\"} 6".to_owned(),
        "health_agent_datapath_nat_gc_deleted_entries_total{family=\"ipv4\"} 6".to_owned(),
        status("reachable", 1),
        status("unreachable", 1),
        status("unknown", 1),
        "health_agent_unreachable_nodes 1".to_owned(),
        "health_agent_unreachable_health_endpoints 0".to_owned(),
        "health_agent_node_health_failing{target_cluster=\"default\",target_node_name=\"n2\",\
             type=\"node\",protocol=\"http\",address=\"10.0.0.2\"} 1"
            .to_owned(),
        format!("{latency}_count{{{class}}} 2"),
        format!("{latency}_sum{{{class}}} 0.00202"),
        format!("{latency}_bucket{{le=\"+Inf\",{class}}} 2"),
        "health_agent_node_health_probes_total{type=\"node\",protocol=\"icmp\",\
             result=\"answered\"} 2"
            .to_owned(),
        "health_agent_node_health_probes_total{type=\"node\",protocol=\"icmp\",\
             result=\"lost\"} 4"
            .to_owned(),
        "health_agent_node_health_late_replies_total{type=\"node\",protocol=\"icmp\"} 1".to_owned(),
        "health_agent_node_health_duplicate_replies_total{type=\"node\",protocol=\"icmp\"} 3"
            .to_owned(),
        "health_agent_node_health_remote_seconds_total{type=\"node\",protocol=\"icmp\"} 0.0005"
            .to_owned(),
        "health_agent_node_health_remote_known_rtt_seconds_total{type=\"node\",\
             protocol=\"icmp\"} 0.002"
            .to_owned(),
        "health_agent_node_health_rtt_seconds{type=\"node\",protocol=\"icmp\",\
             quantile=\"0.5\"} 0.000019456"
            .to_owned(),
        "health_agent_node_health_rtt_seconds_count{type=\"node\",protocol=\"tcp\"} 2".to_owned(),
        format!("health_agent_node_connectivity_rtt_seconds_sum{{{icmp}}} 0.00202"),
        "health_agent_node_tcp_latency_seconds_count{source_cluster=\"default\",\
             source_node_name=\"n1\",type=\"node\",protocol=\"tcp\",address_type=\"primary\"} 2"
            .to_owned(),
        "health_agent_forward_count_total{reason=\"Echo answered\",direction=\"INGRESS\"} 3"
            .to_owned(),
        "health_agent_forward_bytes_total{reason=\"Echo answered\",direction=\"INGRESS\"} 294"
            .to_owned(),
        "health_agent_drop_count_total{reason=\"Invalid source IP\",direction=\"EGRESS\"} 1"
            .to_owned(),
        "health_agent_drop_bytes_total{reason=\"Invalid source IP\",direction=\"EGRESS\"} 98"
            .to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in:\n{text}");
    }
    assert!(!text.contains("Event lost"), "no packet: {text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn container_probes_are_shown_as_the_kubelet_does() {
    let text = shown(|_| {});
    let of = "container=\"app\",pod=\"web\",namespace=\"shop\",pod_uid=\"u-1\"";
    let runs = |result, count| {
        format!(
            "health_agent_prober_probe_total{{probe_type=\"Liveness\",result=\"{result}\",{of}}} {count}"
        )
    };
    let duration = "health_agent_prober_probe_duration_seconds";
    for line in [
        runs("successful", 1),
        runs("failed", 2),
        runs("errored", 0),
        runs("not_sent", 4),
        format!("{duration}_sum{{probe_type=\"Liveness\",{of}}} 1.012"),
        format!("{duration}_count{{probe_type=\"Liveness\",{of}}} 3"),
        format!("{duration}_bucket{{le=\"0.01\",probe_type=\"Liveness\",{of}}} 2"),
        format!("{duration}_bucket{{le=\"+Inf\",probe_type=\"Liveness\",{of}}} 3"),
        "health_agent_prober_start_delay_seconds_bucket{le=\"1.0\"} 3".to_owned(),
        "health_agent_container_restarts_total{namespace=\"shop\",pod=\"web\",pod_uid=\"u-1\",\
             container=\"app\"} 3"
            .to_owned(),
        "health_agent_probed_pods 12".to_owned(),
        "health_agent_ready_pods 11".to_owned(),
        "health_agent_container_probes 30".to_owned(),
        "health_agent_failing_container_probes 1".to_owned(),
        "health_agent_errored_container_probes 2".to_owned(),
        "health_agent_overdue_container_probes 3".to_owned(),
        "health_agent_pod_problems 1".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in:\n{text}");
    }
    let without = shown(|snapshot| snapshot.figures.containers = None);
    assert!(!without.contains("_prober_"), "{without}");
}

/// Lines about a target.
fn series_of_targets(text: &str) -> Vec<&str> {
    let is_target = |line: &&str| line.contains("target_node_name");
    text.lines().filter(is_target).collect()
}

#[test]
fn a_peers_series_go_with_it() {
    let mut report = samples::report();
    report.nodes.retain(|node| node.name != "default/n2");
    let text = text(snapshot(&report, false), Format::OpenMetrics);
    assert_eq!(series_of_targets(&text), [""; 0]);
    assert!(
        text.contains("health_agent_unreachable_nodes 0\n"),
        "{text}"
    );
}

#[test]
fn only_failing_and_degraded_peers_have_series_unless_all_are_asked_for() {
    let mut report = samples::report();
    let of_node = |text: &str, name: &str| {
        let label = format!("target_node_name=\"{name}\"");
        text.lines().filter(|line| line.contains(&label)).count()
    };
    let text_of =
        |report: &HealthStatus, per_target| text(snapshot(report, per_target), Format::Classic);
    let few = text_of(&report, false);
    assert_eq!(of_node(&few, "n1"), 0);
    // The node's diagnosis, status and failure; for ICMP only, a latency, two counts, and three quantiles with sum and
    // count.
    assert_eq!(of_node(&few, "n2"), 11, "{few}");
    assert!(
        !few.contains("protocol=\"http\",address_type=\"primary\"} "),
        "{few}"
    );
    let all = text_of(&report, true);
    assert_eq!(of_node(&all, "n1"), 3, "{all}");
    assert_eq!(of_node(&all, "n3"), 0, "nothing is known of it: {all}");

    let http = report.nodes[0].host.primary_address.http.as_mut().unwrap();
    http.degraded = Some("12% lost".to_owned());
    let degraded = text_of(&report, false);
    assert_eq!(of_node(&degraded, "n1"), 4, "{degraded}");
    for line in [
        "health_agent_degraded_nodes 1",
        "health_agent_node_health_degraded{target_cluster=\"default\",target_node_name=\"n1\",\
             type=\"node\",protocol=\"http\",address=\"10.0.0.1\"} 1",
    ] {
        assert!(
            degraded.lines().any(|l| l == line),
            "no {line} in:\n{degraded}"
        );
    }
}

#[test]
fn messages_hold_the_same_as_text_and_native_buckets() {
    let report = samples::report();
    let mut bytes = Vec::new();
    write(snapshot(&report, true), Format::Protobuf, &mut bytes).unwrap();
    let mut rest = &bytes[..];
    let mut families = BTreeMap::new();
    while !rest.is_empty() {
        let family = model::MetricFamily::decode_length_delimited(&mut rest).unwrap();
        families.insert(family.name.clone(), family);
    }
    let text = text(snapshot(&report, true), Format::Classic);
    let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let described = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .filter(|name| samples.iter().any(|sample| sample.starts_with(name)));
    let named: BTreeSet<&str> = families.keys().map(String::as_str).collect();
    assert_eq!(named, described.collect());

    let latency = &families["health_agent_node_health_connectivity_latency_seconds"];
    let histogram = latency.metric[0].histogram.clone().unwrap();
    assert_eq!(histogram.schema, 3);
    assert_eq!(histogram.sample_count, 2);
    let spans: Vec<u32> = histogram.positive_span.iter().map(|s| s.length).collect();
    assert_eq!(spans, [1, 1]);
    assert_eq!(histogram.positive_delta, [1, 0]);
    assert_eq!(histogram.bucket.last().unwrap().cumulative_count, 2);
    let rtt = &families["health_agent_node_health_rtt_seconds"];
    let summary = rtt.metric[0].summary.clone().unwrap();
    assert_eq!((summary.quantile.len(), summary.sample_count), (3, 2));
}

#[test]
fn a_reduced_path_mtu_is_shown_beside_what_this_host_sends() {
    let mut report = samples::report();
    let path = &mut report.nodes[1].host.primary_address;
    path.path_mtu = Some(Box::new(PathMtuStatus {
        mtu: 1400,
        local_mtu: 1500,
        device: "eth0".to_owned(),
        larger: LargerPackets::Vanish,
        rejected_by: None,
        last_probed: Timestamp::UNIX_EPOCH,
    }));
    let text = text(snapshot(&report, false), Format::Classic);
    let labels = "target_cluster=\"default\",target_node_name=\"n2\",address=\"10.0.0.2\"";
    for line in [
        format!("health_agent_node_path_mtu_bytes{{{labels}}} 1400"),
        format!("health_agent_node_local_mtu_bytes{{{labels}}} 1500"),
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in:\n{text}");
    }
}

/// Metric names in the first column of the page's tables, which looks like "| `a`, `b` | ...".
fn documented() -> BTreeSet<String> {
    let page = include_str!("../../../../docs/metrics.md");
    let (page, _) = page.split_once("\n## ").unwrap();
    let cells = page.lines().filter_map(|line| {
        let (first, _) = line.strip_prefix("| `")?.split_once("` |")?;
        Some(first)
    });
    cells
        .flat_map(|cell| cell.split("`, `"))
        .map(|name| format!("{PREFIX}_{name}"))
        .collect()
}

#[test]
fn the_page_on_metrics_lists_exactly_those_there_are() {
    let mut report = samples::report();
    report.local.diagnosis = report.nodes[1].diagnosis.clone();
    let text = text(snapshot(&report, true), Format::Classic);
    let described: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .map(str::to_owned)
        .collect();
    assert_eq!(described, documented());
}

#[test]
fn before_the_maps_are_there_the_rest_is_shown() {
    let text = shown(|snapshot| {
        snapshot.maps_readable = false;
        snapshot.counters.clear();
        snapshot.probes.clear();
    });
    assert!(
        text.contains("health_agent_datapath_maps_readable 0\n"),
        "{text}"
    );
    assert!(!text.contains("latency_seconds_bucket"), "{text}");
}
