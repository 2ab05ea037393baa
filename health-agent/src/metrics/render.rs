//! One scrape's metrics as a scraper reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use health_common::metrics::{Direction, Reason};
use health_datapath::conntrack::Counts;
use health_datapath::dump::MetricRow;
use health_mesh::{IgnoredReplyCounts, MalformedHeaderCounts};
use health_model::api::{Reachability, RegistryState};
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode, encode_eof, encode_registry};
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NativeHistogram,
    NativeHistogramBuckets, NoLabelSet, prometheus_protobuf,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::DEFAULT_NATIVE_HISTOGRAM_ZERO_THRESHOLD;
use prometheus_client::registry::Registry;
use prost::Message;

use super::format::{ClassicWriter, Format};
use super::histogram::{Histogram, SCHEMA};
use super::recent::Quantiles;
use super::summaries::SummaryFamily;
use super::summary::{Address, Peer, Summary, Target};
use super::totals::{Class, Probes};
use super::{collections, endpoints, events};

const PREFIX: &str = "health_agent";

pub(super) type Label<'a> = (&'static str, &'a str);

/// What one scrape shows.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) summary: Summary,
    pub(super) registries: Vec<RegistryState>,
    pub(super) ignored_replies: IgnoredReplyCounts,
    pub(super) malformed_headers: MalformedHeaderCounts,
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
        }
        events::encode(&self.events, encoder)
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
            "healthy",
            "1 unless the agent fails a check of its own",
            &u64::from(self.healthy),
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
        let interval = self.summary.interval.unwrap_or(self.configured_interval);
        gauge(
            encoder,
            "probe_interval_seconds",
            "Time between two probes of a target",
            &interval.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "configured_probe_interval_seconds",
            "Time between two probes of a target as it was set",
            &self.configured_interval.as_secs_f64(),
        )?;
        gauge(
            encoder,
            "probe_rate_limit",
            "Most probes a second",
            &u64::from(self.probe_rate),
        )
    }

    fn encode_registries(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Value = fn(&RegistryState, Timestamp) -> f64;
        let families: [(&'static str, &str, Value); 3] = [
            (
                "registry_stale",
                "1 if the registry cannot be read and its last good nodes are used, else 0",
                |registry, _| f64::from(u8::from(registry.stale.is_some())),
            ),
            (
                "registry_age_seconds",
                "Time since the registry's nodes were known to be right",
                |registry, now| {
                    let since = registry.stale_since.unwrap_or(now);
                    now.duration_since(since).as_secs_f64().max(0.0)
                },
            ),
            (
                "registry_rejected_entries",
                "Entries of the registry that cannot be used",
                |registry, _| registry.rejected.len() as f64,
            ),
        ];
        for (name, help, value) in families {
            let mut family = family(encoder, name, help, MetricType::Gauge)?;
            for registry in &self.registries {
                let labels = [
                    ("registry", registry.registry.as_str()),
                    ("cluster", registry.cluster.as_str()),
                ];
                family
                    .encode_family(&labels)?
                    .encode_gauge(&value(registry, self.now))?;
            }
        }
        let help = "Known nodes, this one included";
        let mut nodes = family(encoder, "registry_nodes", help, MetricType::Gauge)?;
        for (cluster, count) in &self.summary.nodes {
            nodes
                .encode_family(&[("cluster", cluster.as_str())])?
                .encode_gauge(count)?;
        }
        Ok(())
    }

    /// The labels of the node that reports.
    fn source(&self) -> [Label<'_>; 2] {
        [
            ("source_cluster", &self.summary.cluster),
            ("source_node_name", &self.summary.name),
        ]
    }

    fn encode_nodes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (hosts, endpoints) = (&self.summary.hosts, &self.summary.endpoints);
        let mut statuses = family(
            encoder,
            "node_health_connectivity_status",
            "Probed addresses by what is known of them",
            MetricType::Gauge,
        )?;
        for (path, summary) in [("node", hosts), ("endpoint", endpoints)] {
            for (status, count) in summary.addresses.iter() {
                let [cluster, name] = self.source();
                let labels = [cluster, name, ("type", path), ("status", status)];
                statuses.encode_family(&labels)?.encode_gauge(&count)?;
            }
        }
        for (name, help, count) in [
            (
                "unreachable_nodes",
                "Nodes of which an own address does not answer",
                hosts.unreachable,
            ),
            (
                "unreachable_health_endpoints",
                "Health endpoints of which an address does not answer",
                endpoints.unreachable,
            ),
            (
                "degraded_nodes",
                "Nodes whose own addresses answer, one of them with losses or late",
                hosts.degraded,
            ),
            (
                "degraded_health_endpoints",
                "Health endpoints whose addresses answer, one of them with losses or late",
                endpoints.degraded,
            ),
        ] {
            gauge(encoder, name, help, &count)?;
        }
        Ok(())
    }

    fn encode_diagnoses(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Nodes by what is wrong with them";
        let mut diagnoses = family(encoder, "node_diagnosis", help, MetricType::Gauge)?;
        for (cause, count) in &self.summary.causes {
            diagnoses
                .encode_family(&[("cause", cause.as_str())])?
                .encode_gauge(count)?;
        }
        let help = "What is wrong with a node";
        let mut diagnoses = family(encoder, "target_diagnosis", help, MetricType::Info)?;
        for peer in &self.summary.peers {
            if let Some(cause) = &peer.cause {
                let [cluster, name, _] = peer.target();
                diagnoses.encode_info(&[cluster, name, ("cause", cause)])?;
            }
        }
        let help = "What is wrong with this node, where most others fail at once";
        let mut diagnosis = family(encoder, "local_diagnosis", help, MetricType::Info)?;
        match &self.summary.cause {
            Some(cause) => diagnosis.encode_info(&[("cause", cause.as_str())]),
            None => Ok(()),
        }
    }

    fn encode_failing(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, shown) in [
            (
                "node_health_failing",
                "1 for each address and protocol whose last probe failed",
                Reachability::Unreachable,
            ),
            (
                "node_health_degraded",
                "1 for each address and protocol that answers with losses or late",
                Reachability::Degraded,
            ),
        ] {
            let mut failing = family(encoder, name, help, MetricType::Gauge)?;
            for (peer, address, target) in self.targets() {
                if target.reachability == Some(shown) {
                    let [cluster, name, _] = peer.target();
                    let labels = [
                        cluster,
                        name,
                        ("type", address.path),
                        ("protocol", target.protocol),
                        ("address", &address.ip.to_string()),
                    ];
                    failing.encode_family(&labels)?.encode_gauge(&1_u64)?;
                }
            }
        }
        Ok(())
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

    fn encode_peers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut statuses = family(
            encoder,
            "node_connectivity_status",
            "1 if all of a node's addresses answer, 0 if one does not",
            MetricType::Gauge,
        )?;
        for peer in &self.summary.peers {
            for (path, reachability) in &peer.groups {
                let answers = match reachability {
                    Reachability::Reachable | Reachability::Degraded => 1_u64,
                    Reachability::Unreachable => 0,
                    Reachability::Unknown => continue,
                };
                let [source_cluster, source_name] = self.source();
                let [cluster, name, kind] = peer.target();
                let path = ("type", *path);
                let labels = [source_cluster, source_name, cluster, name, kind, path];
                statuses.encode_family(&labels)?.encode_gauge(&answers)?;
            }
        }
        let mut latencies = family(
            encoder,
            "node_connectivity_latency_seconds",
            "Round trip of the last probe, if it was answered",
            MetricType::Gauge,
        )?;
        for (peer, address, target) in self.targets() {
            if let Some(latency_ns) = target.latency_ns {
                let labels = self.target_labels(peer, address, target);
                let labels = labels
                    .each_ref()
                    .map(|(name, value)| (*name, value.as_str()));
                latencies
                    .encode_family(&labels)?
                    .encode_gauge(&(latency_ns as f64 / 1e9))?;
            }
        }
        self.encode_path_mtus(encoder)?;
        let mut probes = family(
            encoder,
            "node_connectivity_probes",
            "Ended probes of a target by result",
            MetricType::Counter,
        )?;
        for (peer, address, target) in self.targets() {
            let Some((answered, lost)) = target.counts else {
                continue;
            };
            let labels = self.target_labels(peer, address, target);
            for (result, count) in [("answered", answered), ("lost", lost)] {
                let mut labels: Vec<Label<'_>> = labels
                    .iter()
                    .map(|(name, value)| (*name, value.as_str()))
                    .collect();
                labels.push(("result", result));
                counter(&mut probes, &labels, count)?;
            }
        }
        Ok(())
    }

    fn encode_path_mtus(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (index, name, help) in [
            (
                0,
                "node_path_mtu_bytes",
                "The largest packet that gets through to an address, where this host sends larger ones",
            ),
            (
                1,
                "node_local_mtu_bytes",
                "The largest packet that this host sends to such an address",
            ),
        ] {
            let mut mtus = family(encoder, name, help, MetricType::Gauge)?;
            for peer in &self.summary.peers {
                for address in &peer.addresses {
                    let Some(mtu) = address.path_mtu.map(|mtus| mtus[index]) else {
                        continue;
                    };
                    let [cluster, name, _] = peer.target();
                    let labels = [cluster, name, ("address", &address.ip.to_string())];
                    mtus.encode_family(&labels)?.encode_gauge(&u64::from(mtu))?;
                }
            }
        }
        Ok(())
    }

    fn target_labels(
        &self,
        peer: &Peer,
        address: &Address,
        target: &Target,
    ) -> [(&'static str, String); 9] {
        let [source_cluster, source_name] = self.source();
        let [cluster, name, kind] = peer.target();
        let ip = address.ip.to_string();
        [
            source_cluster,
            source_name,
            cluster,
            name,
            kind,
            ("target_node_ip", &ip),
            ("type", address.path),
            ("protocol", target.protocol),
            ("address_type", address.address_type),
        ]
        .map(|(name, value)| (name, value.to_owned()))
    }

    fn encode_latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, is_probed) in [
            (
                "node_health_connectivity_latency_seconds",
                "Round trips of answered probes",
                true,
            ),
            (
                "node_tcp_latency_seconds",
                "Round trips of TCP connections that there are",
                false,
            ),
        ] {
            let mut latency = family(encoder, name, help, MetricType::Histogram)?;
            let probes = self.probes.iter();
            for (class, probes) in probes.filter(|(class, _)| class.is_probed() == is_probed) {
                let labels = [
                    ("source_cluster", self.summary.cluster.as_str()),
                    ("source_node_name", self.summary.name.as_str()),
                    ("type", class.path),
                    ("protocol", class.protocol),
                    ("address_type", class.address_type),
                ];
                histogram(&mut latency, &labels, probes)?;
            }
        }
        Ok(())
    }

    /// By path and protocol, primary and secondary addresses together.
    fn by_target(&self) -> BTreeMap<(&'static str, &'static str), (Probes, Histogram)> {
        let mut by_target: BTreeMap<_, (Probes, Histogram)> = BTreeMap::new();
        for (class, probes) in &self.probes {
            let target = (class.path, class.protocol);
            let (sum, recent) = by_target.entry(target).or_default();
            sum.add(probes);
            recent.add(&match self.before.get(class) {
                Some(before) => probes.histogram.since(before),
                None => probes.histogram.clone(),
            });
        }
        by_target
    }

    fn summaries(&self) -> impl Iterator<Item = SummaryFamily<'_>> {
        let all = self.by_target().into_iter();
        let all = all.map(|((path, protocol), (probes, recent))| {
            let labels = vec![("type", path.to_owned()), ("protocol", protocol.to_owned())];
            let quantiles = Quantiles::of(&recent, probes.sum_ns, probes.answered);
            (labels, quantiles)
        });
        let of_targets = self.targets().filter_map(|(peer, address, target)| {
            let quantiles = target.quantiles.clone()?;
            let labels = self.target_labels(peer, address, target).to_vec();
            Some((labels, quantiles))
        });
        [
            SummaryFamily {
                name: format!("{PREFIX}_node_health_rtt_seconds"),
                help: "Round trips to all nodes, quantiles of the last ten minutes",
                summaries: Box::new(all),
            },
            SummaryFamily {
                name: format!("{PREFIX}_node_connectivity_rtt_seconds"),
                help: "Round trips to a target as the pinned map holds them",
                summaries: Box::new(of_targets),
            },
        ]
        .into_iter()
    }

    fn write_summaries(&self, out: &mut impl fmt::Write) -> fmt::Result {
        self.summaries()
            .try_for_each(|family| family.write_text(out))
    }

    fn encode_probes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let by_target = self.by_target();
        let probed = || {
            let probed = self.probes.iter().filter(|(class, _)| class.is_probed());
            let targets: BTreeSet<_> = probed
                .map(|(class, _)| (class.path, class.protocol))
                .collect();
            let targets = targets.into_iter();
            targets.filter_map(|target| Some((target, &by_target.get(&target)?.0)))
        };
        let mut results = family(
            encoder,
            "node_health_probes",
            "Ended probes by result",
            MetricType::Counter,
        )?;
        for ((path, protocol), probes) in probed() {
            for (result, count) in [("answered", probes.answered), ("lost", probes.lost)] {
                let labels = [("type", path), ("protocol", protocol), ("result", result)];
                counter(&mut results, &labels, count)?;
            }
        }
        type Count = fn(&Probes) -> u64;
        let counts: [(&'static str, &str, Count); 2] = [
            (
                "node_health_late_replies",
                "Replies to probes that were given up",
                |probes| probes.late,
            ),
            (
                "node_health_duplicate_replies",
                "More replies to probes that were answered",
                |probes| probes.duplicates,
            ),
        ];
        for (name, help, count) in counts {
            let mut replies = family(encoder, name, help, MetricType::Counter)?;
            for ((path, protocol), probes) in probed() {
                let labels = [("type", path), ("protocol", protocol)];
                counter(&mut replies, &labels, count(probes))?;
            }
        }
        let times: [(&'static str, &str, Count); 2] = [
            (
                "node_health_remote_seconds",
                "Time that probes spent in the hosts of peers, as far as these tell it",
                |probes| probes.remote_ns,
            ),
            (
                "node_health_remote_known_rtt_seconds",
                "Round trips of the probes of which that time is known",
                |probes| probes.remote_rtt_ns,
            ),
        ];
        for (name, help, ns) in times {
            let mut times = family(encoder, name, help, MetricType::Counter)?;
            for ((path, protocol), probes) in probed().filter(|(_, p)| p.remote_rtt_ns > 0) {
                let labels = [("type", path), ("protocol", protocol)];
                counter(&mut times, &labels, ns(probes) as f64 / 1e9)?;
            }
        }
        let mut ignored = family(
            encoder,
            "ignored_icmp_replies",
            "ICMP messages with the agent's identifier that answer no probe",
            MetricType::Counter,
        )?;
        let counts = &self.ignored_replies;
        for (reason, count) in [
            ("unexpected", counts.unexpected),
            ("wrong-source", counts.wrong_source),
            ("wrong-payload", counts.wrong_payload),
            ("unmatched-error", counts.unmatched_error),
        ] {
            counter(&mut ignored, &[("reason", reason)], count)?;
        }
        let mut malformed = family(
            encoder,
            "malformed_hello_headers",
            "Headers of GET /hello about echo probes that cannot be read",
            MetricType::Counter,
        )?;
        let counts = &self.malformed_headers;
        for (of, count) in [("request", counts.requests), ("answer", counts.answers)] {
            counter(&mut malformed, &[("of", of)], count)?;
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
            // Another version's reason has no name here; events that are lost are no packets.
            let reason = reason.filter(|reason| *reason != Reason::EventLost);
            if let Some(reason) = reason.filter(|reason| reason.is_drop() == drops) {
                let labels = [("reason", reason.text()), ("direction", direction)];
                counter(&mut packets, &labels, count(row))?;
            }
        }
        Ok(())
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

/// With native buckets where the format can hold them, and classic ones everywhere.
fn histogram(family: &mut MetricEncoder<'_>, labels: &[Label<'_>], probes: &Probes) -> fmt::Result {
    const NONE: NativeHistogramBuckets = NativeHistogramBuckets {
        spans: &[],
        deltas: &[],
    };
    let native = probes.histogram.native();
    family
        .encode_family(&labels)?
        .encode_histogram_with_native::<NoLabelSet>(
            probes.sum_ns as f64 / 1e9,
            probes.answered,
            &probes.histogram.classic(),
            None,
            NativeHistogram {
                schema: SCHEMA,
                zero_threshold: DEFAULT_NATIVE_HISTOGRAM_ZERO_THRESHOLD,
                zero_count: 0,
                negative: NONE,
                positive: NativeHistogramBuckets {
                    spans: &native.spans,
                    deltas: &native.deltas,
                },
                created: None,
            },
        )
}

#[cfg(test)]
mod tests {
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
            malformed_headers: MalformedHeaderCounts {
                requests: 3,
                answers: 0,
            },
            healthy: true,
            configured_interval: Duration::from_secs(5),
            probe_rate: 1000,
            repairs: BTreeMap::from([("pin-lost".to_owned(), 2)]),
            collections: samples::collections(),
            endpoints: Some(samples::endpoints()),
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
        let page = include_str!("../../../docs/metrics.md");
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
