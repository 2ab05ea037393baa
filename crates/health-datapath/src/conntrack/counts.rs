//! Results of collections, for metrics.

use std::time::Duration;

use super::{CollectionOutcome, Family, Fill};

/// Upper bounds of the durations of collections, in seconds.
pub const DURATION_BOUNDS: [f64; 9] = [0.001, 0.004, 0.016, 0.064, 0.25, 0.5, 1.0, 2.0, 8.0];

/// Why a collection was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It was due.
    Interval,
    /// A map was nearly full.
    Pressure,
}

impl Cause {
    /// `interval` or `pressure`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interval => "interval",
            Self::Pressure => "pressure",
        }
    }
}

/// Collections of one IP version since the agent started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FamilyCounts {
    /// Completed collections, by cause: due, and under pressure.
    pub completed: [u64; 2],
    /// Failed collections.
    pub failed: u64,
    /// Durations of completed collections, by [`DURATION_BOUNDS`], not cumulative; the last count is for longer ones.
    pub durations: [u64; DURATION_BOUNDS.len() + 1],
    /// Sum of these durations.
    pub duration: Duration,
    /// Outcome of the last collection.
    pub last: CollectionOutcome,
    /// Conntrack entries removed by all collections.
    pub flows_removed: u64,
    /// Conntrack entries that were in use again when they should have been removed.
    pub flows_refreshed: u64,
    /// NAT entries removed by all collections.
    pub translations_removed: u64,
}

impl FamilyCounts {
    fn note(&mut self, cause: Cause, collected: CollectionOutcome, took: Duration) {
        self.completed[cause as usize] += 1;
        let secs = took.as_secs_f64();
        let bucket = DURATION_BOUNDS.partition_point(|&bound| bound < secs);
        self.durations[bucket] += 1;
        self.duration += took;
        self.flows_removed += collected.flows.removed;
        self.flows_refreshed += collected.flows.refreshed;
        self.translations_removed += collected.translations.removed;
        self.last = collected;
    }
}

/// Collections since the agent started, and the fill levels of the maps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    families: [FamilyCounts; 2],
    /// The current interval between two collections.
    pub interval: Duration,
    /// How full each map was at the last check.
    pub fills: Vec<Fill>,
}

impl Counts {
    /// The counts of one IP version.
    pub fn of(&self, family: Family) -> &FamilyCounts {
        &self.families[family as usize]
    }

    /// Records a completed collection and its duration.
    pub fn note(
        &mut self,
        family: Family,
        cause: Cause,
        collected: CollectionOutcome,
        took: Duration,
    ) {
        self.families[family as usize].note(cause, collected, took);
    }

    /// Records a failed collection.
    pub fn note_failure(&mut self, family: Family) {
        self.families[family as usize].failed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conntrack::Pass;

    #[test]
    fn collections_are_counted_by_family_cause_and_duration() {
        let mut counts = Counts::default();
        let collected = CollectionOutcome {
            flows: Pass {
                removed: 3,
                refreshed: 1,
                alive: 5,
            },
            ..CollectionOutcome::default()
        };
        let millis = Duration::from_millis;
        counts.note(Family::Ipv6, Cause::Pressure, collected, millis(4));
        counts.note(Family::Ipv6, Cause::Interval, collected, millis(9_000));
        counts.note_failure(Family::Ipv6);
        assert_eq!(*counts.of(Family::Ipv4), FamilyCounts::default());
        let seen = counts.of(Family::Ipv6);
        assert_eq!((seen.completed, seen.failed), ([1, 1], 1));
        assert_eq!(seen.durations, [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(seen.duration, millis(9_004));
        assert_eq!((seen.flows_removed, seen.flows_refreshed), (6, 2));
        assert_eq!(seen.last, collected);
    }
}
