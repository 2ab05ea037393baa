//! Maps of flows that are to have another size than they had: the new ones take the place of the former,
//! whose entries are carried over while packets go on.
//!
//! The pin of a former map is set aside, so that the loader makes a new one. Right before the programs are
//! replaced, all entries are copied; right after, those that came in between. A start that ends before that
//! puts the pins back. One that is killed leaves both, and the next one copies what is missing.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::EbpfLoader;
use health_common::ct::{CtEntry, DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES};
use health_net::clock;
use tracing::{info, warn};

use super::layout::{CT_ANY4, CT_ANY6, CT4, CT6, MapLayout, NAT_ANY4, NAT_ANY6, NAT4, NAT6};
use super::loader::{file_error, remove_tree};
use super::walk::{Batch, EntrySize, Walk};
use super::{DatapathError, sys};

/// Most entries of the maps whose size can be set, each IP version's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Of `HEALTH_CT4` and `HEALTH_CT6`.
    pub conntrack: u32,
    /// Of `HEALTH_CT_ANY4` and `HEALTH_CT_ANY6`.
    pub conntrack_any: u32,
    /// Of `HEALTH_NAT4` and `HEALTH_NAT6`.
    pub nat: u32,
    /// Of `HEALTH_NAT_ANY4` and `HEALTH_NAT_ANY6`.
    pub nat_any: u32,
}

impl Default for MapSizes {
    fn default() -> Self {
        Self {
            conntrack: DEFAULT_ENTRIES,
            conntrack_any: DEFAULT_ANY_ENTRIES,
            nat: DEFAULT_ENTRIES,
            nat_any: DEFAULT_ANY_ENTRIES,
        }
    }
}

impl MapSizes {
    fn all(self) -> [(MapLayout, u32); 8] {
        [
            (CT4, self.conntrack),
            (CT6, self.conntrack),
            (NAT4, self.nat),
            (NAT6, self.nat),
            (CT_ANY4, self.conntrack_any),
            (CT_ANY6, self.conntrack_any),
            (NAT_ANY4, self.nat_any),
            (NAT_ANY6, self.nat_any),
        ]
    }

    /// Has maps that are not pinned yet made in these sizes.
    pub(super) fn apply(self, loader: &mut EbpfLoader<'_>) {
        for (map, size) in self.all() {
            loader.map_max_entries(map.name, size);
        }
    }
}

/// Maps on their way to another size.
#[derive(Debug)]
pub(super) struct PendingResize {
    pins: PathBuf,
    maps: Vec<MapLayout>,
    /// Those that only this start has set aside, as long as no program uses the new ones.
    set_aside: Vec<MapLayout>,
}

impl PendingResize {
    /// Sets pinned maps of other sizes aside.
    pub(super) fn prepare(pins: &Path, sizes: MapSizes) -> Result<Self, DatapathError> {
        let mut resizing = Self {
            pins: pins.to_owned(),
            maps: Vec::new(),
            set_aside: Vec::new(),
        };
        for (map, size) in sizes.all() {
            resizing.prepare_map(map, size)?;
        }
        Ok(resizing)
    }

    /// Whether there are such maps.
    pub(super) fn is_needed(&self) -> bool {
        !self.maps.is_empty()
    }

    fn prepare_map(&mut self, map: MapLayout, size: u32) -> Result<(), DatapathError> {
        let (pin, former) = self.paths(&map);
        let has_former = former.exists();
        if has_former && !pin.exists() {
            rename(&former, &pin)?;
        } else if has_former {
            // A change that was cut short: whatever programs use, no flow is only in the former map.
            self.copy(&map)?;
        }
        let Some((_, info)) = open(&pin)? else {
            return Ok(());
        };
        if info.max_entries == size {
            if former.exists() {
                self.maps.push(map);
            }
            return Ok(());
        }
        remove_tree(&former)?;
        rename(&pin, &former)?;
        info!(
            map = map.name,
            from = info.max_entries,
            to = size,
            "the map gets another size; its entries are carried over"
        );
        self.maps.push(map);
        self.set_aside.push(map);
        Ok(())
    }

    /// Copies what the new maps do not have. To be called right before the programs are replaced, and
    /// right after.
    pub(super) fn carry_over(&mut self) -> Result<(), DatapathError> {
        for map in &self.maps {
            self.copy(map)?;
        }
        self.set_aside.clear();
        Ok(())
    }

    /// Forgets the former maps, when no program uses them any more.
    pub(super) fn finish(mut self) -> Result<(), DatapathError> {
        self.carry_over()?;
        for map in std::mem::take(&mut self.maps) {
            remove_tree(&self.paths(&map).1)?;
        }
        Ok(())
    }

    /// Copies living entries of a former map that the new one does not have.
    fn copy(&self, map: &MapLayout) -> Result<(), DatapathError> {
        let (pin, former_pin) = self.paths(map);
        let (Some((former, _)), Some((new, info))) = (open(&former_pin)?, open(&pin)?) else {
            return Ok(());
        };
        let failed = |source| file_error("copy the entries of", &former_pin)(source);
        let alive = copy_entries(map, &former, &new).map_err(failed)?;
        if alive > u64::from(info.max_entries) {
            warn!(
                map = map.name,
                entries = alive,
                room = info.max_entries,
                "the map has no room for all flows that there are; some are forgotten"
            );
        }
        Ok(())
    }

    fn paths(&self, map: &MapLayout) -> (PathBuf, PathBuf) {
        let former = format!("{}_former", map.name);
        (self.pins.join(map.name), self.pins.join(former))
    }
}

impl Drop for PendingResize {
    fn drop(&mut self) {
        for map in &self.set_aside {
            let (pin, former) = self.paths(map);
            if let Err(error) = rename(&former, &pin) {
                warn!(%error, "cannot undo the start");
            }
        }
    }
}

/// Copies living entries that `to` does not have; how many are alive.
fn copy_entries(map: &MapLayout, from: &OwnedFd, to: &OwnedFd) -> io::Result<u64> {
    let now = clock::coarse_now_secs();
    let is_flow = [CT4, CT6, CT_ANY4, CT_ANY6].contains(map);
    let mut walk = Walk::new(EntrySize {
        key: map.key_size as usize,
        value: map.value_size as usize,
    });
    let mut batch = Batch::default();
    let mut alive = 0;
    while walk.read(from.as_fd(), &mut batch)? {
        for (key, value) in batch.entries() {
            let flow = is_flow.then(|| sys::read::<CtEntry>(value)).flatten();
            if flow.is_some_and(|flow| flow.has_expired(now)) {
                continue;
            }
            alive += 1;
            sys::add(to.as_fd(), key, value)?;
        }
    }
    Ok(alive)
}

/// A pinned map; `None` where none is pinned.
fn open(pin: &Path) -> Result<Option<(OwnedFd, sys::MapInfo)>, DatapathError> {
    match sys::open_map(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map_err(file_error("open", pin)),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), DatapathError> {
    fs::rename(from, to).map_err(file_error("rename", from))
}
