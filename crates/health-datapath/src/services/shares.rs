//! Divides the tables among the owners of ports.
//!
//! A port may grow while at least an eighth of its owner's resulting total stays free. So a lone owner can use eight
//! ninths of a table, two owners that want the maximum can use eight seventeenths each, and latecomers always find
//! space. A 64th of each table is reserved for ports that replace their entries, so that they never wait for other
//! ports to release space. A port that does not grow is never refused, however much other ports use.
//!
//! See Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998.

use std::collections::HashMap;
use std::sync::Arc;

use super::free::Store;
use super::{Port, ServicesError, family};
use crate::layout;

/// An owner may use this many times the free space: a table 9/8 times as large as needed lets a lone owner use all that
/// it needs.
pub const SHARE: u32 = 8;
/// The reserve for replacements is a table's size divided by this.
const SPARE: u32 = 64;

/// A table that all ports share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Common {
    Frontends4,
    Frontends6,
    SourceRanges,
    Backends,
    Slots,
    Maglev,
}

impl Common {
    const ALL: [Self; 6] = [
        Self::Frontends4,
        Self::Frontends6,
        Self::SourceRanges,
        Self::Backends,
        Self::Slots,
        Self::Maglev,
    ];

    fn map(self) -> &'static str {
        match self {
            Self::Frontends4 => layout::SVC4.name,
            Self::Frontends6 => layout::SVC6.name,
            Self::SourceRanges => layout::SOURCE_RANGES.name,
            Self::Backends => layout::BACKENDS.name,
            Self::Slots => layout::SLOTS.name,
            Self::Maglev => layout::MAGLEV.name,
        }
    }
}

/// Numbers of entries, one for each shared table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entries([u32; Common::ALL.len()]);

impl Entries {
    /// Counts the entries of a port.
    pub(super) fn of_port(port: &Port) -> Self {
        let mut entries = Self::default();
        for key in &port.frontends {
            let of_family = [Common::Frontends4, Common::Frontends6][family(key)];
            *entries.at(of_family) += 1;
        }
        *entries.at(Common::SourceRanges) = port.source_ranges.len() as u32;
        *entries.at(Common::Backends) = port.backends.len() as u32;
        for range in &port.ranges {
            let table = match range.extent.store {
                Store::Maglev => Common::Maglev,
                Store::Slots | Store::Backends => Common::Slots,
            };
            *entries.at(table) += range.extent.len;
        }
        entries
    }

    pub(super) fn at(&mut self, table: Common) -> &mut u32 {
        &mut self.0[table as usize]
    }

    fn of(&self, table: Common) -> u32 {
        self.0[table as usize]
    }

    fn add(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum = sum.saturating_add(more);
        }
    }

    fn remove(&mut self, other: &Self) {
        for (sum, less) in self.0.iter_mut().zip(other.0) {
            *sum = sum.saturating_sub(less);
        }
    }
}

/// Each owner's use of the tables.
#[derive(Debug, Default)]
pub(super) struct Shares {
    owners: HashMap<Arc<str>, Entries>,
    /// The owners of ports that were set, by number.
    of_port: HashMap<u32, Arc<str>>,
    /// The entries of all ports, including those that have not been set since the start.
    total: Entries,
}

impl Shares {
    /// Recounts from scratch. Ports keep their owners.
    pub(super) fn count<'a>(&mut self, ports: impl IntoIterator<Item = (&'a u32, &'a Port)>) {
        self.owners.clear();
        self.total = Entries::default();
        for (number, port) in ports {
            let entries = Entries::of_port(port);
            self.total.add(&entries);
            if let Some(owner) = self.of_port.get(number) {
                self.owners.entry(owner.clone()).or_default().add(&entries);
            }
        }
    }

    /// Records that a port belongs to an owner and now has the entries `is` instead of `was`.
    pub(super) fn set(&mut self, number: u32, owner: &str, was: &Entries, is: &Entries) {
        self.remove(number, was);
        let known = self
            .owners
            .get_key_value(owner)
            .map(|(known, _)| known.clone());
        let owner = known.unwrap_or_else(|| owner.into());
        self.total.add(is);
        self.owners.entry(owner.clone()).or_default().add(is);
        self.of_port.insert(number, owner);
    }

    /// Records that a port is gone.
    pub(super) fn remove(&mut self, number: u32, was: &Entries) {
        self.total.remove(was);
        let Some(owner) = self.of_port.remove(&number) else {
            return;
        };
        if let Some(entries) = self.owners.get_mut(&owner) {
            entries.remove(was);
            if *entries == Entries::default() {
                self.owners.remove(&owner);
            }
        }
    }

    /// Fails if the owner would exceed its share once its port has the entries `is` instead of `was`. Does not fail if
    /// the table is completely full: the allocation fails then. `sizes`: table sizes; `maglev_size`: slots of a Maglev
    /// table.
    pub(super) fn admit(
        &self,
        number: u32,
        owner: &str,
        (was, is): (&Entries, &Entries),
        sizes: &Entries,
        maglev_size: u32,
    ) -> Result<(), ServicesError> {
        let is_counted = self
            .of_port
            .get(&number)
            .is_some_and(|known| **known == *owner);
        for table in Common::ALL {
            let (was, is) = (was.of(table), is.of(table));
            if is <= was {
                continue;
            }
            let others = self.total.of(table).saturating_sub(was);
            let Some(free) = sizes.of(table).checked_sub(others.saturating_add(is)) else {
                continue;
            };
            let has = self
                .owners
                .get(owner)
                .map_or(0, |entries| entries.of(table));
            let own = if is_counted {
                has.saturating_sub(was)
            } else {
                has
            };
            // Maglev tables are never partly used.
            let unit = if table == Common::Maglev {
                maglev_size.max(1)
            } else {
                1
            };
            let own_then = own.saturating_add(is) / unit;
            let spare = sizes.of(table) / unit / SPARE;
            if free / unit < (own_then / SHARE).max(spare) {
                return Err(ServicesError::Share {
                    map: table.map(),
                    owner: owner.to_owned(),
                    wanted: is - was,
                    used: has,
                    free: free + (is - was),
                    size: sizes.of(table),
                });
            }
        }
        Ok(())
    }
}
