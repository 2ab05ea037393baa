//! Deletes conntrack and NAT entries.

use std::path::PathBuf;

use aya::Pod;
use health_common::ct::{CtEntry, Tuple4, Tuple6};

use super::flow::{Flow, Translation, Version, other_key};
use super::map::{OpenMap, decode};
use super::{DumpError, Pinned};
use crate::layout::MapLayout;
use crate::sys;

/// The deletions from one map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushedMap {
    /// Where the map is pinned.
    pub pin: PathBuf,
    /// Entries that were deleted.
    pub entries: u64,
}

impl Pinned {
    /// Deletes the conntrack entries that `is_wanted` selects, each with the translation of its flow.
    pub fn flush_conntrack(
        &self,
        is_wanted: impl Fn(&Flow, &CtEntry) -> bool,
    ) -> Result<Vec<FlushedMap>, DumpError> {
        let mut flushed = self.flush_flows::<Tuple4>(&is_wanted)?;
        flushed.extend(self.flush_flows::<Tuple6>(&is_wanted)?);
        Ok(flushed)
    }

    /// Deletes the NAT entries that `is_wanted` selects, each with the other entry of its translation.
    pub fn flush_nat(
        &self,
        is_wanted: impl Fn(&Flow, &Translation) -> bool,
    ) -> Result<Vec<FlushedMap>, DumpError> {
        let mut flushed = self.flush_translations::<Tuple4>(&is_wanted)?;
        flushed.extend(self.flush_translations::<Tuple6>(&is_wanted)?);
        Ok(flushed)
    }

    fn flush_flows<T: Version>(
        &self,
        is_wanted: &dyn Fn(&Flow, &CtEntry) -> bool,
    ) -> Result<Vec<FlushedMap>, DumpError> {
        let mut flushed = Vec::new();
        for (ct, nat) in T::CT.iter().zip(&T::NAT) {
            let mut flows = Flush::of(self, ct)?;
            let mut translations = Flush::of(self, nat)?;
            let rows = self.rows(ct, decode::<T, CtEntry>)?;
            rows.try_each(|(tuple, entry)| {
                if !is_wanted(&Flow::of(&tuple), &entry) {
                    return Ok(());
                }
                flows.delete(&tuple)?;
                match translations.find::<_, T::Translation>(&tuple)? {
                    Some(entry) => translations.delete_both(&tuple, &entry),
                    None => Ok(()),
                }
            })?;
            flushed.extend([flows.done(), translations.done()]);
        }
        Ok(flushed)
    }

    fn flush_translations<T: Version>(
        &self,
        is_wanted: &dyn Fn(&Flow, &Translation) -> bool,
    ) -> Result<Vec<FlushedMap>, DumpError> {
        let mut flushed = Vec::new();
        for nat in &T::NAT {
            let mut translations = Flush::of(self, nat)?;
            let rows = self.rows(nat, decode::<T, T::Translation>)?;
            rows.try_each(|(tuple, entry)| {
                if is_wanted(&Flow::of(&tuple), &Translation::of::<T>(&entry)) {
                    translations.delete_both(&tuple, &entry)?;
                }
                Ok(())
            })?;
            flushed.push(translations.done());
        }
        Ok(flushed)
    }
}

/// A map from which entries are deleted, and the number of deleted entries.
struct Flush {
    map: OpenMap,
    deleted: u64,
}

impl Flush {
    fn of(pinned: &Pinned, layout: &MapLayout) -> Result<Self, DumpError> {
        let map = pinned.open_as(layout)?;
        Ok(Self { map, deleted: 0 })
    }

    fn find<K: Pod, V: Pod>(&self, key: &K) -> Result<Option<V>, DumpError> {
        let mut value = vec![0; size_of::<V>()];
        let is_found = sys::lookup(self.map.fd(), sys::bytes_of(key), &mut value)
            .map_err(|source| self.map.cannot("read", source))?;
        Ok(sys::read(&value).filter(|_| is_found))
    }

    fn delete<K: Pod>(&mut self, key: &K) -> Result<(), DumpError> {
        let is_deleted = self.map.delete_raw(sys::bytes_of(key))?;
        self.deleted += u64::from(is_deleted);
        Ok(())
    }

    fn delete_both<T: Version>(
        &mut self,
        tuple: &T,
        entry: &T::Translation,
    ) -> Result<(), DumpError> {
        self.delete(tuple)?;
        self.delete(&other_key(*tuple, entry))
    }

    fn done(self) -> FlushedMap {
        FlushedMap {
            pin: self.map.pin().to_owned(),
            entries: self.deleted,
        }
    }
}
