//! RTT rows, each a consistent snapshot although programs write them all the time.

use std::sync::{Mutex, PoisonError};

use health_common::rtt::{RttKey, RttRow};

use super::map::{OpenMap, decode};
use super::{Batch, DumpError};
use crate::kernel_rtt::row_of_one_moment;
use crate::sys;
use crate::walk::Walk;

/// The rows of `HEALTH_RTT`, read in batches. Each batch is read twice: see [`RttRow`].
#[derive(Debug)]
pub struct RttRows {
    map: OpenMap,
    walk: Mutex<Walk>,
}

impl RttRows {
    pub(super) fn new(map: OpenMap) -> Result<Self, DumpError> {
        let walk = Mutex::new(Walk::new(map.entry_size()?));
        Ok(Self { map, walk })
    }

    /// Calls `each` with every row. Several threads may call this: each row goes to one of them.
    pub fn each(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        let (mut batch, mut again) = (Batch::default(), Batch::default());
        while self.read(&mut batch)? {
            batch
                .read_again(self.map.fd(), &mut again)
                .map_err(|source| self.map.cannot("read", source))?;
            let mut later = again.entries();
            for (key, copy) in batch.entries() {
                let second = later.next().filter(|(later, _)| *later == key);
                let Some((key, row)) = decode::<RttKey, RttRow>(key, copy) else {
                    continue;
                };
                if row.is_unlocked() && second.is_some_and(|(_, second)| second == copy) {
                    each(&key, &row);
                } else if let Some(row) = self.row(&key)? {
                    each(&key, &row);
                }
            }
        }
        Ok(())
    }

    fn read(&self, batch: &mut Batch) -> Result<bool, DumpError> {
        // The walk changes only after the system call has returned.
        let mut walk = self.walk.lock().unwrap_or_else(PoisonError::into_inner);
        walk.read(self.map.fd(), batch)
            .map_err(|source| self.map.cannot("read", source))
    }

    /// Rereads one row that was being written or is gone.
    fn row(&self, key: &RttKey) -> Result<Option<RttRow>, DumpError> {
        let copy = || {
            let mut value = [0; size_of::<RttRow>()];
            let is_there = sys::lookup(self.map.fd(), sys::bytes_of(key), &mut value)?;
            Ok(if is_there { sys::read(&value) } else { None })
        };
        row_of_one_moment(copy).map_err(|source| self.map.cannot("read", source))
    }
}
