//! Flows and translations: those of TCP have maps of their own, so that no flood of other packets evicts them.

use core::arch::asm;

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::maps::{HashMap, LruHashMap};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::Tuple;

use crate::ring::Ring;

/// What `bpf_map_update_elem` says of a hash map that is full.
pub const E2BIG: i32 = -7;
/// What it says of a key that is there.
pub const EEXIST: i32 = -17;

/// What a map of flows does, whichever kind it is of.
pub trait FlowMap<K, V> {
    /// The value under a key, to be changed.
    fn get_ptr_mut(&self, key: &K) -> Option<*mut V>;
    /// Sets a value, with `BPF_ANY` or `BPF_NOEXIST`; else the kernel's error, which is [`E2BIG`] where there is no room.
    fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32>;
    /// Makes room for one more entry, unless the kernel does so by itself. Returns whether there is some.
    fn make_room(&self) -> bool;
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
    fn make_room(&self) -> bool {
        true
    }
}

/// A hash map whose keys stand in a ring, so that a new entry finds room in it.
pub struct RingMap<K: 'static, V: 'static> {
    /// The entries.
    pub map: &'static HashMap<K, V>,
    /// Their keys.
    pub ring: Ring<K>,
}

impl<K: Copy, V> RingMap<K, V> {
    /// Sets a value without noting its key: that is to follow, once the flow's other entry is there, too. In a full map, a key
    /// that is noted takes the place of another. Returns whether the key is new.
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
        // A key that is there stands in the ring.
        if self.insert_unnoted(key, value, flags)? {
            self.ring.note(key);
        }
        Ok(())
    }

    #[inline(always)]
    fn make_room(&self) -> bool {
        self.ring.make_room(1)
    }
}

/// What is kept of the flows of one IP version.
///
/// The kernel calls a map's look-up directly, or even inlines it, only where an instruction has but one map. So
/// each map has its own calls here, which LLVM must not make one of: see [`apart`].
pub struct Table<K: 'static, V: 'static> {
    /// That of TCP.
    pub tcp: RingMap<K, V>,
    /// That of all other protocols.
    pub others: &'static LruHashMap<K, V>,
}

impl<K: Tuple, V> Table<K, V> {
    /// Enters the two entries of a flow; once more, if the result is `no_room` and TCP's map can make some. Steps that enter
    /// have no stack left for that.
    #[inline(always)]
    pub fn with_room<R: PartialEq>(
        &self,
        protocol: u8,
        no_room: &R,
        mut enter: impl FnMut() -> R,
    ) -> R {
        let result = enter();
        if result == *no_room && protocol == IP_PROTOCOL_TCP && self.tcp.ring.make_room(2) {
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

    /// As [`Table::get_ptr`], to be changed.
    #[inline(always)]
    pub fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        if is_tcp(key) {
            self.tcp.map.get_ptr_mut(key)
        } else {
            apart(self.others.get_ptr_mut(key))
        }
    }

    /// Sets a value, with `BPF_ANY` or `BPF_NOEXIST`; else the kernel's error.
    #[inline(always)]
    pub fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32> {
        if is_tcp(key) {
            self.tcp.insert(key, value, flags)
        } else {
            apart(self.others.insert(key, value, flags))
        }
    }

    /// As [`Table::insert`], without noting the key: see [`RingMap::insert_unnoted`].
    #[inline(always)]
    pub fn insert_unnoted(&self, key: &K, value: &V, flags: u64) -> Result<bool, i32> {
        if is_tcp(key) {
            self.tcp.insert_unnoted(key, value, flags)
        } else {
            apart(self.others.insert(key, value, flags).map(|()| true))
        }
    }

    /// Notes the key of a new entry.
    #[inline(always)]
    pub fn note(&self, key: &K) {
        if is_tcp(key) {
            self.tcp.ring.note(key);
        }
    }

    /// Removes a key; else the kernel's error.
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

/// The result of a call that LLVM is to leave where it is: a statement follows it that no other branch has.
#[inline(always)]
fn apart<R>(result: R) -> R {
    // SAFETY: no instruction.
    unsafe { asm!("", options(nomem, nostack, preserves_flags)) };
    result
}
