//! The contents of pools' slots. The arrays hold millions of slots, so only the needed parts are read.

use std::collections::BTreeMap;
use std::io;

use super::free::{Extent, Store};
use super::{ServiceMaps, ServicesError};
use crate::layout;
use crate::table::Table;

/// Up to this many unneeded slots between needed ones are read too: one long read is faster than two short ones.
const GAP: u32 = 256;

/// The values in some slots of the arrays, as read.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    slots: Places,
    maglev: Places,
}

impl Snapshot {
    /// Reads these extents. Extents that reach beyond the end of their array are left out.
    pub(super) fn read(
        maps: &ServiceMaps,
        extents: impl Iterator<Item = Extent>,
    ) -> Result<Self, ServicesError> {
        let is_maglev = |extent: &Extent| extent.store == Store::Maglev;
        let (maglev, slots): (Vec<_>, Vec<_>) = extents.partition(is_maglev);
        let reading = |map| move |source| ServicesError::kernel("read", map, source);
        Ok(Self {
            slots: Places::read(&maps.slots, slots).map_err(reading(layout::SLOTS.name))?,
            maglev: Places::read(&maps.maglev, maglev).map_err(reading(layout::MAGLEV.name))?,
        })
    }

    /// Returns `len` values from an index of an array; `None` if not all of them were read.
    pub(super) fn get(&self, store: Store, at: u32, len: u32) -> Option<&[u32]> {
        match store {
            Store::Maglev => self.maglev.get(at, len),
            Store::Slots | Store::Backends => self.slots.get(at, len),
        }
    }
}

/// Values of runs of slots, by the index of a run's first slot.
#[derive(Debug, Default)]
struct Places(BTreeMap<u32, Vec<u32>>);

impl Places {
    fn read(array: &Table<u32, u32>, mut extents: Vec<Extent>) -> io::Result<Self> {
        extents.sort_unstable_by_key(|extent| extent.at);
        let mut rows: Vec<(u32, u32)> = Vec::new();
        for Extent { at, len, .. } in extents {
            let end = at.saturating_add(len);
            match rows.last_mut() {
                Some((_, last)) if at <= last.saturating_add(GAP) => *last = end.max(*last),
                _ => rows.push((at, end)),
            }
        }
        let rows = rows.into_iter();
        let read = rows.map(|(at, end)| Ok((at, array.range(at..end)?)));
        Ok(Self(read.collect::<io::Result<_>>()?))
    }

    fn get(&self, at: u32, len: u32) -> Option<&[u32]> {
        let (first, values) = self.0.range(..=at).next_back()?;
        let from = (at - first) as usize;
        values.get(from..from.checked_add(len as usize)?)
    }
}
