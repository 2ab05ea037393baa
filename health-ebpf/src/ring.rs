//! Room in the tables of TCP. A kernel's LRU map makes room by 128 entries at a time, of which every 128th new flow bears
//! the cost; a hash map makes none. So the keys of what is entered are noted in a ring, and an entry that finds no room
//! takes that of another: see [`health_common::ring`].

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

/// The keys of a table.
pub struct Ring<K: 'static> {
    keys: &'static Array<K>,
    take_place: fn() -> u32,
    evict_one: fn() -> u32,
    vacate: fn(u32) -> u32,
}

impl<K: Copy> Ring<K> {
    /// Notes the key of a new entry, where that of an evicted one stood or else in the next place.
    #[inline(always)]
    pub fn note(&self, key: &K) {
        if let Some(place) = (self.take_place)().checked_sub(1)
            && let Some(noted) = self.keys.get_ptr_mut(place)
        {
            // SAFETY: a value of that map.
            unsafe { *noted = *key };
        }
    }

    /// Takes so many entries, 2 at most, out of a table that is full. Returns whether there were as many that may go.
    #[inline(always)]
    pub fn make_room(&self, entries: u32) -> bool {
        self.make_one() && (entries < 2 || self.make_one())
    }

    #[inline(always)]
    fn make_one(&self) -> bool {
        let place = (self.evict_one)();
        if place != 0 {
            (self.vacate)(place);
        }
        place != 0
    }
}

/// A place for a new key, counted from 1: one that was vacated, or the next one.
#[inline(always)]
fn take_place(hand: u32) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    for index in 0..VACATED {
        // SAFETY: aligned words of a map value. For why an intrinsic see `conntrack::add`.
        unsafe {
            let vacated = (&raw mut (*hand).vacated).cast::<u32>().add(index);
            if vacated.read_volatile() != 0 {
                let place = atomic_xchg::<u32, { AtomicOrdering::SeqCst }>(vacated, 0);
                if place != 0 {
                    return place;
                }
            }
        }
    }
    next_place(hand).map_or(0, |place| place + 1)
}

/// Has a hand pass a place; which one.
#[inline(always)]
fn next_place(hand: *mut Hand) -> Option<u32> {
    // SAFETY: aligned words of a map value. For why an intrinsic see `conntrack::add`; relaxed, LLVM would have it add
    // without telling what was there.
    unsafe {
        let passed = atomic_xadd::<u32, u32, { AtomicOrdering::SeqCst }>(&raw mut (*hand).next, 1);
        passed.checked_rem((*hand).places)
    }
}

/// What a table holds.
trait Evictable<T> {
    /// How much is lost with an entry, as the second in which it was of use last. 0: nothing, or a connection of which nothing
    /// but a handshake was seen, or one side alone.
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

/// Of an entry of which conntrack cannot tell whether it is in use.
const LEAST: u32 = 1;

/// How much is lost with what belongs to a flow, whichever of its packets conntrack saw first.
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

/// Translations and services' flows are worth as much as the flow in conntrack that they are of.
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

/// There is no entry.
const NONE: u32 = u32::MAX;

/// How much is lost with the entry whose key stands in a place, or [`NONE`].
#[inline(always)]
fn worth<T: Version, V: Evictable<T>>(table: &HashMap<T, V>, keys: &Array<T>, place: u32) -> u32 {
    let Some(key) = keys.get(place) else {
        return NONE;
    };
    match table.get_ptr(key) {
        Some(entry) => V::worth(key, entry),
        None => NONE,
    }
}

/// Looks for an entry of a full table that may go. Returns where in the ring its key stands, counted from 1; 0: none may.
#[inline(always)]
fn candidate(hand: *mut Hand, worth: impl Fn(u32) -> u32) -> u32 {
    // Worth and place in one: callers leave little room on the stack.
    let mut least = u64::MAX;
    let mut passed = 0;
    // The end is asked for at the end: Linux 6.1 refuses other loops as LLVM lays them out.
    loop {
        passed += 1;
        let Some(place) = next_place(hand) else {
            return 0;
        };
        let worth = worth(place);
        if worth == 0 {
            // SAFETY: an aligned word of a map value.
            unsafe { (*hand).spare_until = coarse_now_secs() + SPARE_SECS };
            return place + 1;
        }
        least = least.min(u64::from(worth) << 32 | u64::from(place));
        if passed == CANDIDATES {
            break;
        }
    }
    // SAFETY: as above.
    if (least >> 32) as u32 == NONE || coarse_now_secs() < unsafe { (*hand).spare_until } {
        return 0;
    }
    let chosen = least as u32 + 1;
    // A flow's other entry stands behind this one, and is the next to go.
    // SAFETY: as above.
    unsafe { (*hand).next = chosen };
    chosen
}

/// Removes an entry that may go. Returns where its key stands, counted from 1; 0: there was none.
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
    // SAFETY: aligned words of a map value, of which the last writer's serves.
    unsafe {
        if now > (*hand).full_at + ROOM_SECS {
            (*hand).spare_until = now + SPARE_SECS;
        }
        (*hand).full_at = now;
    }
    let Some(place) = candidate(hand, worth).checked_sub(1) else {
        return 0;
    };
    let Some(key) = keys.get(place) else {
        return 0;
    };
    // Another processor may have been faster.
    if table.remove(key).is_err() {
        return 0;
    }
    place + 1
}

/// Keeps a place, counted from 1, whose entry was evicted for a new key.
#[inline(always)]
fn vacate(hand: u32, place: u32) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    for index in 0..VACATED {
        // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`.
        let (there, _) = unsafe {
            let vacated = (&raw mut (*hand).vacated).cast::<u32>().add(index);
            atomic_cxchg::<u32, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                vacated, 0, place,
            )
        };
        if there == 0 {
            return 1;
        }
    }
    0
}

/// The rings, and functions of their own in the kernel too: the verifier looks at them once, and not once for each way that
/// leads there. That of the worth is part of its caller for conntrack, which evicts where the stack has no room for one more.
macro_rules! rings {
    ($($ring:ident: $tuple:ty, $table:ident, $keys:ident, $hand:ident, $take_place:ident, $evict_one:ident, $vacate:ident, $(#[$attribute:meta])+ $worth:ident;)+) => {$(
        #[doc = concat!("That of [`", stringify!($table), "`].")]
        pub const $ring: Ring<$tuple> = Ring {
            keys: &$keys,
            take_place: || $take_place(),
            evict_one: || $evict_one(),
            vacate: |place| $vacate(place),
        };

        $(#[$attribute])+
        extern "C" fn $worth(place: u32) -> u32 {
            worth(&$table, &$keys, place)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $take_place() -> u32 {
            take_place($hand)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $vacate(place: u32) -> u32 {
            vacate($hand, place)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $evict_one() -> u32 {
            evict_one(&$table, &$keys, $hand, |place| $worth(place))
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
