//! The rings that hold the keys of TCP tables: see [`health_common::ring`].

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use aya::maps::MapData;
use health_common::ring::Hand;

use super::open::{map_data, open};
use crate::aya_io::map_io;
use crate::error::{DatapathError, file_error};
use crate::layout::{HANDS, MapLayout, RINGED, ring_of};
use crate::sys;
use crate::walk::{Batch, EntrySize, Walk};

/// Sets each ring's number of slots for the programs.
pub(super) fn publish_slot_counts(pins: &Path) -> Result<(), DatapathError> {
    publish_slot_counts_of(pins, |_| true)
}

/// Like [`publish_slot_counts`], for rings that are not in use yet. Programs that are already serving may use other rings
/// with other sizes.
pub(super) fn publish_first_slot_counts(pins: &Path) -> Result<(), DatapathError> {
    publish_slot_counts_of(pins, |hand| hand.slots == 0)
}

fn publish_slot_counts_of(
    pins: &Path,
    is_due: impl Fn(&Hand) -> bool,
) -> Result<(), DatapathError> {
    let hands_pin = pins.join(HANDS.name);
    let Some((hands, _)) = open(&hands_pin)? else {
        return Err(DatapathError::Missing(HANDS.name.to_owned()));
    };
    for (index, (_, ring)) in (0..).zip(RINGED) {
        let Some((_, info)) = open(&pins.join(ring.name))? else {
            return Err(DatapathError::Missing(ring.name.to_owned()));
        };
        change(hands.as_fd(), index, |hand| {
            if is_due(hand) {
                hand.slots = info.max_entries;
            }
        })
        .map_err(file_error("write", &hands_pin))?;
    }
    Ok(())
}

fn change(hands: BorrowedFd<'_>, index: u32, change: impl FnOnce(&mut Hand)) -> io::Result<()> {
    let mut value = vec![0; size_of::<Hand>()];
    sys::lookup(hands, sys::bytes_of(&index), &mut value)?;
    let before = sys::read::<Hand>(&value).unwrap_or_default();
    let mut hand = before;
    change(&mut hand);
    if hand != before {
        sys::set(hands, sys::bytes_of(&index), sys::bytes_of(&hand))?;
    }
    Ok(())
}

/// The maps of a ring; its table is opened elsewhere.
pub(crate) struct Ring {
    index: u32,
    keys: MapData,
    hands: MapData,
}

impl Ring {
    /// Opens a table's ring, if it has one.
    pub(crate) fn open(pins: &Path, table: &MapLayout) -> Result<Option<Self>, DatapathError> {
        let Some((index, ring)) = ring_of(table) else {
            return Ok(None);
        };
        Ok(Some(Self {
            index,
            keys: map_data(pins, &ring)?,
            hands: map_data(pins, &HANDS)?,
        }))
    }

    /// Rewrites the ring with all keys of the table, each once: if the ring wrapped around before the table was full,
    /// it overwrote keys whose entries still exist. Entries that programs add meanwhile may be missed.
    pub(crate) fn rebuild(&self, layout: &MapLayout, table: &MapData) -> io::Result<()> {
        let slots = self.keys.info().map_err(map_io)?.max_entries();
        let size = EntrySize {
            key: layout.key_size as usize,
            value: layout.value_size as usize,
        };
        let mut walk = Walk::new(size);
        let mut batch = Batch::default();
        let mut noted = 0;
        while noted < slots && walk.read(table.fd().as_fd(), &mut batch)? {
            let keys: Vec<&[u8]> = batch.entries().map(|(key, _)| key).collect();
            let count = (keys.len() as u32).min(slots - noted);
            if count == 0 {
                continue;
            }
            let indexes: Vec<u8> = (noted..noted + count).flat_map(u32::to_ne_bytes).collect();
            sys::update_batch(self.keys.fd().as_fd(), &indexes, &keys.concat(), count)
                .map_err(|(_, error)| error)?;
            noted += count;
        }
        // The next keys are written to unused slots, and only those slots are vacant.
        change(self.hands.fd().as_fd(), self.index, |hand| {
            hand.next = noted % slots.max(1);
            hand.slots = slots;
            hand.vacated = Default::default();
        })
    }
}
