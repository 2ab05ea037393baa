//! Writes a change to the maps.

use health_common::service::{Backend, Frontend};

use super::{Change, FrontendKey, ServicesError, Written, frontend_map};
use crate::layout;
use crate::maps::xdp_times;
use crate::table::Table;

/// The value of all entries of `HEALTH_SOURCE_RANGES`.
const ALLOWED: u32 = 1;

impl Change<'_> {
    /// Writes the change. After an error, a part of the change is written, and the tables must be
    /// [read](ServiceTables::read) again.
    pub fn commit(mut self) -> Result<Written, ServicesError> {
        let retired = std::mem::take(&mut self.retired);
        // After an error some of these stay in use: reading the maps shows which.
        self.tables.arrays.retire(retired, self.now_ns);
        let written = self.write()?;
        self.tables.snapshot = None;
        self.tables.is_current = true;
        self.tables.arrays.tidy(self.now_ns)?;
        Ok(written)
    }

    fn write(&self) -> Result<Written, ServicesError> {
        let maps = &self.tables.maps;
        let writing = |map| move |(_, source)| ServicesError::kernel("write to", map, source);
        maps.backends
            .write(&self.backends)
            .map_err(writing(layout::BACKENDS.name))?;
        maps.slots
            .write(&self.slots)
            .map_err(writing(layout::SLOTS.name))?;
        maps.maglev
            .write(&self.maglev)
            .map_err(writing(layout::MAGLEV.name))?;
        self.write_source_ranges()?;
        self.write_frontends()?;
        let gone = self
            .backends_gone
            .iter()
            .map(|index| (*index, Backend::default()));
        let gone = maps.backends.write(&gone.collect::<Vec<_>>());
        gone.map_err(writing(layout::BACKENDS.name))?;
        if !self.backends_gone.is_empty() {
            // The backends' datagrams go elsewhere from now on.
            maps.xdp_times
                .write(&[(0, xdp_times())])
                .map_err(writing(layout::XDP_TIMES.name))?;
        }
        let removed = maps.source_ranges.delete(&self.source_ranges_gone);
        removed.map_err(|source| {
            ServicesError::kernel("remove from", layout::SOURCE_RANGES.name, source)
        })?;
        Ok(Written {
            frontends: self.frontends.len(),
            frontends_removed: self.frontends_gone.len(),
            backends: self.backends.len(),
            backends_removed: self.backends_gone.len(),
            slots: self.slots.len() + self.maglev.len(),
            source_ranges: self.source_ranges.len() + self.source_ranges_gone.len(),
        })
    }

    fn write_source_ranges(&self) -> Result<(), ServicesError> {
        let map = layout::SOURCE_RANGES.name;
        let trie = &self.tables.maps.source_ranges;
        // Removes the old entries first if old and new ones do not fit together.
        if self.before.1 as usize + self.source_ranges.len()
            > self.tables.sizes.source_ranges as usize
        {
            let removed = trie.delete(&self.source_ranges_gone);
            removed.map_err(|source| ServicesError::kernel("remove from", map, source))?;
        }
        let ranges = self.source_ranges.iter().map(|prefix| (*prefix, ALLOWED));
        let written = trie.write(&ranges.collect::<Vec<_>>());
        written.map_err(|(_, source)| ServicesError::kernel("write to", map, source))
    }

    fn write_frontends(&self) -> Result<(), ServicesError> {
        let maps = &self.tables.maps;
        let new4 = self
            .frontends_new
            .iter()
            .filter(|key| key.addr.is_v4())
            .count();
        let new = [new4, self.frontends_new.len() - new4];
        let (is_tight, rest): (Vec<usize>, Vec<usize>) = [0, 1].into_iter().partition(|family| {
            self.before.0[*family] as usize + new[*family]
                > self.tables.sizes.frontends[*family] as usize
        });
        // Frontends follow the same rule.
        for family in is_tight {
            self.delete_frontends(family)?;
        }
        let frontends = self.frontends.iter();
        let frontends4: Vec<_> = frontends
            .filter_map(|(key, frontend)| Some((key.key4()?, *frontend)))
            .collect();
        let frontends = self.frontends.iter();
        let frontends6: Vec<_> = frontends
            .filter_map(|(key, frontend)| Some((key.key6()?, *frontend)))
            .collect();
        let first = write_all(&maps.frontends4, &frontends4, 0);
        let second = write_all(&maps.frontends6, &frontends6, 1);
        first.and(second)?;
        for family in rest {
            self.delete_frontends(family)?;
        }
        Ok(())
    }

    fn delete_frontends(&self, family: usize) -> Result<(), ServicesError> {
        let maps = &self.tables.maps;
        let gone = self.frontends_gone.iter();
        let deleted = if family == 0 {
            maps.frontends4
                .delete(&gone.filter_map(FrontendKey::key4).collect::<Vec<_>>())
        } else {
            maps.frontends6
                .delete(&gone.filter_map(FrontendKey::key6).collect::<Vec<_>>())
        };
        deleted.map_err(|source| ServicesError::kernel("remove from", frontend_map(family), source))
    }
}

/// Writes frontends. If the kernel rejects one, the others are still written. Returns the first error.
fn write_all<K: aya::Pod + Into<FrontendKey>>(
    map: &Table<K, Frontend>,
    entries: &[(K, Frontend)],
    family: usize,
) -> Result<(), ServicesError> {
    let mut result = Ok(());
    let mut rest = entries;
    while let Err((done, source)) = map.write(rest) {
        let (refused, others) = rest[done..].split_at(1.min(rest.len() - done));
        let key: Option<FrontendKey> = refused.first().map(|(key, _)| (*key).into());
        result = result.and(Err(ServicesError::Kernel {
            what: "write to",
            map: frontend_map(family),
            of: key.map_or_else(String::new, |key| format!(" ({})", key.address())),
            source,
        }));
        rest = others;
    }
    result
}
