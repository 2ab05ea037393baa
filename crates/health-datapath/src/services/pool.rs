//! Pools of backends as they lie in `HEALTH_SLOTS` and `HEALTH_MAGLEV`.

use std::net::SocketAddr;

use health_common::service::{ALGORITHM_MAGLEV, FRONTEND_WEIGHTED, Frontend, Pool};

use super::free::{Extent, Store};
use super::{Snapshot, alias};

/// Fills Maglev tables of one size.
pub trait FillMaglev {
    /// How many places a table has.
    fn size(&self) -> u32;

    /// Writes the index of a backend to each place. The backends are never none, and the table has as many places as the
    /// size says.
    fn fill(&mut self, backends: &[MaglevBackend], table: &mut [u32]);
}

/// A backend of a Maglev table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaglevBackend {
    /// Its index in `HEALTH_BACKENDS`.
    pub index: u32,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its share of the places relative to others.
    pub weight: u16,
}

/// A pool as it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) store: Store,
    /// Whether there are thresholds and aliases.
    pub(super) is_weighted: bool,
    /// Never empty. Where all have one weight, it is 1.
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
    /// Whether there are thresholds and aliases.
    is_weighted: bool,
    /// What is in it; none while it is only known by a frontend.
    contents: Option<Box<[(u32, u16)]>>,
}

impl Contents {
    /// As an algorithm wants it.
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

    /// How many places it takes.
    pub(super) fn size(&self) -> u32 {
        size(self.store, self.len, self.is_weighted).unwrap_or(u32::MAX)
    }

    /// What is in its places, but for the counter in front.
    pub(super) fn places(&self, maglev: &mut dyn FillMaglev) -> Vec<u32> {
        if self.store == Store::Maglev {
            let mut table = vec![0; self.len as usize];
            maglev.fill(&self.members, &mut table);
            return table;
        }
        let mut places: Vec<u32> = self.members.iter().map(|member| member.index).collect();
        if self.is_weighted {
            let weights: Vec<u16> = self.members.iter().map(|member| member.weight).collect();
            let (thresholds, aliases) = alias::table(&weights);
            places.extend(thresholds);
            places.extend(aliases);
        }
        places
    }

    /// It at its place.
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
    /// Where a frontend says that a pool is; none if that is nowhere.
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

    /// Whether these are in it.
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
            (None, Some(snapshot)) => self.places(snapshot) == Some(&contents.places(maglev)),
            (None, None) => false,
        }
    }

    /// It with what turned out to be in it.
    pub(super) fn with(&self, contents: &Contents) -> Self {
        Self {
            contents: Some(contents.short()),
            ..self.clone()
        }
    }

    /// As a frontend names it.
    pub(super) fn pool(&self) -> Pool {
        Pool {
            at: self.extent.at,
            len: self.len,
        }
    }

    /// What was read at its places, but for the counter in front.
    fn places<'a>(&self, snapshot: &'a Snapshot) -> Option<&'a [u32]> {
        let (array, counter) = match self.extent.store {
            Store::Maglev => (&snapshot.maglev, 0),
            _ => (&snapshot.slots, 1),
        };
        let at = self.extent.at as usize;
        array.get(at + counter..at + self.extent.len as usize)
    }
}

/// Whether all have one weight.
pub(super) fn are_equal(members: &[MaglevBackend]) -> bool {
    let mut weights = members.iter().map(|member| member.weight);
    weights
        .next()
        .is_none_or(|first| weights.all(|weight| weight == first))
}

/// How many places a pool takes; none if they could not be counted.
fn size(store: Store, len: u32, is_weighted: bool) -> Option<u32> {
    match store {
        Store::Maglev => Some(len),
        _ if is_weighted => len.checked_mul(3)?.checked_add(1),
        _ => len.checked_add(1),
    }
}
