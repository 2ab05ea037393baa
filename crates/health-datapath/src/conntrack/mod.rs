//! Collection of conntrack and NAT entries: when it happens, and what is reported about it.

mod collector;
mod counts;
mod schedule;

use std::io;

use health_model::api::FullMap;

pub use self::collector::{Collector, SharedCounts};
pub use self::counts::{Cause, Counts, DURATION_BOUNDS, FamilyCounts};
pub use self::schedule::{Pace, SHORTEST, Schedule};

/// An IP version: each has conntrack and NAT maps of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `HEALTH_CT4`, `HEALTH_NAT4` and those for other protocols than TCP.
    Ipv4,
    /// `HEALTH_CT6`, `HEALTH_NAT6` and those for other protocols than TCP.
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
    /// Entries that were over when they were found, and in use again when they were to be removed.
    pub refreshed: u64,
    /// Entries that are left. Those that came or were evicted meanwhile make it inexact.
    pub alive: u64,
}

impl Pass {
    /// Both together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            removed: self.removed + other.removed,
            refreshed: self.refreshed + other.refreshed,
            alive: self.alive + other.alive,
        }
    }

    /// The part of all entries that was removed.
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
    /// The NAT maps, entries that went with their flow and those that had none.
    pub translations: Pass,
}

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Its name.
    pub map: &'static str,
    /// Entries in it, about.
    pub entries: u64,
    /// Entries that it has room for.
    pub capacity: u64,
}

impl Fill {
    /// The part of its room that is taken.
    pub fn ratio(&self) -> f64 {
        self.entries as f64 / self.capacity.max(1) as f64
    }

    /// As reports show a map that is nearly full.
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
    /// What was attempted.
    pub what: &'static str,
    /// On which map.
    pub map: &'static str,
    /// The kernel's answer.
    pub source: io::Error,
}

/// The conntrack and NAT maps.
pub trait Tables: Send + Sync + 'static {
    /// Removes what has expired. Takes up to a second for a million entries.
    fn collect(&self, family: Family) -> Result<CollectionOutcome, TableError>;
    /// How full each map is, by a look at a part of it.
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
