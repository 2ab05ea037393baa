//! Renders the metrics of one scrape.

mod agent;
mod nodes;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::{fmt, io};

use health_datapath::dump::MetricRow;
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::figures::Figures;
use crate::format::Format;
use crate::histogram::Histogram;
use crate::summary::{Address, Peer, Summary, Target};
use crate::totals::{Class, Probes};
use crate::{collections, containers, endpoints, events};

const PREFIX: &str = "health_agent";

pub(super) type Label<'a> = (&'static str, &'a str);

/// The contents of one scrape.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) figures: Figures,
    pub(super) summary: Summary,
    pub(super) now: Timestamp,
    pub(super) maps_readable: bool,
    pub(super) counters: Vec<MetricRow>,
    pub(super) probes: Vec<(Class, Probes)>,
    /// The round trips of each class that are too old for summaries.
    pub(super) before: BTreeMap<Class, Histogram>,
}

/// Writes the metrics.
pub(super) fn write(snapshot: Snapshot, format: Format, out: &mut dyn io::Write) -> io::Result<()> {
    let snapshot = Arc::new(snapshot);
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(snapshot.clone()));
    super::write::write(&registry, snapshot.summaries(), format, out)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_agent(encoder)?;
        self.encode_controllers(encoder)?;
        self.encode_registries(encoder)?;
        self.encode_nodes(encoder)?;
        self.encode_diagnoses(encoder)?;
        self.encode_failing(encoder)?;
        self.encode_peers(encoder)?;
        self.encode_latency(encoder)?;
        self.encode_probes(encoder)?;
        self.encode_refused(encoder)?;
        self.encode_packets(encoder)?;
        collections::encode(&self.figures.collections, encoder)?;
        if let Some(counts) = &self.figures.endpoints {
            endpoints::encode(counts, encoder)?;
            endpoints::encode_lag(self.figures.policy_lag.as_ref(), encoder)?;
        }
        events::encode(&self.figures.events, encoder)?;
        match &self.figures.containers {
            Some(sample) => containers::encode(sample, encoder),
            None => Ok(()),
        }
    }
}

impl Snapshot {
    /// The labels of the reporting node.
    fn source(&self) -> [Label<'_>; 2] {
        [
            ("source_cluster", &self.summary.cluster),
            ("source_node_name", &self.summary.name),
        ]
    }

    /// All probe targets on the nodes that have their own series.
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
    /// The labels of a probed node.
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
mod tests;
