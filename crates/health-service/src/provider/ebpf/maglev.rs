//! Fills the Maglev tables in the maps.

use health_datapath::services::{FillMaglev, MaglevBackend};

use crate::maglev::{Entry, Maglev, hash};

/// Fills Maglev tables with backend indexes.
#[derive(Debug)]
pub struct MaglevTables(Maglev);

impl MaglevTables {
    /// Creates tables that this filler fills.
    pub const fn new(maglev: Maglev) -> Self {
        Self(maglev)
    }
}

impl FillMaglev for MaglevTables {
    fn size(&self) -> u32 {
        self.0.size()
    }

    fn fill(&mut self, backends: &[MaglevBackend], table: &mut [u32]) {
        let entries = backends.iter().map(|backend| Entry {
            id: backend.index,
            hash: hash(backend.address),
            weight: backend.weight,
        });
        self.0.fill(&entries.collect::<Vec<_>>(), table);
    }
}
