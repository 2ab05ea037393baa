//! Probe statistics, for metrics.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::spec::{PodSpec, ProbeType};
use crate::worker::{Counted, Start};

/// Upper bounds of the duration buckets in seconds: the kubelet's, and shorter ones.
pub const DURATION_BOUNDS: [f64; 14] = [
    0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
];

/// Identifies a probe: the pod's UID, the container's name, and the type.
pub type ProbeName = (Arc<str>, Arc<str>, ProbeType);

/// The statistics of all probes.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Statistics per probe, in any order.
    pub probes: HashMap<ProbeName, ProbeStats>,
    /// How late runs started, over all probes.
    pub delays: Histogram,
    /// Run counts of pods that are gone, as in [`ProbeStats::runs`].
    pub past: [u64; Counted::ALL.len()],
}

/// The statistics of one probe of one container.
#[derive(Clone, Debug)]
pub struct ProbeStats {
    /// The pod.
    pub pod: Arc<PodSpec>,
    /// Run counts by result, in the order of [`Counted::ALL`].
    pub runs: [u64; Counted::ALL.len()],
    /// Durations of the runs that were sent.
    pub durations: Histogram,
}

/// Number of durations within each of [`DURATION_BOUNDS`], and of those beyond the last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The buckets, not cumulative.
    pub buckets: [u64; DURATION_BOUNDS.len() + 1],
    /// The sum of all durations.
    pub sum: Duration,
}

impl Histogram {
    fn note(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = DURATION_BOUNDS.partition_point(|bound| *bound < seconds);
        self.buckets[bucket] += 1;
        self.sum += duration;
    }
}

impl Stats {
    /// Statistics per probe, sorted by name.
    pub fn by_name(&self) -> Vec<(&ProbeName, &ProbeStats)> {
        let mut probes: Vec<_> = self.probes.iter().collect();
        probes.sort_unstable_by_key(|(name, _)| *name);
        probes
    }

    /// Run counts over all probes, in the order of [`Counted::ALL`].
    pub(crate) fn totals(&self) -> [u64; Counted::ALL.len()] {
        let mut totals = self.past;
        for stats in self.probes.values() {
            for (total, count) in totals.iter_mut().zip(stats.runs) {
                *total += count;
            }
        }
        totals
    }

    pub(super) fn note(&mut self, start: &Start, counted: Counted, took: Duration, late: Duration) {
        let key = (start.pod.uid.clone(), start.container.clone(), start.kind);
        let stats = self.probes.entry(key).or_insert_with(|| ProbeStats {
            pod: start.pod.clone(),
            runs: Default::default(),
            durations: Histogram::default(),
        });
        for (kind, count) in Counted::ALL.iter().zip(&mut stats.runs) {
            *count += u64::from(*kind == counted);
        }
        if counted != Counted::NotSent {
            stats.durations.note(took);
        }
        self.delays.note(late);
    }

    pub(super) fn retain_pods(&mut self, is_desired: impl Fn(&str) -> bool) {
        let past = &mut self.past;
        self.probes.retain(|(uid, _, _), stats| {
            let is_kept = is_desired(uid);
            if !is_kept {
                for (total, count) in past.iter_mut().zip(stats.runs) {
                    *total += count;
                }
            }
            is_kept
        });
    }
}
