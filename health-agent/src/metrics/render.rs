//! One scrape's metrics as text.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use health_common::metrics::{Direction, Reason};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::totals::{Class, Probes};
use crate::api::types::{AddressGroupStatus, HealthStatus, Reachability};
use crate::datapath::dump::MetricRow;

const PREFIX: &str = "health_agent";

type Label<'a> = (&'static str, &'a str);

/// What one scrape shows.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) report: HealthStatus,
    /// By cause.
    pub(super) repairs: BTreeMap<String, u64>,
    pub(super) uptime: Duration,
    pub(super) maps_readable: bool,
    pub(super) counters: Vec<MetricRow>,
    pub(super) probes: Vec<(Class, Probes)>,
}

/// The metrics in OpenMetrics' text format.
pub(super) fn text(snapshot: Snapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(snapshot));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_agent(encoder)?;
        self.encode_nodes(encoder)?;
        self.encode_failing(encoder)?;
        self.encode_latency(encoder)?;
        self.encode_probes(encoder)?;
        self.encode_packets(encoder)
    }
}

impl Snapshot {
    fn encode_agent(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        encoder
            .encode_descriptor("build", "The agent's version", None, MetricType::Info)?
            .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        gauge(
            encoder,
            "uptime_seconds",
            "Time since the agent started",
            &self.uptime.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "datapath_maps_readable",
            "1 if this scrape could read the maps, else 0",
            &u64::from(self.maps_readable),
        )?;
        let mut repairs = family(
            encoder,
            "repairs",
            "Repairs of the health endpoint and the datapath",
            MetricType::Counter,
        )?;
        for (cause, count) in &self.repairs {
            counter(&mut repairs, &[("cause", cause)], *count)?;
        }
        Ok(())
    }

    fn encode_nodes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (source_cluster, source_node_name) = split_name(&self.report.local.name);
        let mut statuses = family(
            encoder,
            "node_health_connectivity_status",
            "Probed addresses by what is known of them",
            MetricType::Gauge,
        )?;
        for (path, groups) in [("node", self.hosts()), ("endpoint", self.endpoints())] {
            for (status, reachability) in [
                ("reachable", Reachability::Reachable),
                ("unreachable", Reachability::Unreachable),
                ("unknown", Reachability::Unknown),
            ] {
                let count = groups
                    .iter()
                    .flat_map(|group| group.paths())
                    .filter(|path| path.reachability() == reachability)
                    .count();
                let labels = [
                    ("source_cluster", source_cluster),
                    ("source_node_name", source_node_name),
                    ("type", path),
                    ("status", status),
                ];
                statuses.encode_family(&labels)?.encode_gauge(&count)?;
            }
        }
        gauge(
            encoder,
            "unreachable_nodes",
            "Nodes of which an own address does not answer",
            &unreachable(&self.hosts()),
        )?;
        gauge(
            encoder,
            "unreachable_health_endpoints",
            "Health endpoints of which an address does not answer",
            &unreachable(&self.endpoints()),
        )
    }

    fn hosts(&self) -> Vec<&AddressGroupStatus> {
        self.report.nodes.iter().map(|node| &node.host).collect()
    }

    fn endpoints(&self) -> Vec<&AddressGroupStatus> {
        let nodes = self.report.nodes.iter();
        nodes
            .filter_map(|node| node.health_endpoint.as_ref())
            .collect()
    }

    fn encode_failing(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut failing = family(
            encoder,
            "node_health_failing",
            "1 for each address and protocol whose last probe failed",
            MetricType::Gauge,
        )?;
        for node in &self.report.nodes {
            let (target_cluster, target_node_name) = split_name(&node.name);
            let endpoint = node.health_endpoint.iter().map(|group| ("endpoint", group));
            for (path, group) in std::iter::once(("node", &node.host)).chain(endpoint) {
                for shown in group.paths() {
                    for (protocol, result) in [("icmp", &shown.icmp), ("http", &shown.http)] {
                        if result.as_ref().is_none_or(|result| result.is_ok()) {
                            continue;
                        }
                        let labels = [
                            ("target_cluster", target_cluster),
                            ("target_node_name", target_node_name),
                            ("type", path),
                            ("protocol", protocol),
                            ("address", &shown.ip.to_string()),
                        ];
                        failing.encode_family(&labels)?.encode_gauge(&1_u64)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn encode_latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (source_cluster, source_node_name) = split_name(&self.report.local.name);
        let mut latency = family(
            encoder,
            "node_health_connectivity_latency_seconds",
            "Round trips of answered probes",
            MetricType::Histogram,
        )?;
        for (class, probes) in &self.probes {
            let labels = [
                ("source_cluster", source_cluster),
                ("source_node_name", source_node_name),
                ("type", class.path),
                ("protocol", class.protocol),
                ("address_type", class.address_type),
            ];
            latency
                .encode_family(&labels)?
                .encode_histogram::<NoLabelSet>(
                    probes.sum_ns as f64 / 1e9,
                    probes.answered,
                    &probes.buckets(),
                    None,
                )?;
        }
        Ok(())
    }

    fn encode_probes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // Primary and secondary addresses together.
        let mut by_target: BTreeMap<(&str, &str), [u64; 3]> = BTreeMap::new();
        for (class, probes) in &self.probes {
            let [answered, lost, late] = by_target.entry((class.path, class.protocol)).or_default();
            *answered += probes.answered;
            *lost += probes.lost;
            *late += probes.late;
        }
        let mut results = family(
            encoder,
            "node_health_probes",
            "Ended probes by result",
            MetricType::Counter,
        )?;
        for ((path, protocol), [answered, lost, _]) in &by_target {
            for (result, count) in [("answered", answered), ("lost", lost)] {
                let labels = [("type", *path), ("protocol", protocol), ("result", result)];
                counter(&mut results, &labels, *count)?;
            }
        }
        let mut late_replies = family(
            encoder,
            "node_health_late_replies",
            "Replies to probes that were given up, and duplicates",
            MetricType::Counter,
        )?;
        for ((path, protocol), [_, _, late]) in &by_target {
            let labels = [("type", *path), ("protocol", protocol)];
            counter(&mut late_replies, &labels, *late)?;
        }
        Ok(())
    }

    fn encode_packets(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let packets = |row: &MetricRow| row.packets;
        let bytes = |row: &MetricRow| row.bytes;
        self.encode_rows(
            encoder,
            "forward_count",
            "Packets let through",
            false,
            packets,
        )?;
        self.encode_rows(encoder, "forward_bytes", "Bytes let through", false, bytes)?;
        self.encode_rows(encoder, "drop_count", "Packets dropped", true, packets)?;
        self.encode_rows(encoder, "drop_bytes", "Bytes dropped", true, bytes)
    }

    fn encode_rows(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &'static str,
        help: &str,
        drops: bool,
        count: fn(&MetricRow) -> u64,
    ) -> fmt::Result {
        let mut packets = family(encoder, name, help, MetricType::Counter)?;
        for row in &self.counters {
            let reason = Reason::ALL
                .into_iter()
                .find(|&reason| reason as u8 == row.reason);
            let direction = match row.direction {
                d if d == Direction::Ingress as u8 => "INGRESS",
                d if d == Direction::Egress as u8 => "EGRESS",
                _ => continue,
            };
            // Another version's reason has no name here.
            if let Some(reason) = reason.filter(|reason| reason.is_drop() == drops) {
                let labels = [("reason", reason.text()), ("direction", direction)];
                counter(&mut packets, &labels, count(row))?;
            }
        }
        Ok(())
    }
}

fn unreachable(groups: &[&AddressGroupStatus]) -> usize {
    groups
        .iter()
        .filter(|group| group.reachability() == Reachability::Unreachable)
        .count()
}

/// `cluster/node` in its parts.
fn split_name(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("default", name))
}

fn family<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &str,
    kind: MetricType,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, kind)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &str,
    value: &impl EncodeGaugeValue,
) -> fmt::Result {
    family(encoder, name, help, MetricType::Gauge)?.encode_gauge(value)
}

fn counter(family: &mut MetricEncoder<'_>, labels: &[Label<'_>], count: u64) -> fmt::Result {
    family
        .encode_family(&labels)?
        .encode_counter::<NoLabelSet, _, u64>(&count, None)
}

/// What tests of this folder show.
#[cfg(test)]
pub(super) mod samples {
    use std::net::IpAddr;

    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_ICMP, RttKey};
    use jiff::Timestamp;

    use crate::api::types::{
        AddressGroupStatus, ConnectivityStatus, HealthStatus, NodeStatus, PathStatus, SelfStatus,
    };

    fn result(status: &str) -> Option<ConnectivityStatus> {
        Some(ConnectivityStatus {
            latency: 0,
            status: status.to_owned(),
            last_probed: Timestamp::UNIX_EPOCH,
            rtt_source: None,
            connect_latency: None,
            consecutive_failures: 0,
            last_change: None,
            degraded: None,
        })
    }

    /// The ICMP row of node `last`'s own address.
    pub(in crate::metrics) fn key(last: u8) -> RttKey {
        RttKey {
            peer: IpAddr::from([10, 0, 0, last]).into(),
            path: Path::Host as u8,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        }
    }

    /// Node 1 answers, node 2 not by HTTP, and of node 3 nothing is known.
    pub(in crate::metrics) fn report() -> HealthStatus {
        let node = |last: u8, icmp, http| NodeStatus {
            name: format!("default/n{last}"),
            host: AddressGroupStatus {
                primary_address: PathStatus {
                    ip: IpAddr::from([10, 0, 0, last]),
                    icmp,
                    http,
                    off: Vec::new(),
                },
                secondary_addresses: Vec::new(),
            },
            health_endpoint: None,
            diagnosis: None,
        };
        HealthStatus {
            local: SelfStatus {
                name: "default/n1".to_owned(),
                diagnosis: None,
            },
            nodes: vec![
                node(1, result(""), result("")),
                node(2, result(""), result("Connection refused")),
                node(3, None, None),
            ],
            ..HealthStatus::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use health_common::rtt::{RttRow, SOURCE_KERNEL};

    use super::super::totals::Totals;
    use super::*;

    fn shown(change: impl FnOnce(&mut Snapshot)) -> String {
        let mut row = RttRow::EMPTY;
        row.record(20_000, 0, 0, SOURCE_KERNEL);
        row.record(2_000_000, 0, 0, SOURCE_KERNEL);
        row.lost = 4;
        row.late = 1;
        let mut totals = Totals::default();
        totals.add(&[(samples::key(2), row)], &samples::report());
        let mut snapshot = Snapshot {
            report: samples::report(),
            repairs: BTreeMap::from([("pin-lost".to_owned(), 2)]),
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
                    reason: Reason::InvalidSource as u8,
                    direction: Direction::Egress as u8,
                    packets: 1,
                    bytes: 98,
                },
            ],
            probes: totals.by_class().collect(),
        };
        change(&mut snapshot);
        text(snapshot).unwrap()
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
        let class = "source_cluster=\"default\",source_node_name=\"n1\",type=\"node\",\
                     protocol=\"icmp\",address_type=\"primary\"";
        for line in [
            format!(
                "health_agent_build_info{{version=\"{}\"}} 1",
                env!("CARGO_PKG_VERSION")
            ),
            "health_agent_uptime_seconds 1.5".to_owned(),
            "health_agent_datapath_maps_readable 1".to_owned(),
            "health_agent_repairs_total{cause=\"pin-lost\"} 2".to_owned(),
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
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn a_peers_series_go_with_it() {
        let text = shown(|snapshot| snapshot.report.nodes.retain(|n| n.name != "default/n2"));
        assert!(!text.contains("target_node_name"), "{text}");
        assert!(
            text.contains("health_agent_unreachable_nodes 0\n"),
            "{text}"
        );
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
        assert!(!text.contains("_bucket"), "{text}");
    }
}
