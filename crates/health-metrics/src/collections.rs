//! Metrics of the conntrack and NAT maps and of their garbage collection. Metrics that Cilium also has use Cilium's
//! names and labels.

use std::fmt;

use health_datapath::conntrack::{
    Cause, CollectionOutcome, Counts, DURATION_BOUNDS, Family, FamilyCounts, Pass,
};
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::render::{counter, family, gauge};

/// Writes these metrics.
pub(super) fn encode(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    encode_pressure(counts, encoder)?;
    gauge(
        encoder,
        "datapath_conntrack_gc_interval_seconds",
        "Time between two collections of conntrack entries",
        &counts.interval.as_secs_f64(),
    )?;
    encode_runs(counts, encoder)?;
    encode_durations(counts, encoder)?;
    encode_entries(counts, encoder)?;
    encode_totals(counts, encoder)
}

fn encode_pressure(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Approximate share of a map's entries in use";
    let mut pressures = family(encoder, "bpf_map_pressure", help, MetricType::Gauge)?;
    for fill in &counts.fills {
        pressures
            .encode_family(&[("map_name", fill.map)])?
            .encode_gauge(&fill.ratio())?;
    }
    Ok(())
}

fn encode_runs(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut runs = family(
        encoder,
        "datapath_conntrack_gc_runs",
        "Collections of conntrack entries",
        MetricType::Counter,
    )?;
    for of in Family::ALL {
        let FamilyCounts {
            completed, failed, ..
        } = counts.of(of);
        for cause in [Cause::Interval, Cause::Pressure] {
            let labels = [
                ("family", of.name()),
                ("status", "completed"),
                ("cause", cause.name()),
            ];
            counter(&mut runs, &labels, completed[cause as usize])?;
        }
        let labels = [("family", of.name()), ("status", "uncompleted")];
        counter(&mut runs, &labels, *failed)?;
    }
    Ok(())
}

fn encode_durations(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut durations = family(
        encoder,
        "datapath_conntrack_gc_duration_seconds",
        "Duration of collections of conntrack entries",
        MetricType::Histogram,
    )?;
    for of in Family::ALL {
        let FamilyCounts {
            durations: by_bound,
            duration,
            ..
        } = counts.of(of);
        let bounds = DURATION_BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(by_bound.iter().copied()).collect();
        durations
            .encode_family(&[("family", of.name()), ("status", "completed")])?
            .encode_histogram::<NoLabelSet>(
                duration.as_secs_f64(),
                by_bound.iter().sum(),
                &buckets,
                None,
            )?;
    }
    Ok(())
}

fn encode_entries(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Map = fn(&CollectionOutcome) -> Pass;
    let maps: [(&'static str, &str, Map); 2] = [
        (
            "datapath_conntrack_gc_entries",
            "Conntrack entries that the last collection removed and kept",
            |collected| collected.flows,
        ),
        (
            "datapath_nat_gc_entries",
            "NAT entries that the last collection removed and kept",
            |collected| collected.translations,
        ),
    ];
    for (name, help, pass) in maps {
        let mut entries = family(encoder, name, help, MetricType::Gauge)?;
        for of in Family::ALL {
            let Pass { removed, alive, .. } = pass(&counts.of(of).last);
            for (status, count) in [("deleted", removed), ("alive", alive)] {
                entries
                    .encode_family(&[("family", of.name()), ("status", status)])?
                    .encode_gauge(&count)?;
            }
        }
    }
    Ok(())
}

fn encode_totals(counts: &Counts, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Count = fn(&FamilyCounts) -> u64;
    let totals: [(&'static str, &str, Count); 3] = [
        (
            "datapath_conntrack_gc_deleted_entries",
            "Conntrack entries that collections removed",
            |counts| counts.flows_removed,
        ),
        (
            "datapath_conntrack_gc_refreshed_entries",
            "Expired conntrack entries that were in use again before their removal",
            |counts| counts.flows_refreshed,
        ),
        (
            "datapath_nat_gc_deleted_entries",
            "NAT entries that collections removed",
            |counts| counts.translations_removed,
        ),
    ];
    for (name, help, count) in totals {
        let mut entries = family(encoder, name, help, MetricType::Counter)?;
        for of in Family::ALL {
            counter(&mut entries, &[("family", of.name())], count(counts.of(of)))?;
        }
    }
    Ok(())
}
