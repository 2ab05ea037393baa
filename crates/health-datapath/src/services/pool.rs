//! Pools of backends, in `HEALTH_SLOTS` and `HEALTH_MAGLEV`.

use std::net::SocketAddr;

use health_common::service::{ALGORITHM_MAGLEV, FRONTEND_WEIGHTED, Frontend, Pool};

use super::alias;
use super::free::{Extent, Store};
use super::snapshot::Snapshot;

/// Fills Maglev tables of one size.
pub trait FillMaglev {
    /// Number of slots in a table.
    fn size(&self) -> u32;

    /// Writes a backend's index to each slot. `backends` is not empty, and `table` has the table's size.
    fn fill(&mut self, backends: &[MaglevBackend], table: &mut [u32]);
}

/// A backend of a Maglev table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaglevBackend {
    /// Its index in `HEALTH_BACKENDS`.
    pub index: u32,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its share of the slots, relative to the other backends.
    pub weight: u16,
}

/// The desired contents of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) store: Store,
    /// Whether the pool has thresholds and aliases.
    pub(super) is_weighted: bool,
    /// Never empty. If all weights are equal, they are all 1.
    pub(super) members: Vec<MaglevBackend>,
    /// [`Pool::len`].
    pub(super) len: u32,
}

/// A pool in the maps.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) extent: Extent,
    /// [`Pool::len`].
    pub(super) len: u32,
    /// Whether the pool has thresholds and aliases.
    is_weighted: bool,
    /// The index and weight of each member; `None` if the pool was only found through a frontend.
    contents: Option<Box<[(u32, u16)]>>,
}

impl Contents {
    /// Returns the contents of the pool that an algorithm needs for these members.
    pub(super) fn new(
        mut members: Vec<MaglevBackend>,
        algorithm: u8,
        is_weighted: bool,
        maglev_size: u32,
    ) -> Self {
        if are_equal(&members) {
            members.iter_mut().for_each(|member| member.weight = 1);
        }
        let (store, len) = match algorithm {
            ALGORITHM_MAGLEV => (Store::Maglev, maglev_size),
            _ => (Store::Slots, members.len() as u32),
        };
        Self {
            store,
            is_weighted,
            members,
            len,
        }
    }

    /// Returns the number of slots that the pool takes.
    pub(super) fn size(&self) -> u32 {
        size(self.store, self.len, self.is_weighted).unwrap_or(u32::MAX)
    }

    /// Returns the contents of the pool's slots, without the leading counter.
    pub(super) fn slots(&self, maglev: &mut dyn FillMaglev) -> Vec<u32> {
        if self.store == Store::Maglev {
            let mut table = vec![0; self.len as usize];
            maglev.fill(&self.members, &mut table);
            return table;
        }
        let mut slots: Vec<u32> = self.members.iter().map(|member| member.index).collect();
        if self.is_weighted {
            let weights: Vec<u16> = self.members.iter().map(|member| member.weight).collect();
            let (thresholds, aliases) = alias::table(&weights);
            slots.extend(thresholds);
            slots.extend(aliases);
        }
        slots
    }

    /// Returns the pool with these contents at `extent`.
    pub(super) fn into_range(self, extent: Extent) -> Range {
        let contents = self.short();
        Range {
            extent,
            len: self.len,
            is_weighted: self.is_weighted,
            contents: Some(contents),
        }
    }

    fn short(&self) -> Box<[(u32, u16)]> {
        let members = self.members.iter();
        members
            .map(|member| (member.index, member.weight))
            .collect()
    }
}

impl Range {
    /// Returns the pool that a frontend refers to; `None` if it is empty.
    pub(super) fn of_frontend(frontend: &Frontend, pool: Pool) -> Option<Self> {
        let (store, is_weighted) = match frontend.algorithm {
            ALGORITHM_MAGLEV => (Store::Maglev, false),
            _ => (Store::Slots, frontend.flags & FRONTEND_WEIGHTED != 0),
        };
        let len = size(store, pool.len, is_weighted).filter(|_| pool.len > 0)?;
        Some(Self {
            extent: Extent {
                store,
                at: pool.at,
                len,
            },
            len: pool.len,
            is_weighted,
            contents: None,
        })
    }

    /// Whether it has these contents.
    pub(super) fn has(
        &self,
        contents: &Contents,
        snapshot: Option<&Snapshot>,
        maglev: &mut dyn FillMaglev,
    ) -> bool {
        let is_alike = (self.extent.store, self.len, self.is_weighted)
            == (contents.store, contents.len, contents.is_weighted);
        if !is_alike {
            return false;
        }
        match (&self.contents, snapshot) {
            (Some(own), _) => **own == *contents.short(),
            (None, Some(snapshot)) => self.slots(snapshot) == Some(&contents.slots(maglev)),
            (None, None) => false,
        }
    }

    /// Whether other contents can overwrite the pool's slots while programs read them. This works if each slot is read
    /// on its own; with weights, neighbouring slots belong together.
    pub(super) fn can_become(&self, contents: &Contents) -> bool {
        let is_plain = !self.is_weighted && !contents.is_weighted;
        is_plain && (self.extent.store, self.len) == (contents.store, contents.len)
    }

    /// Returns the same pool, with known contents.
    pub(super) fn with(&self, contents: &Contents) -> Self {
        Self {
            contents: Some(contents.short()),
            ..self.clone()
        }
    }

    /// Converts to the form that frontends store.
    pub(super) fn pool(&self) -> Pool {
        Pool {
            at: self.extent.at,
            len: self.len,
        }
    }

    /// Returns the values read from the pool's slots, without the leading counter.
    fn slots<'a>(&self, snapshot: &'a Snapshot) -> Option<&'a [u32]> {
        let Extent { store, at, len } = self.extent;
        let counter = u32::from(store != Store::Maglev);
        snapshot.get(store, at.checked_add(counter)?, len - counter)
    }
}

/// Whether all weights are equal.
pub(super) fn are_equal(members: &[MaglevBackend]) -> bool {
    let mut weights = members.iter().map(|member| member.weight);
    weights
        .next()
        .is_none_or(|first| weights.all(|weight| weight == first))
}

/// Returns the number of slots that a pool takes; `None` on overflow.
fn size(store: Store, len: u32, is_weighted: bool) -> Option<u32> {
    match store {
        Store::Maglev => Some(len),
        _ if is_weighted => len.checked_mul(3)?.checked_add(1),
        _ => len.checked_add(1),
    }
}
