//! Metrics of the counts in the datapath's maps.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use health_common::metrics::{Direction, Reason};
use health_datapath::dump::MetricRow;
use prometheus_client::encoding::{
    DescriptorEncoder, MetricEncoder, NativeHistogram, NativeHistogramBuckets, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::DEFAULT_NATIVE_HISTOGRAM_ZERO_THRESHOLD;

use super::{Label, PREFIX, Snapshot, counter, family};
use crate::histogram::{Histogram, SCHEMA};
use crate::recent::Quantiles;
use crate::summaries::SummaryFamily;
use crate::totals::Probes;

/// Writes classic buckets, and also native buckets if the format supports them.
pub(super) fn histogram(
    family: &mut MetricEncoder<'_>,
    labels: &[Label<'_>],
    probes: &Probes,
) -> fmt::Result {
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

/// A path and protocol, and the counts of their probes.
type Probed<'a> = ((&'static str, &'static str), &'a Probes);

fn encode_results(probed: &[Probed<'_>], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Completed probes by result";
    let mut results = family(encoder, "node_health_probes", help, MetricType::Counter)?;
    for ((path, protocol), probes) in probed {
        for (result, count) in [("answered", probes.answered), ("lost", probes.lost)] {
            let labels = [("type", *path), ("protocol", *protocol), ("result", result)];
            counter(&mut results, &labels, count)?;
        }
    }
    Ok(())
}

/// Selects one of the counts of a target's probes.
type Count = fn(&Probes) -> u64;

fn encode_replies(probed: &[Probed<'_>], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counts: [(&'static str, &str, Count); 2] = [
        (
            "node_health_late_replies",
            "Replies to probes that had timed out",
            |probes| probes.late,
        ),
        (
            "node_health_duplicate_replies",
            "Further replies to answered probes",
            |probes| probes.duplicates,
        ),
    ];
    for (name, help, count) in counts {
        let mut replies = family(encoder, name, help, MetricType::Counter)?;
        for ((path, protocol), probes) in probed {
            let labels = [("type", *path), ("protocol", *protocol)];
            counter(&mut replies, &labels, count(probes))?;
        }
    }
    Ok(())
}

fn encode_remote_times(probed: &[Probed<'_>], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let times: [(&'static str, &str, Count); 2] = [
        (
            "node_health_remote_seconds",
            "Time that probes spent in peers' hosts, as far as they report it",
            |probes| probes.remote_ns,
        ),
        (
            "node_health_remote_known_rtt_seconds",
            "Round trips of the probes for which that time is known",
            |probes| probes.remote_rtt_ns,
        ),
    ];
    for (name, help, ns) in times {
        let mut times = family(encoder, name, help, MetricType::Counter)?;
        for ((path, protocol), probes) in probed.iter().filter(|(_, p)| p.remote_rtt_ns > 0) {
            let labels = [("type", *path), ("protocol", *protocol)];
            counter(&mut times, &labels, ns(probes) as f64 / 1e9)?;
        }
    }
    Ok(())
}

impl Snapshot {
    /// The counts and the recent round trips by path and protocol, with primary and secondary addresses combined.
    pub(super) fn by_target(&self) -> BTreeMap<(&'static str, &'static str), (Probes, Histogram)> {
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

    pub(super) fn summaries(&self) -> impl Iterator<Item = SummaryFamily<'_>> {
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
                help: "Round trips to a target, from the pinned map",
                summaries: Box::new(of_targets),
            },
        ]
        .into_iter()
    }

    pub(super) fn encode_probes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let by_target = self.by_target();
        let probed = self.probes.iter().filter(|(class, _)| class.is_probed());
        let targets: BTreeSet<_> = probed
            .map(|(class, _)| (class.path, class.protocol))
            .collect();
        let probed: Vec<Probed<'_>> = targets
            .into_iter()
            .filter_map(|target| Some((target, &by_target.get(&target)?.0)))
            .collect();
        encode_results(&probed, encoder)?;
        encode_replies(&probed, encoder)?;
        encode_remote_times(&probed, encoder)
    }

    /// Writes how many ICMP messages and requests of peers the agent did not accept.
    pub(super) fn encode_refused(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let replies = &self.figures.ignored_replies;
        let help = "ICMP messages that carry the agent's identifier but match no probe";
        let mut ignored = family(encoder, "ignored_icmp_replies", help, MetricType::Counter)?;
        for (reason, count) in [
            ("unexpected", replies.unexpected),
            ("wrong-source", replies.wrong_source),
            ("wrong-payload", replies.wrong_payload),
            ("unmatched-error", replies.unmatched_error),
        ] {
            counter(&mut ignored, &[("reason", reason)], count)?;
        }
        let requests = &self.figures.hello_requests;
        let help = "Invalid echo-probe headers of GET /hello";
        let mut malformed = family(
            encoder,
            "malformed_hello_headers",
            help,
            MetricType::Counter,
        )?;
        for (of, count) in [
            ("request", requests.malformed),
            ("answer", self.figures.malformed_answers),
        ] {
            counter(&mut malformed, &[("of", of)], count)?;
        }
        let help = "GET /hello requests that this agent refused";
        let mut refused = family(encoder, "refused_hello_requests", help, MetricType::Counter)?;
        for (reason, count) in [
            ("no-proof", requests.no_proof),
            ("clock", requests.clock),
            ("wrong-node", requests.wrong_node),
            ("too-many", requests.too_many),
        ] {
            counter(&mut refused, &[("reason", reason)], count)?;
        }
        Ok(())
    }

    pub(super) fn encode_packets(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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

    pub(super) fn encode_rows(
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
            // Another version's reasons have no name here, and lost events are not packets.
            let reason = reason.filter(|reason| *reason != Reason::EventLost);
            if let Some(reason) = reason.filter(|reason| reason.is_drop() == drops) {
                let labels = [("reason", reason.text()), ("direction", direction)];
                counter(&mut packets, &labels, count(row))?;
            }
        }
        Ok(())
    }
}
