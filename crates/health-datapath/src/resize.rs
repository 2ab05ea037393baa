//! Maps of flows that are to have another size than they had: the new ones take the place of the former,
//! whose entries are carried over while packets go on. In the same way the flows of other protocols than TCP move to
//! maps of their own, where a former agent had one map for all.
//!
//! The pin of a former map is set aside, so that the loader makes a new one. Right before the programs are
//! replaced, all entries are copied; right after, those that came in between. A start that ends before that
//! puts the pins back. One that is killed leaves both, and the next one copies what is missing.

use std::mem::offset_of;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::EbpfLoader;
use health_common::ct::{CtEntry, DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES, Tuple4, Tuple6};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_net::clock;
use tracing::{info, warn};

use super::layout::{CT_ANY4, CT_ANY6, CT4, CT6, MapLayout, NAT_ANY4, NAT_ANY6, NAT4, NAT6};
use super::loader::{file_error, remove_tree};
use super::walk::{Batch, EntrySize, Walk};
use super::{DatapathError, sys};

/// The maps of TCP, and those of other protocols beside them.
const OTHERS: [(MapLayout, MapLayout); 4] = [
    (CT4, CT_ANY4),
    (CT6, CT_ANY6),
    (NAT4, NAT_ANY4),
    (NAT6, NAT_ANY6),
];

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
    /// Maps of TCP first: their entries move as long as nothing has become of the others.
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
    /// Those that there are for the first time, until then.
    added: Vec<MapLayout>,
}

impl PendingResize {
    /// Sets pinned maps of other sizes aside.
    pub(super) fn prepare(pins: &Path, sizes: MapSizes) -> Result<Self, DatapathError> {
        let mut resizing = Self {
            pins: pins.to_owned(),
            maps: Vec::new(),
            set_aside: Vec::new(),
            added: Vec::new(),
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
        let others = others_of(&map).filter(|others| !self.is_there(others));
        if info.max_entries == size && others.is_none() {
            if former.exists() {
                self.maps.push(map);
            }
            return Ok(());
        }
        remove_tree(&former)?;
        rename(&pin, &former)?;
        if info.max_entries != size {
            info!(
                map = map.name,
                from = info.max_entries,
                to = size,
                "the map gets another size; its entries are carried over"
            );
        }
        if let Some(others) = others {
            info!(
                map = map.name,
                to = others.name,
                "entries of other protocols than TCP get a map of their own; all are carried over"
            );
            self.added.push(others);
        }
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
        self.added.clear();
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
        let others = match others_of(map) {
            Some(others) => open(&self.paths(&others).0)?.map(|opened| (others, opened)),
            None => None,
        };
        let others_map = others.as_ref().map(|(_, (map, _))| map);
        let failed = |source| file_error("copy the entries of", &former_pin)(source);
        let [own, other] = copy_entries(map, &former, &new, others_map).map_err(failed)?;
        warn_of_room(map, own, info.max_entries);
        if let Some((others, (_, info))) = &others {
            warn_of_room(others, other, info.max_entries);
        }
        Ok(())
    }

    fn is_there(&self, map: &MapLayout) -> bool {
        let (pin, former) = self.paths(map);
        pin.exists() || former.exists()
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
        // Else the next start took them for proof that nothing has to move.
        for map in &self.added {
            if let Err(error) = remove_tree(&self.paths(map).0) {
                warn!(%error, "cannot undo the start");
            }
        }
    }
}

/// The map of other protocols beside one of TCP.
fn others_of(map: &MapLayout) -> Option<MapLayout> {
    let (_, others) = OTHERS.iter().find(|(tcp, _)| tcp == map)?;
    Some(*others)
}

fn warn_of_room(map: &MapLayout, entries: u64, room: u32) {
    if entries > u64::from(room) {
        warn!(
            map = map.name,
            entries, room, "the map has no room for all flows that there are; some are forgotten"
        );
    }
}

/// Whether a tuple is one of TCP.
fn is_tcp(tuple: &[u8]) -> bool {
    let at = if tuple.len() == size_of::<Tuple4>() {
        offset_of!(Tuple4, protocol)
    } else {
        offset_of!(Tuple6, protocol)
    };
    tuple.get(at) == Some(&IP_PROTOCOL_TCP)
}

/// Copies living entries that `to` does not have; how many are alive. Those of other protocols than TCP go to
/// `others`, if there is such a map, and are counted apart.
fn copy_entries(
    map: &MapLayout,
    from: &OwnedFd,
    to: &OwnedFd,
    others: Option<&OwnedFd>,
) -> io::Result<[u64; 2]> {
    let now = clock::coarse_now_secs();
    let is_flow = [CT4, CT6, CT_ANY4, CT_ANY6].contains(map);
    let mut walk = Walk::new(EntrySize {
        key: map.key_size as usize,
        value: map.value_size as usize,
    });
    let mut batch = Batch::default();
    let mut alive = [0; 2];
    while walk.read(from.as_fd(), &mut batch)? {
        for (key, value) in batch.entries() {
            let flow = is_flow.then(|| sys::read::<CtEntry>(value)).flatten();
            if flow.is_some_and(|flow| flow.has_expired(now)) {
                continue;
            }
            let (place, to) = match others {
                Some(others) if !is_tcp(key) => (1, others),
                _ => (0, to),
            };
            alive[place] += 1;
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
