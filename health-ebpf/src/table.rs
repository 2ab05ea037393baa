//! Flows and translations: those of TCP have maps of their own, so that no flood of other packets evicts them.

use core::arch::asm;

use aya_ebpf::maps::LruHashMap;
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::Tuple;

/// What is kept of the flows of one IP version.
///
/// The kernel calls a map's look-up directly, or even inlines it, only where an instruction has but one map. So
/// each map has its own calls here, which LLVM must not make one of: see [`apart`].
pub struct Table<K: 'static, V: 'static> {
    /// That of TCP.
    pub tcp: &'static LruHashMap<K, V>,
    /// That of all other protocols.
    pub others: &'static LruHashMap<K, V>,
}

impl<K: Tuple, V> Table<K, V> {
    /// The value under a key.
    #[inline(always)]
    pub fn get_ptr(&self, key: &K) -> Option<*const V> {
        if is_tcp(key) {
            self.tcp.get_ptr(key)
        } else {
            apart(self.others.get_ptr(key))
        }
    }

    /// As [`Table::get_ptr`], to be changed.
    #[inline(always)]
    pub fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        if is_tcp(key) {
            self.tcp.get_ptr_mut(key)
        } else {
            apart(self.others.get_ptr_mut(key))
        }
    }

    /// Sets a value, with flags of `bpf_map_update_elem`; else the kernel's error.
    #[inline(always)]
    pub fn insert(&self, key: &K, value: &V, flags: u64) -> Result<(), i32> {
        if is_tcp(key) {
            self.tcp.insert(key, value, flags)
        } else {
            apart(self.others.insert(key, value, flags))
        }
    }

    /// Removes a key; else the kernel's error.
    #[inline(always)]
    pub fn remove(&self, key: &K) -> Result<(), i32> {
        if is_tcp(key) {
            self.tcp.remove(key)
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
