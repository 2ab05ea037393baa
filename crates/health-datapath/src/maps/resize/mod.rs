//! Changes the size of maps: new maps replace the former ones, whose entries are carried over while packets keep
//! flowing.
//!
//! The former map's pin is set aside, so that the loader creates a new map. All entries are copied first; entries that
//! programs write after that are copied right before and right after the programs are replaced. Between these two
//! copies, programs start no flow whose packets would be lost on programs that do not know it: see
//! [`flows_held_until_ns`](health_common::config::DatapathConfig). A start that stops earlier puts the pins back. A
//! start that is killed leaves both pins, and the next start copies the missing entries. It is then unknown whether
//! programs use the former map or the new one, so both become former maps if the next start wants a third size.

mod copy;
mod growth;
mod open_flows;
mod sizes;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::path::{Path, PathBuf};

use aya::EbpfLoader;
use aya_obj::generated::bpf_map_type;
use tracing::{info, warn};

use super::open::{former, formers, map_data, open};
use super::rings::Ring;
use crate::error::{DatapathError, file_error};
use crate::layout::MapLayout;
use crate::pin_folder::remove_tree;
use copy::{copy_entries, copy_slots, needed};
use open_flows::OpenFlows;
use sizes::{Contents, SizedMap};

pub use sizes::MapSizes;

const HASH: u32 = bpf_map_type::BPF_MAP_TYPE_HASH as u32;

/// Maps that are changing size.
#[derive(Debug)]
pub(crate) struct PendingResize {
    pins: PathBuf,
    maps: Vec<SizedMap>,
    /// Maps that this start has set aside itself, as long as no program uses the new ones.
    set_aside: Vec<MapLayout>,
    /// The current or future sizes of the maps.
    sizes: Vec<(MapLayout, u32)>,
}

impl PendingResize {
    /// Sets pinned maps of other sizes aside. Service maps that are nearly full get more space than requested.
    pub(crate) fn prepare(pins: &Path, sizes: MapSizes) -> Result<Self, DatapathError> {
        let services = sizes.services;
        let services = services.map(|services| growth::with_room(pins, services));
        let sizes = MapSizes {
            services: services.transpose()?,
            ..sizes
        };
        let mut resizing = Self {
            pins: pins.to_owned(),
            maps: Vec::new(),
            set_aside: Vec::new(),
            sizes: Vec::new(),
        };
        for sized in sizes.all() {
            let size = resizing.prepare_map(sized)?;
            resizing.sizes.push((sized.map, size));
        }
        Ok(resizing)
    }

    /// Makes the loader create missing maps with their sizes.
    pub(crate) fn apply(&self, loader: &mut EbpfLoader<'_>) {
        for (map, size) in &self.sizes {
            loader.map_max_entries(map.name, *size);
        }
    }

    /// Whether any map changes size.
    pub(super) fn is_needed(&self) -> bool {
        !self.maps.is_empty()
    }

    /// Whether flows that start during the change could be lost on programs that use the other maps.
    pub(super) fn has_flows(&self) -> bool {
        self.maps.iter().any(|map| map.contents.is_of_programs())
    }

    /// Sets a map aside if its size must change. Returns its current or future size.
    fn prepare_map(&mut self, sized: SizedMap) -> Result<u32, DatapathError> {
        let SizedMap {
            map,
            size,
            contents,
            ring,
        } = sized;
        let pin = self.pins.join(map.name);
        let mut formers = formers(&self.pins, &map);
        if !pin.exists()
            && let Some(last) = formers.pop()
        {
            // A start was killed before it created the new map: the former map gets its name back.
            rename(&last, &pin)?;
        }
        // After an interrupted change, copies entries that only the former map has, whichever map the programs use.
        self.copy(&sized, &mut BTreeMap::new())?;
        let Some((fd, info)) = open(&pin)? else {
            return Ok(size);
        };
        let is_of_kind = ring.is_none() || info.kind == HASH;
        if info.max_entries == size && is_of_kind {
            if !formers.is_empty() {
                self.maps.push(sized);
            }
            return Ok(size);
        }
        let needed = needed(&sized, &fd).map_err(file_error("read", &pin))?;
        if needed > u64::from(size) {
            warn!(
                map = map.name,
                size = info.max_entries,
                wanted = size,
                needed,
                "the map keeps its size: its entries do not fit into the requested size"
            );
            if !formers.is_empty() {
                self.maps.push(sized);
            }
            return Ok(info.max_entries);
        }
        // Programs keep using the former map. It stays pinned, and gets its name back if this start fails.
        rename(&pin, &former(&self.pins, &map, formers.len()))?;
        let becomes = match contents {
            Contents::Unwanted => "no service is served",
            Contents::Cache => "its entries will be rebuilt",
            _ => "its entries will be kept",
        };
        let what = if info.max_entries == size {
            "kind"
        } else {
            "size"
        };
        info!(
            map = map.name,
            from = info.max_entries,
            to = size,
            "changing the map's {what}; {becomes}"
        );
        self.maps.push(sized);
        self.set_aside.push(map);
        Ok(size)
    }

    /// Copies the entries that the new maps lack.
    pub(super) fn carry_over(&self) -> Result<(), DatapathError> {
        self.copy_all(|_| true).map(drop)
    }

    /// Copies entries that programs have written since then. Must be called right before the programs are replaced.
    pub(super) fn catch_up(&mut self) -> Result<(), DatapathError> {
        self.copy_all(Contents::is_of_programs)?;
        self.set_aside.clear();
        Ok(())
    }

    /// Copies entries that programs have written so far, and removes the former maps. Must be called when no program
    /// uses the former maps any more.
    pub(super) fn finish(&mut self) -> Result<(), DatapathError> {
        let copied = self.copy_all(Contents::is_of_programs)?;
        for (sized, entries) in std::mem::take(&mut self.maps).into_iter().zip(copied) {
            let room = self.sizes.iter().find(|(map, _)| *map == sized.map);
            if let Some((_, room)) = room.filter(|(_, room)| entries > u64::from(*room)) {
                warn!(
                    map = sized.map.name,
                    entries, room, "the map is too small for all existing flows; some were dropped"
                );
            }
            self.note_keys(&sized)?;
            // Oldest last: a map's former maps are found by counting up from index 0.
            for former in formers(&self.pins, &sized.map).iter().rev() {
                remove_tree(former)?;
            }
        }
        Ok(())
    }

    /// Copies entries to the changing maps whose contents match. Returns the result of [`Self::copy`] for each map, 0
    /// for maps that do not match.
    fn copy_all(&self, is_meant: fn(Contents) -> bool) -> Result<Vec<u64>, DatapathError> {
        let mut known = BTreeMap::new();
        let copied = self
            .maps
            .iter()
            .map(|sized| match is_meant(sized.contents) {
                true => self.copy(sized, &mut known),
                false => Ok(0),
            });
        copied.collect()
    }

    /// Copies useful entries of former maps that the new one lacks. Returns the entry count of the fullest former map.
    fn copy(
        &self,
        sized: &SizedMap,
        known: &mut BTreeMap<&'static str, OpenFlows>,
    ) -> Result<u64, DatapathError> {
        let pin = self.pins.join(sized.map.name);
        let mut most = 0;
        // Oldest first: most killed starts are killed before programs use the new maps.
        for former_pin in formers(&self.pins, &sized.map) {
            let (Some((former, was)), Some((new, is))) = (open(&former_pin)?, open(&pin)?) else {
                continue;
            };
            let first = match OpenFlows::known_by(&sized.map) {
                Some(conntrack) if is.max_entries < was.max_entries => {
                    Some(self.open_flows(&conntrack, known)?)
                }
                _ => None,
            };
            let copied = match sized.contents {
                Contents::Unwanted | Contents::Cache => Ok(0),
                Contents::Slots => copy_slots(&sized.map, &former, &new).map(|()| 0),
                Contents::Conntrack | Contents::Programs | Contents::Agent => {
                    copy_entries(sized, &former, &new, first)
                }
            };
            most = most.max(copied.map_err(file_error("copy the entries of", &former_pin))?);
        }
        Ok(most)
    }

    /// Returns the open connections in a conntrack table, over all its maps. `known`: tables that were already read, by
    /// name.
    fn open_flows<'a>(
        &self,
        conntrack: &MapLayout,
        known: &'a mut BTreeMap<&'static str, OpenFlows>,
    ) -> Result<&'a OpenFlows, DatapathError> {
        let vacant = match known.entry(conntrack.name) {
            Entry::Occupied(occupied) => return Ok(occupied.into_mut()),
            Entry::Vacant(vacant) => vacant,
        };
        let mut flows = OpenFlows::default();
        let pin = self.pins.join(conntrack.name);
        for pin in formers(&self.pins, conntrack).into_iter().chain([pin]) {
            if let Some((map, _)) = open(&pin)? {
                let read = flows.read(conntrack, &map);
                read.map_err(file_error("read the flows of", &pin))?;
            }
        }
        Ok(vacant.insert(flows))
    }

    /// Writes the keys of a new table to its ring.
    fn note_keys(&self, sized: &SizedMap) -> Result<(), DatapathError> {
        let Some(ring) = Ring::open(&self.pins, &sized.map)? else {
            return Ok(());
        };
        let table = map_data(&self.pins, &sized.map)?;
        ring.rebuild(&sized.map, &table).map_err(file_error(
            "record the keys of",
            &self.pins.join(sized.map.name),
        ))
    }
}

impl Drop for PendingResize {
    fn drop(&mut self) {
        for map in &self.set_aside {
            let Some(last) = formers(&self.pins, map).pop() else {
                continue;
            };
            // No program uses the new map, whose pin is replaced here.
            if let Err(error) = rename(&last, &self.pins.join(map.name)) {
                warn!(%error, "cannot restore the previous maps");
            }
        }
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), DatapathError> {
    fs::rename(from, to).map_err(file_error("rename", from))
}
