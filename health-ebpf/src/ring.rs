//! Evicts entries from the TCP tables. The kernel's LRU maps evict 128 entries at a time, and every 128th new flow
//! bears the cost; its hash maps evict nothing. So the keys of new entries are recorded in a ring, and a new entry that
//! finds the table full replaces another: see [`health_common::ring`].

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd, atomic_xchg};

use aya_ebpf::maps::{Array, HashMap};
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::ring::{
    CANDIDATES, Hand, RING_CT4, RING_CT6, RING_NAT4, RING_NAT6, RING_REVNAT4, RING_REVNAT6,
    ROOM_SECS, SPARE_SECS, VACATED,
};
use health_common::service::{ServiceFlow4, ServiceFlow6};
use health_common::tuple::Tuple as _;

use crate::clock::coarse_now_secs;
use crate::ip_version::Version;
use crate::maps::{
    HEALTH_CT4, HEALTH_CT4_RING, HEALTH_CT6, HEALTH_CT6_RING, HEALTH_HANDS, HEALTH_NAT4,
    HEALTH_NAT4_RING, HEALTH_NAT6, HEALTH_NAT6_RING, HEALTH_REVNAT4, HEALTH_REVNAT4_RING,
    HEALTH_REVNAT6, HEALTH_REVNAT6_RING,
};
use crate::service;

/// The ring of a table's keys.
pub struct Ring<K: 'static> {
    keys: &'static Array<K>,
    take_slot: fn() -> u32,
    evict_one: fn() -> u32,
    vacate: fn(u32) -> u32,
}

impl<K: Copy> Ring<K> {
    /// Records the key of a new entry, in a vacated slot or else in the next one.
    #[inline(always)]
    pub fn note(&self, key: &K) {
        if let Some(slot) = (self.take_slot)().checked_sub(1)
            && let Some(noted) = self.keys.get_ptr_mut(slot)
        {
            // SAFETY: a value of that map.
            unsafe { *noted = *key };
        }
    }

    /// Evicts `entries` entries (at most 2) from a full table. Returns whether all of them could be evicted.
    #[inline(always)]
    pub fn evict(&self, entries: u32) -> bool {
        self.evict_and_vacate() && (entries < 2 || self.evict_and_vacate())
    }

    #[inline(always)]
    fn evict_and_vacate(&self) -> bool {
        let slot = (self.evict_one)();
        if slot != 0 {
            (self.vacate)(slot);
        }
        slot != 0
    }
}

/// Takes a slot for a new key: a vacated one, or else the next one. Returns its number, counted from 1.
#[inline(always)]
fn take_slot(hand: u32) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    for index in 0..VACATED {
        // SAFETY: aligned words of a map value. See `conntrack::add` for why this is an intrinsic.
        unsafe {
            let vacated = (&raw mut (*hand).vacated).cast::<u32>().add(index);
            if vacated.read_volatile() != 0 {
                let slot = atomic_xchg::<u32, { AtomicOrdering::SeqCst }>(vacated, 0);
                if slot != 0 {
                    return slot;
                }
            }
        }
    }
    next_slot(hand).map_or(0, |slot| slot + 1)
}

/// Advances a hand by one slot, and returns the slot that it passed.
#[inline(always)]
fn next_slot(hand: *mut Hand) -> Option<u32> {
    // SAFETY: aligned words of a map value. See `conntrack::add` for why this is an intrinsic; with relaxed ordering,
    // LLVM would emit an add that does not return the old value.
    unsafe {
        let passed = atomic_xadd::<u32, u32, { AtomicOrdering::SeqCst }>(&raw mut (*hand).next, 1);
        passed.checked_rem((*hand).slots)
    }
}

/// A value in a table with eviction.
trait Evictable<T> {
    /// How much would be lost with an entry, given as the second when it was last used. 0 if nothing would be lost, or
    /// only a connection of which just the handshake or just one side was seen.
    fn worth(key: &T, entry: *const Self) -> u32;
}

impl<T: Version> Evictable<T> for CtEntry {
    #[inline(always)]
    fn worth(_key: &T, entry: *const Self) -> u32 {
        // SAFETY: a value of a conntrack map.
        let entry = unsafe { &*entry };
        if !entry.is_open(coarse_now_secs()) {
            return 0;
        }
        entry.last_rx.max(entry.last_tx)
    }
}

/// Worth of an entry if conntrack cannot tell whether it is in use.
const LEAST: u32 = 1;

/// Worth of an entry that belongs to a flow, whichever side's packet conntrack saw first.
#[inline(always)]
fn worth_of_flow<T: Version>(flow: &mut T) -> u32 {
    if let Some(tracked) = T::flows().tcp.map.get_ptr(*flow) {
        return CtEntry::worth(flow, tracked);
    }
    *flow = flow.reply();
    match T::flows().tcp.map.get_ptr(*flow) {
        Some(tracked) => CtEntry::worth(flow, tracked),
        None => 0,
    }
}

/// Translations and service flows are worth as much as their flows in conntrack.
macro_rules! evictable {
    ($tuple:ty, $translation:ty, $service_flow:ty) => {
        impl Evictable<$tuple> for $translation {
            #[inline(always)]
            fn worth(key: &$tuple, entry: *const Self) -> u32 {
                // SAFETY: a value of the map of translations.
                worth_of_flow(&mut key.flow(unsafe { &*entry }))
            }
        }

        impl Evictable<$tuple> for $service_flow {
            #[inline(always)]
            fn worth(key: &$tuple, entry: *const Self) -> u32 {
                // SAFETY: a value of the map of services' flows.
                let entry = unsafe { &*entry };
                match service::tracked_flow(key, entry) {
                    Some(mut flow) => worth_of_flow(&mut flow),
                    None => LEAST,
                }
            }
        }
    };
}

evictable!(Tuple4, NatEntry4, ServiceFlow4);
evictable!(Tuple6, NatEntry6, ServiceFlow6);

/// Worth of an entry that does not exist.
const NONE: u32 = u32::MAX;

/// Worth of the entry whose key is in a slot, or [`NONE`].
#[inline(always)]
fn worth<T: Version, V: Evictable<T>>(table: &HashMap<T, V>, keys: &Array<T>, slot: u32) -> u32 {
    let Some(key) = keys.get(slot) else {
        return NONE;
    };
    match table.get_ptr(key) {
        Some(entry) => V::worth(key, entry),
        None => NONE,
    }
}

/// Finds an entry of a full table that may be evicted. Returns the slot of its key, counted from 1; 0 if there is
/// none.
#[inline(always)]
fn candidate(hand: *mut Hand, worth: impl Fn(u32) -> u32) -> u32 {
    // Worth and slot in one word: callers leave little stack space.
    let mut least = u64::MAX;
    let mut passed = 0;
    // The loop tests its end condition last: Linux 6.1 rejects the code that LLVM generates for other loops.
    loop {
        passed += 1;
        let Some(slot) = next_slot(hand) else {
            return 0;
        };
        let worth = worth(slot);
        if worth == 0 {
            // SAFETY: an aligned word of a map value.
            unsafe { (*hand).spare_until = coarse_now_secs() + SPARE_SECS };
            return slot + 1;
        }
        least = least.min(u64::from(worth) << 32 | u64::from(slot));
        if passed == CANDIDATES {
            break;
        }
    }
    // SAFETY: as above.
    if (least >> 32) as u32 == NONE || coarse_now_secs() < unsafe { (*hand).spare_until } {
        return 0;
    }
    let chosen = least as u32 + 1;
    // The flow's other entry comes right after this one, and is evicted next.
    // SAFETY: as above.
    unsafe { (*hand).next = chosen };
    chosen
}

/// Evicts an entry. Returns the slot of its key, counted from 1; 0 if none was evicted.
#[inline(always)]
fn evict_one<T: Version, V>(
    table: &HashMap<T, V>,
    keys: &Array<T>,
    hand: u32,
    worth: impl Fn(u32) -> u32,
) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    let now = coarse_now_secs();
    // SAFETY: aligned words of a map value, where the last writer wins.
    unsafe {
        if now > (*hand).full_at + ROOM_SECS {
            (*hand).spare_until = now + SPARE_SECS;
        }
        (*hand).full_at = now;
    }
    let Some(slot) = candidate(hand, worth).checked_sub(1) else {
        return 0;
    };
    let Some(key) = keys.get(slot) else {
        return 0;
    };
    // Another CPU may have been faster.
    if table.remove(key).is_err() {
        return 0;
    }
    slot + 1
}

/// Makes the slot of an evicted entry, counted from 1, available to a new key.
#[inline(always)]
fn vacate(hand: u32, slot: u32) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    for index in 0..VACATED {
        // SAFETY: an aligned word of a map value. See `conntrack::add` for why this is an intrinsic.
        let (there, _) = unsafe {
            let vacated = (&raw mut (*hand).vacated).cast::<u32>().add(index);
            atomic_cxchg::<u32, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                vacated, 0, slot,
            )
        };
        if there == 0 {
            return 1;
        }
    }
    0
}

/// The rings. Their functions are separate in the kernel as well: the verifier checks them once, not once per path that
/// leads there. For conntrack, the worth function is inlined into its caller, because evictions there happen where the
/// stack has no space for another frame.
macro_rules! rings {
    ($($ring:ident: $tuple:ty, $table:ident, $keys:ident, $hand:ident, $take_slot:ident, $evict_one:ident, $vacate:ident, $(#[$attribute:meta])+ $worth:ident;)+) => {$(
        #[doc = concat!("That of [`", stringify!($table), "`].")]
        pub const $ring: Ring<$tuple> = Ring {
            keys: &$keys,
            take_slot: || $take_slot(),
            evict_one: || $evict_one(),
            vacate: |slot| $vacate(slot),
        };

        $(#[$attribute])+
        extern "C" fn $worth(slot: u32) -> u32 {
            worth(&$table, &$keys, slot)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $take_slot() -> u32 {
            take_slot($hand)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $vacate(slot: u32) -> u32 {
            vacate($hand, slot)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $evict_one() -> u32 {
            evict_one(&$table, &$keys, $hand, |slot| $worth(slot))
        }
    )+};
}

rings! {
    CT4: Tuple4, HEALTH_CT4, HEALTH_CT4_RING, RING_CT4, place_ct4, evict_ct4, vacate_ct4, #[inline(always)] worth_ct4;
    CT6: Tuple6, HEALTH_CT6, HEALTH_CT6_RING, RING_CT6, place_ct6, evict_ct6, vacate_ct6, #[inline(always)] worth_ct6;
    NAT4: Tuple4, HEALTH_NAT4, HEALTH_NAT4_RING, RING_NAT4, place_nat4, evict_nat4, vacate_nat4, #[unsafe(no_mangle)] #[inline(never)] worth_nat4;
    NAT6: Tuple6, HEALTH_NAT6, HEALTH_NAT6_RING, RING_NAT6, place_nat6, evict_nat6, vacate_nat6, #[unsafe(no_mangle)] #[inline(never)] worth_nat6;
    REVNAT4: Tuple4, HEALTH_REVNAT4, HEALTH_REVNAT4_RING, RING_REVNAT4, place_revnat4, evict_revnat4, vacate_revnat4, #[unsafe(no_mangle)] #[inline(never)] worth_revnat4;
    REVNAT6: Tuple6, HEALTH_REVNAT6, HEALTH_REVNAT6_RING, RING_REVNAT6, place_revnat6, evict_revnat6, vacate_revnat6, #[unsafe(no_mangle)] #[inline(never)] worth_revnat6;
}
