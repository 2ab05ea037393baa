//! Garbage collection of conntrack and NAT entries: its schedule, its statistics, and the kernel tables that it cleans.

mod collector;
mod counts;
mod kernel_tables;
mod schedule;

use std::io;

use health_model::api::FullMap;

pub use self::collector::{Collector, SharedCounts};
pub use self::counts::{Cause, Counts, DURATION_BOUNDS, FamilyCounts};
pub use self::kernel_tables::KernelTables;
pub use self::schedule::{Pace, SHORTEST, Schedule};

/// An IP version: each has its own conntrack and NAT maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `HEALTH_CT4`, `HEALTH_NAT4` and their counterparts for protocols other than TCP.
    Ipv4,
    /// `HEALTH_CT6`, `HEALTH_NAT6` and their counterparts for protocols other than TCP.
    Ipv6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    /// `ipv4` or `ipv6`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
        }
    }
}

/// What a collection did to the maps of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Entries removed.
    pub removed: u64,
    /// Entries that had expired when they were found, but were in use again when they should have been removed.
    pub refreshed: u64,
    /// Entries that are left. Not exact: entries may be added or evicted meanwhile.
    pub alive: u64,
}

impl Pass {
    /// Adds two passes.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            removed: self.removed + other.removed,
            refreshed: self.refreshed + other.refreshed,
            alive: self.alive + other.alive,
        }
    }

    /// The fraction of all entries that was removed.
    fn removed_part(&self) -> f64 {
        let all = self.removed + self.alive;
        if all == 0 {
            0.0
        } else {
            self.removed as f64 / all as f64
        }
    }
}

/// What a collection did to the maps of one IP version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectionOutcome {
    /// The conntrack maps.
    pub flows: Pass,
    /// The NAT maps: entries removed with their flow, and entries without a flow.
    pub translations: Pass,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Its name.
    pub map: &'static str,
    /// Number of entries, approximately.
    pub entries: u64,
    /// Maximum number of entries.
    pub capacity: u64,
}

impl Fill {
    /// The fraction of its capacity that is used.
    pub fn ratio(&self) -> f64 {
        self.entries as f64 / self.capacity.max(1) as f64
    }

    /// Converts to the form in which reports show a nearly full map.
    pub(crate) fn full_map(&self) -> FullMap {
        FullMap {
            map: self.map.to_owned(),
            entries: self.entries,
            capacity: self.capacity,
        }
    }

    /// Whether it is nearly full: over 80 %.
    pub fn is_pressed(&self) -> bool {
        self.entries * 5 > self.capacity * 4
    }
}

/// A map that could not be read or collected.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {map}: {source}")]
pub struct TableError {
    /// The attempted operation.
    pub what: &'static str,
    /// The map.
    pub map: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// The conntrack and NAT maps.
pub trait Tables: Send + Sync + 'static {
    /// Removes expired entries. Takes up to a second for a million entries.
    fn collect(&self, family: Family) -> Result<CollectionOutcome, TableError>;
    /// How full each map is, estimated from a sample.
    fn fills(&self) -> Result<Vec<Fill>, TableError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_pressed_over_four_fifths() {
        let fill = |entries| Fill {
            map: "HEALTH_CT4",
            entries,
            capacity: 65_536,
        };
        assert!(!fill(52_428).is_pressed());
        assert!(fill(52_429).is_pressed());
    }

    #[test]
    fn of_an_empty_map_nothing_was_removed() {
        assert_eq!(Pass::default().removed_part(), 0.0);
    }
}
