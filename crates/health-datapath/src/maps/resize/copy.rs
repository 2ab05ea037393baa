//! Copies the contents of a map to a map of another size.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use health_common::ct::CtEntry;
use health_net::clock;

use super::open_flows::OpenFlows;
use super::sizes::{Contents, SizedMap};
use crate::layout::MapLayout;
use crate::sys;
use crate::walk::{Batch, EntrySize, Walk};

/// Returns the capacity that a map needs for its entries.
pub(super) fn needed(sized: &SizedMap, map: &OwnedFd) -> io::Result<u64> {
    let mut needed = 0;
    match sized.contents {
        Contents::Conntrack | Contents::Programs | Contents::Cache | Contents::Unwanted => {}
        Contents::Agent => for_each(&sized.map, map, |_, _| {
            needed += 1;
            Ok(())
        })?,
        Contents::Slots => for_each(&sized.map, map, |key, value| {
            if let Some(index) = sys::read::<u32>(key).filter(|_| is_set(value)) {
                needed = needed.max(u64::from(index) + 1);
            }
            Ok(())
        })?,
    }
    Ok(needed)
}

/// Copies live entries that `to` lacks, as far as they fit: entries of `first` before all others. Returns the number of
/// live entries.
pub(super) fn copy_entries(
    sized: &SizedMap,
    from: &OwnedFd,
    to: &OwnedFd,
    first: Option<&OpenFlows>,
) -> io::Result<u64> {
    let Some(first) = first else {
        return copy_those(sized, from, to, |_, _| true);
    };
    let map = &sized.map;
    let open = copy_those(sized, from, to, |key, value| first.has(map, key, value))?;
    let others = copy_those(sized, from, to, |key, value| !first.has(map, key, value))?;
    Ok(open + others)
}

fn copy_those(
    sized: &SizedMap,
    from: &OwnedFd,
    to: &OwnedFd,
    is_meant: impl Fn(&[u8], &[u8]) -> bool,
) -> io::Result<u64> {
    let now = clock::coarse_now_secs();
    let is_flow = sized.contents == Contents::Conntrack;
    let mut alive = 0;
    for_each(&sized.map, from, |key, value| {
        if !is_meant(key, value) {
            return Ok(());
        }
        let flow = is_flow.then(|| sys::read::<CtEntry>(value)).flatten();
        if flow.is_some_and(|flow| flow.has_expired(now)) {
            return Ok(());
        }
        alive += 1;
        match sys::add(to.as_fd(), key, value) {
            Err(error) if is_full(&error) => Ok(()),
            result => result.map(drop),
        }
    })?;
    Ok(alive)
}

/// Whether a map rejected an entry because it is full (kernel/bpf/hashtab.c, `alloc_htab_elem`; kernel/bpf/lpm_trie.c,
/// `trie_update_elem`).
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC))
}

/// Copies array slots that are empty in `to`, which is large enough for all slots.
pub(super) fn copy_slots(map: &MapLayout, from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
    let mut there = vec![0; map.value_size as usize];
    for_each(map, from, |key, value| {
        let is_missing =
            is_set(value) && sys::lookup(to.as_fd(), key, &mut there)? && !is_set(&there);
        if is_missing {
            sys::set(to.as_fd(), key, value)?;
        }
        Ok(())
    })
}

pub(super) fn is_set(value: &[u8]) -> bool {
    value.iter().any(|byte| *byte != 0)
}

/// Calls `each` with the bytes of every key and value.
pub(super) fn for_each(
    map: &MapLayout,
    from: &OwnedFd,
    mut each: impl FnMut(&[u8], &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut walk = Walk::new(EntrySize {
        key: map.key_size as usize,
        value: map.value_size as usize,
    });
    let mut batch = Batch::default();
    while walk.read(from.as_fd(), &mut batch)? {
        for (key, value) in batch.entries() {
            each(key, value)?;
        }
    }
    Ok(())
}
