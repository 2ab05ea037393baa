//! Metrics of endpoints: the number in each state, and the results of regenerations. Names and labels are Cilium's.

use std::fmt;

use health_endpoint::manager::{Counts, DURATION_BOUNDS};
use health_model::api::PolicyLag;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::render::{counter, family, gauge};

/// Writes the number of endpoints on which the current policy is not in force.
pub(super) fn encode_lag(
    lag: Option<&PolicyLag>,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    gauge(
        encoder,
        "policy_endpoints_behind",
        "Workload endpoints where the previous policy is still in force",
        &lag.map_or(0, |lag| lag.endpoints),
    )
}

/// Writes these metrics.
pub(super) fn encode(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Workload endpoints by state";
    let mut states = family(encoder, "endpoint_state", help, MetricType::Gauge)?;
    for (state, count) in &counts.states {
        states
            .encode_family(&[("endpoint_state", state.text())])?
            .encode_gauge(count)?;
    }
    let help = "Finished endpoint regenerations";
    let mut regenerations = family(encoder, "endpoint_regenerations", help, MetricType::Counter)?;
    for (outcome, count) in [("success", counts.succeeded), ("fail", counts.failed)] {
        counter(&mut regenerations, &[("outcome", outcome)], count)?;
    }
    let bounds = DURATION_BOUNDS.into_iter().chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(counts.durations).collect();
    encoder
        .encode_descriptor(
            "endpoint_regeneration_time_stats_seconds",
            "Duration of endpoint regenerations",
            None,
            MetricType::Histogram,
        )?
        .encode_histogram::<NoLabelSet>(
            counts.duration.as_secs_f64(),
            counts.durations.iter().sum(),
            &buckets,
            None,
        )
}
