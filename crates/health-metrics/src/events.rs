//! Metrics of the programs' events for monitor clients.

use std::fmt;

use health_datapath::events::Counts;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::render::{counter, family, gauge};

/// Writes these metrics.
pub(super) fn encode(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    gauge(
        encoder,
        "monitor_readers",
        "Clients that monitor datapath events",
        &(counts.readers as u64),
    )?;
    family(
        encoder,
        "monitor_events",
        "Events that the programs wrote for monitor clients",
        MetricType::Counter,
    )?
    .encode_counter::<NoLabelSet, _, u64>(&counts.read, None)?;
    let mut lost = family(
        encoder,
        "monitor_lost_events",
        "Events that monitor clients have lost",
        MetricType::Counter,
    )?;
    for (cause, count) in [
        ("ring-full", counts.lost_in_ring),
        ("slow-reader", counts.lost_by_readers),
    ] {
        counter(&mut lost, &[("cause", cause)], count)?;
    }
    Ok(())
}
