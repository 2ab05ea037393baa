//! Reads the maps into the tables.

use std::collections::HashMap;

use health_common::service::{BACKEND_LINGERS, Backend};

use super::free::{Extent, Store};
use super::pool::Range;
use super::snapshot::Snapshot;
use super::{Known, ServiceTables, ServicesError, Sizes, family};
use crate::layout;

impl ServiceTables {
    /// Reads the maps, whichever process wrote them, unless they have just been read. Does not change the maps, and
    /// ports keep their numbers. Wrong entries are corrected when their port is next [set](super::Change::set), or
    /// removed by [`Change::remove_others`](super::Change::remove_others).
    pub fn read(&mut self) -> Result<(), ServicesError> {
        if self.is_current && self.snapshot.is_some() {
            return Ok(());
        }
        self.is_current = false;
        self.read_sizes()?;
        self.ports.clear();
        self.read_backends()?;
        let reading = |map| move |source| ServicesError::kernel("read", map, source);
        self.read_frontends()?;
        let ranges = self.ports.values().flat_map(|port| &port.ranges);
        let snapshot = Snapshot::read(&self.maps, ranges.map(|range| range.extent))?;
        self.snapshot = Some(snapshot);
        let source_ranges = self.maps.source_ranges.entries();
        let source_ranges = source_ranges.map_err(reading(layout::SOURCE_RANGES.name))?;
        self.source_range_count = source_ranges.len() as u32;
        for (prefix, _) in source_ranges {
            let port = self.ports.entry(u32::from_be(prefix.1.service_be));
            port.or_default().source_ranges.push(prefix);
        }
        self.arrays.take_retired();
        for port in self.ports.values_mut() {
            port.frontends.sort_unstable();
            port.source_ranges.sort_unstable();
        }
        self.shares.count(&self.ports);
        self.is_current = true;
        Ok(())
    }

    fn read_sizes(&mut self) -> Result<(), ServicesError> {
        let maps = &self.maps;
        let asking = |map| move |source| ServicesError::kernel("query the size of", map, source);
        let size4 = maps.frontends4.max_entries();
        let size6 = maps.frontends6.max_entries();
        let source_ranges = maps.source_ranges.max_entries();
        self.sizes = Sizes {
            frontends: [
                size4.map_err(asking(layout::SVC4.name))?,
                size6.map_err(asking(layout::SVC6.name))?,
            ],
            source_ranges: source_ranges.map_err(asking(layout::SOURCE_RANGES.name))?,
        };
        let backends = maps.backends.max_entries();
        let slots = maps.slots.max_entries();
        let maglev = maps.maglev.max_entries();
        self.arrays.clear([
            backends.map_err(asking(layout::BACKENDS.name))?,
            slots.map_err(asking(layout::SLOTS.name))?,
            maglev.map_err(asking(layout::MAGLEV.name))?,
        ]);
        Ok(())
    }

    fn read_backends(&mut self) -> Result<(), ServicesError> {
        self.strays.clear();
        let mut backends: HashMap<u32, Vec<Known>> = HashMap::new();
        let read = self.maps.backends.for_each(|index, backend: Backend| {
            if backend.service != 0 && index != 0 {
                let of_port = backends.entry(backend.service).or_default();
                of_port.push(Known {
                    at: (backend.addr, backend.port_be),
                    index,
                    lingers: backend.flags & BACKEND_LINGERS != 0,
                });
            }
        });
        read.map_err(|source| ServicesError::kernel("read", layout::BACKENDS.name, source))?;
        for (number, mut backends) in backends {
            backends.sort_unstable();
            for backend in &backends {
                self.arrays.take(Extent::backend(backend.index));
            }
            let mut strays = Vec::new();
            backends.dedup_by(|backend, kept| {
                let is_stray = backend.at == kept.at;
                strays.extend(is_stray.then_some(backend.index));
                is_stray
            });
            self.strays.append(&mut strays);
            self.ports.entry(number).or_default().backends = backends;
        }
        Ok(())
    }

    fn read_frontends(&mut self) -> Result<(), ServicesError> {
        self.frontends.clear();
        self.frontend_counts = [0; 2];
        let Self {
            maps,
            frontends,
            frontend_counts,
            ports,
            arrays,
            ..
        } = self;
        maps.for_each_frontend(|key, frontend| {
            frontends.insert(key, frontend);
            frontend_counts[family(&key)] += 1;
            let port = ports.entry(frontend.service).or_default();
            port.frontends.push(key);
            for pool in [frontend.inside, frontend.outside] {
                let Some(range) = Range::of_frontend(&frontend, pool) else {
                    continue;
                };
                let is_known = port.ranges.iter().any(|known| known.extent == range.extent);
                // A pool that overlaps another one is damaged; the shared slots must not be freed twice.
                if !is_known && range.extent.store != Store::Backends && arrays.take(range.extent) {
                    port.ranges.push(range);
                }
            }
        })
    }
}
