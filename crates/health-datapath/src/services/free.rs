//! The free slots of the arrays, and the slots that will be free soon.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use super::ServicesError;
use super::ranges::Ranges;
use crate::layout;
use crate::sys;

/// How long a released slot stays unused while others are free, because flow entries may still refer to it. Flow
/// entries also contain the backend's address and its port's number, so they never mistake another backend in that slot
/// for theirs; but a flow that ends would decrement the other backend's count.
const GRACE: Duration = Duration::from_secs(10);

/// Number of slots or ranges that justify waiting for programs.
const MUCH: usize = 1024;

/// One of the arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Store {
    Backends,
    Slots,
    Maglev,
}

impl Store {
    pub(super) fn map(self) -> &'static str {
        match self {
            Self::Backends => layout::BACKENDS.name,
            Self::Slots => layout::SLOTS.name,
            Self::Maglev => layout::MAGLEV.name,
        }
    }
}

/// A range of slots in an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Extent {
    pub(super) store: Store,
    pub(super) at: u32,
    pub(super) len: u32,
}

impl Extent {
    pub(super) fn backend(index: u32) -> Self {
        Self {
            store: Store::Backends,
            at: index,
            len: 1,
        }
    }
}

/// Which slots of the arrays are taken.
#[derive(Debug)]
pub(super) struct Arrays {
    ranges: [Ranges; 3],
    /// Slots that are no longer used, with the time at which they become free: `CLOCK_MONOTONIC`, in nanoseconds.
    retired: VecDeque<(u64, Extent)>,
}

impl Default for Arrays {
    fn default() -> Self {
        Self {
            ranges: [(); 3].map(|()| Ranges::new(0)),
            retired: VecDeque::new(),
        }
    }
}

impl Arrays {
    /// Marks all slots as free except the first backend. Retired slots stay retired.
    pub(super) fn clear(&mut self, [backends, slots, maglev]: [u32; 3]) {
        self.ranges = [backends, slots, maglev].map(Ranges::new);
        self.ranges[Store::Backends as usize].take(0, 1);
    }

    /// Takes the retired slots, except those that turn out to be in use.
    pub(super) fn take_retired(&mut self) {
        let ranges = &mut self.ranges;
        self.retired
            .retain(|(_, extent)| ranges[extent.store as usize].take(extent.at, extent.len));
    }

    /// Takes these slots, if all of them are free.
    pub(super) fn take(&mut self, extent: Extent) -> bool {
        self.ranges[extent.store as usize].take(extent.at, extent.len)
    }

    /// Takes adjacent slots.
    pub(super) fn allocate(
        &mut self,
        store: Store,
        len: u32,
        now_ns: u64,
    ) -> Result<Extent, ServicesError> {
        let mut at = self.ranges[store as usize].allocate(len);
        if at.is_none() {
            self.reclaim(now_ns)?;
            at = self.ranges[store as usize].allocate(len);
        }
        if at.is_none() {
            self.reclaim_early(store)?;
            at = self.ranges[store as usize].allocate(len);
        }
        at.map(|at| Extent { store, at, len })
            .ok_or_else(|| self.full(store, len))
    }

    /// Number of slots in an array.
    pub(super) fn size(&self, store: Store) -> u32 {
        self.ranges[store as usize].size()
    }

    /// Returns the error for `wanted` further slots that do not fit.
    pub(super) fn full(&self, store: Store, wanted: u32) -> ServicesError {
        let ranges = &self.ranges[store as usize];
        ServicesError::Full {
            map: store.map(),
            wanted,
            used: ranges.taken(),
            size: ranges.size(),
            longest: ranges.longest(),
        }
    }

    /// Frees slots that no program could ever have found.
    pub(super) fn release(&mut self, extent: Extent) {
        self.ranges[extent.store as usize].release(extent.at, extent.len);
    }

    /// Retires slots; they become free after [`GRACE`].
    pub(super) fn retire(&mut self, extents: impl IntoIterator<Item = Extent>, now_ns: u64) {
        let free_at = now_ns.saturating_add(GRACE.as_nanos() as u64);
        let extents = extents.into_iter();
        self.retired.extend(extents.map(|extent| (free_at, extent)));
    }

    /// Like [`Arrays::reclaim`], but only once enough slots are due: the wait takes as long for one slot as for all of
    /// them, and longer than a change. Allocations do not depend on this.
    pub(super) fn tidy(&mut self, now_ns: u64) -> Result<(), ServicesError> {
        let is_due = |(at, _): &(u64, Extent)| *at <= now_ns;
        match self.retired.get(MUCH) {
            Some(retired) if is_due(retired) => self.reclaim(now_ns),
            _ => Ok(()),
        }
    }

    /// Frees slots that are past their grace period, once no running program can still hold values read from them.
    fn reclaim(&mut self, now_ns: u64) -> Result<(), ServicesError> {
        let due = self.retired.partition_point(|(at, _)| *at <= now_ns);
        if due == 0 {
            return Ok(());
        }
        sys::wait_for_programs().map_err(waiting)?;
        for (_, extent) in self.retired.drain(..due) {
            self.ranges[extent.store as usize].release(extent.at, extent.len);
        }
        Ok(())
    }
}

impl Arrays {
    /// Like [`Arrays::reclaim`], but for all retired slots of an array, even within their grace period: programs that
    /// start from now on do not find these slots.
    fn reclaim_early(&mut self, store: Store) -> Result<(), ServicesError> {
        if !self.retired.iter().any(|(_, extent)| extent.store == store) {
            return Ok(());
        }
        sys::wait_for_programs().map_err(waiting)?;
        let ranges = &mut self.ranges[store as usize];
        self.retired.retain(|(_, extent)| {
            let is_other = extent.store != store;
            if !is_other {
                ranges.release(extent.at, extent.len);
            }
            is_other
        });
        Ok(())
    }
}

fn waiting(source: io::Error) -> ServicesError {
    ServicesError::kernel(
        "wait for the programs that read",
        "the service maps",
        source,
    )
}
