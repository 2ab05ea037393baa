//! Tables of flows and translations. TCP has maps of its own, so that no flood of other packets evicts its entries.

use core::arch::asm;

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::maps::{HashMap, LruHashMap};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::Tuple;

use crate::ring::Ring;

/// Result of `bpf_map_update_elem` for a full hash map.
pub const E2BIG: i32 = -7;
/// Result of `bpf_map_update_elem` for a key that already exists.
pub const EEXIST: i32 = -17;

/// Operations on a flow map of any type.
pub trait FlowMap<K, V> {
    /// The value under a key, for modification.
    fn get_ptr_mut(&self, key: &K) -> Option<*mut V>;
    /// Sets a value, with `BPF_ANY` or `BPF_NOEXIST`. On failure, returns the kernel's error, which is [`E2BIG`] if
    /// there is no space.
    fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32>;
    /// Makes space for one more entry, unless the kernel does that itself. Returns whether there is space.
    fn evict(&self) -> bool;
}

impl<K, V> FlowMap<K, V> for &'static LruHashMap<K, V> {
    #[inline(always)]
    fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        LruHashMap::get_ptr_mut(self, key)
    }

    #[inline(always)]
    fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32> {
        LruHashMap::insert(self, key, value, flags)
    }

    #[inline(always)]
    fn evict(&self) -> bool {
        true
    }
}

/// A hash map with a ring of its keys, so that a new entry always finds space.
pub struct RingMap<K: 'static, V: 'static> {
    /// The entries.
    pub map: &'static HashMap<K, V>,
    /// Their keys.
    pub ring: Ring<K>,
}

impl<K: Copy, V> RingMap<K, V> {
    /// Sets a value without recording its key: the caller must do that once the flow's other entry exists too. In a
    /// full map, recording a key takes another key's slot. Returns whether the key is new.
    #[inline(always)]
    pub fn insert_unnoted(&self, key: &K, value: &V, flags: u64) -> Result<bool, i32> {
        match self.map.insert(key, value, u64::from(BPF_NOEXIST)) {
            Err(EEXIST) if flags == u64::from(BPF_ANY) => {
                self.map.insert(key, value, flags).map(|()| false)
            }
            result => result.map(|()| true),
        }
    }
}

impl<K: Copy, V> FlowMap<K, V> for RingMap<K, V> {
    #[inline(always)]
    fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        self.map.get_ptr_mut(key)
    }

    #[inline(always)]
    fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32> {
        // An existing key is already in the ring.
        if self.insert_unnoted(key, value, flags)? {
            self.ring.note(key);
        }
        Ok(())
    }

    #[inline(always)]
    fn evict(&self) -> bool {
        self.ring.evict(1)
    }
}

/// The entries for the flows of one IP version.
///
/// The kernel calls a map's look-up directly, or even inlines it, only if the call instruction always uses the same
/// map. So each map has its own calls here, which LLVM must not merge: see [`apart`].
pub struct Table<K: 'static, V: 'static> {
    /// The map for TCP.
    pub tcp: RingMap<K, V>,
    /// The map for all other protocols.
    pub others: &'static LruHashMap<K, V>,
}

impl<K: Tuple, V> Table<K, V> {
    /// Calls `enter` to create the two entries of a flow. If the result is `no_room` and the TCP map can make space,
    /// tries again. The steps that create the entries have no stack space left for doing this themselves.
    #[inline(always)]
    pub fn with_room<R: PartialEq>(
        &self,
        protocol: u8,
        no_room: &R,
        mut enter: impl FnMut() -> R,
    ) -> R {
        let result = enter();
        if result == *no_room && protocol == IP_PROTOCOL_TCP && self.tcp.ring.evict(2) {
            return enter();
        }
        result
    }

    /// The value under a key.
    #[inline(always)]
    pub fn get_ptr(&self, key: &K) -> Option<*const V> {
        if is_tcp(key) {
            self.tcp.map.get_ptr(key)
        } else {
            apart(self.others.get_ptr(key))
        }
    }

    /// Like [`Table::get_ptr`], for modification.
    #[inline(always)]
    pub fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        if is_tcp(key) {
            self.tcp.map.get_ptr_mut(key)
        } else {
            apart(self.others.get_ptr_mut(key))
        }
    }

    /// Sets a value, with `BPF_ANY` or `BPF_NOEXIST`. On failure, returns the kernel's error.
    #[inline(always)]
    pub fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32> {
        if is_tcp(key) {
            self.tcp.insert(key, value, flags)
        } else {
            apart(self.others.insert(key, value, flags))
        }
    }

    /// Like [`Table::insert`], without recording the key: see [`RingMap::insert_unnoted`].
    #[inline(always)]
    pub fn insert_unnoted(&self, key: &K, value: &V, flags: u64) -> Result<bool, i32> {
        if is_tcp(key) {
            self.tcp.insert_unnoted(key, value, flags)
        } else {
            apart(self.others.insert(key, value, flags).map(|()| true))
        }
    }

    /// Records the key of a new entry.
    #[inline(always)]
    pub fn note(&self, key: &K) {
        if is_tcp(key) {
            self.tcp.ring.note(key);
        }
    }

    /// Removes a key. On failure, returns the kernel's error.
    #[inline(always)]
    pub fn remove(&self, key: &K) -> Result<(), i32> {
        if is_tcp(key) {
            self.tcp.map.remove(key)
        } else {
            apart(self.others.remove(key))
        }
    }
}

#[inline(always)]
fn is_tcp<K: Tuple>(key: &K) -> bool {
    key.protocol() == IP_PROTOCOL_TCP
}

/// Keeps LLVM from merging a call with one in another branch, which does not have the statement that follows.
#[inline(always)]
fn apart<R>(result: R) -> R {
    // SAFETY: emits no instruction.
    unsafe { asm!("", options(nomem, nostack, preserves_flags)) };
    result
}
