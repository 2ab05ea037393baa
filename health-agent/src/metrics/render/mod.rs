//! One scrape's metrics as a scraper reads them.

mod agent;
mod nodes;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use health_datapath::conntrack::Counts;
use health_datapath::dump::MetricRow;
use health_mesh::{HelloRequestCounts, IgnoredReplyCounts};
use health_model::api::RegistryState;
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode, encode_eof, encode_registry};
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
    prometheus_protobuf,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use prost::Message as _;

use crate::metrics::format::{ClassicWriter, Format};
use crate::metrics::histogram::Histogram;
use crate::metrics::summaries::SummaryFamily;
use crate::metrics::summary::{Address, Peer, Summary, Target};
use crate::metrics::totals::{Class, Probes};
use crate::metrics::{collections, endpoints, events};

const PREFIX: &str = "health_agent";

pub(super) type Label<'a> = (&'static str, &'a str);

/// What one scrape shows.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) summary: Summary,
    pub(super) registries: Vec<RegistryState>,
    pub(super) ignored_replies: IgnoredReplyCounts,
    pub(super) hello_requests: HelloRequestCounts,
    pub(super) malformed_answers: u64,
    /// Whether `/healthz` says so.
    pub(super) healthy: bool,
    /// Time between two probes of a target as it was set.
    pub(super) configured_interval: Duration,
    /// Most probes a second.
    pub(super) probe_rate: u32,
    /// By cause.
    pub(super) repairs: BTreeMap<String, u64>,
    pub(super) collections: Counts,
    /// `None` before the endpoints are restored.
    pub(super) endpoints: Option<health_endpoint::manager::Counts>,
    pub(super) policy_lag: Option<health_model::api::PolicyLag>,
    pub(super) events: health_datapath::events::Counts,
    pub(super) now: Timestamp,
    pub(super) uptime: Duration,
    pub(super) maps_readable: bool,
    pub(super) counters: Vec<MetricRow>,
    pub(super) probes: Vec<(Class, Probes)>,
    /// The round trips of each class that are too old for summaries.
    pub(super) before: BTreeMap<Class, Histogram>,
}

/// Writes the metrics: text while it is made, messages when all are made.
pub(super) fn write(snapshot: Snapshot, format: Format, out: &mut dyn io::Write) -> io::Result<()> {
    let snapshot = Arc::new(snapshot);
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(snapshot.clone()));
    let mut text = TextWriter { out, failed: None };
    let written = match format {
        Format::OpenMetrics => write_open_metrics(&registry, &snapshot, &mut text),
        Format::Classic => encode(&mut ClassicWriter::new(&mut text), &registry)
            .and_then(|()| snapshot.write_summaries(&mut text)),
        Format::Protobuf => return write_messages(&registry, &snapshot, text.out),
    };
    written.map_err(|error| {
        text.failed
            .take()
            .unwrap_or_else(|| io::Error::other(error))
    })
}

fn write_open_metrics(
    registry: &Registry,
    snapshot: &Snapshot,
    out: &mut TextWriter<'_>,
) -> fmt::Result {
    encode_registry(out, registry)?;
    snapshot.write_summaries(out)?;
    encode_eof(out)
}

fn write_messages(
    registry: &Registry,
    snapshot: &Snapshot,
    out: &mut dyn io::Write,
) -> io::Result<()> {
    let families = prometheus_protobuf::encode(registry).map_err(io::Error::other)?;
    let summaries = snapshot.summaries().map(SummaryFamily::message);
    for family in families.into_iter().chain(summaries) {
        // Prometheus' own library leaves out what has no sample, too.
        if !family.metric.is_empty() {
            out.write_all(&family.encode_length_delimited_to_vec())?;
        }
    }
    Ok(())
}

/// Takes text, and keeps the error that ended the writing.
struct TextWriter<'a> {
    out: &'a mut dyn io::Write,
    failed: Option<io::Error>,
}

impl fmt::Write for TextWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.out.write_all(text.as_bytes()).map_err(|error| {
            self.failed = Some(error);
            fmt::Error
        })
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_agent(encoder)?;
        self.encode_registries(encoder)?;
        self.encode_nodes(encoder)?;
        self.encode_diagnoses(encoder)?;
        self.encode_failing(encoder)?;
        self.encode_peers(encoder)?;
        self.encode_latency(encoder)?;
        self.encode_probes(encoder)?;
        self.encode_packets(encoder)?;
        collections::encode(&self.collections, encoder)?;
        if let Some(counts) = &self.endpoints {
            endpoints::encode(counts, encoder)?;
            endpoints::encode_lag(self.policy_lag.as_ref(), encoder)?;
        }
        events::encode(&self.events, encoder)
    }
}

impl Snapshot {
    /// The labels of the node that reports.
    fn source(&self) -> [Label<'_>; 2] {
        [
            ("source_cluster", &self.summary.cluster),
            ("source_node_name", &self.summary.name),
        ]
    }

    /// All that is probed of the nodes with series of their own.
    fn targets(&self) -> impl Iterator<Item = (&Peer, &Address, &Target)> {
        self.summary.peers.iter().flat_map(|peer| {
            peer.addresses.iter().flat_map(move |address| {
                let targets = address.protocols.iter();
                targets.map(move |target| (peer, address, target))
            })
        })
    }
}

impl Peer {
    /// The labels of a node that is probed.
    fn target(&self) -> [Label<'_>; 3] {
        [
            ("target_cluster", &self.cluster),
            ("target_node_name", &self.name),
            ("target_node_type", self.kind),
        ]
    }
}

pub(super) fn family<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &str,
    kind: MetricType,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, kind)
}

pub(super) fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &str,
    value: &impl EncodeGaugeValue,
) -> fmt::Result {
    family(encoder, name, help, MetricType::Gauge)?.encode_gauge(value)
}

pub(super) fn counter(
    family: &mut MetricEncoder<'_>,
    labels: &[Label<'_>],
    count: impl EncodeCounterValue,
) -> fmt::Result {
    family
        .encode_family(&labels)?
        .encode_counter::<NoLabelSet, _, u64>(&count, None)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use health_common::metrics::{Direction, Reason};
    use health_common::rtt::{PROTOCOL_TCP, Reply, RttKey, RttRow, SOURCE_KERNEL, bucket};
    use health_model::api::{HealthStatus, LargerPackets, PathMtuStatus, RejectedEntry};
    use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as model;

    use super::super::samples;
    use super::super::totals::Totals;
    use super::*;

    fn text(snapshot: Snapshot, format: Format) -> String {
        let mut text = Vec::new();
        write(snapshot, format, &mut text).unwrap();
        String::from_utf8(text).unwrap()
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
        Snapshot {
            summary,
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
            collections: samples::collections(),
            endpoints: Some(samples::endpoints()),
            policy_lag: None,
            events: samples::events(),
            now: Timestamp::from_second(130).unwrap(),
            uptime: Duration::from_millis(1_500),
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
        let collection = |what, labels, value| {
            format!("health_agent_datapath_conntrack_gc_{what}{labels} {value}")
        };
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
            "health_agent_node_health_late_replies_total{type=\"node\",protocol=\"icmp\"} 1"
                .to_owned(),
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
            "health_agent_node_health_rtt_seconds_count{type=\"node\",protocol=\"tcp\"} 2"
                .to_owned(),
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

    /// Lines that begin with one of these names and speak of a target.
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
        // Its diagnosis, its status, what fails; a latency by ICMP alone, two counts of that, and three
        // quantiles with sum and count.
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

    /// Names in a column of code spans, such as "| `a`, `b` | ...", at the start of a line.
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
}
