//! Room in the tables of TCP. A kernel's LRU map makes room by 128 entries at a time, of which every 128th new flow bears
//! the cost; a hash map makes none. So the keys of what is entered are noted in a ring, and an entry that finds no room
//! takes that of another: see [`health_common::ring`].

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::maps::{Array, HashMap};
use health_common::ct::{CT_SEEN_NON_SYN, CtEntry, TUPLE_IN, Tuple4, Tuple6};
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::ring::{
    CANDIDATES, FULL_SECS, Hand, RING_CT4, RING_CT6, RING_NAT4, RING_NAT6, RING_REVNAT4,
    RING_REVNAT6,
};
use health_common::service::{ServiceFlow4, ServiceFlow6};
use health_common::tuple::Tuple as _;

use crate::clock::coarse_now_secs;
use crate::ip_version::Version;
use crate::maps::{
    HEALTH_CT4, HEALTH_CT4_RING, HEALTH_CT6, HEALTH_CT6_RING, HEALTH_HANDS, HEALTH_NAT4,
    HEALTH_NAT4_RING, HEALTH_NAT6, HEALTH_NAT6_RING, HEALTH_REVNAT4, HEALTH_REVNAT4_RING,
    HEALTH_REVNAT6, HEALTH_REVNAT6_RING, HEALTH_VACATED,
};
use crate::service;

/// The keys of a table.
pub struct Ring<K: 'static> {
    keys: &'static Array<K>,
    hand: u32,
    evict_one: fn() -> u32,
}

impl<K: Copy> Ring<K> {
    /// Notes the key of a new entry, where that of an evicted one stood or else in the next place.
    #[inline(always)]
    pub fn note(&self, key: &K) {
        if let Some(place) =
            vacated(self.hand).or_else(|| next_place(HEALTH_HANDS.get_ptr_mut(self.hand)?))
            && let Some(noted) = self.keys.get_ptr_mut(place)
        {
            // SAFETY: a value of that map.
            unsafe { *noted = *key };
        }
    }

    /// Whether so many new entries may be made. Of a table that was full of late, takes others out first.
    #[inline(always)]
    pub fn reserve(&self, entries: u32) -> bool {
        let Some(hand) = HEALTH_HANDS.get_ptr(self.hand) else {
            return true;
        };
        // SAFETY: an aligned word of a map value.
        let full_until = unsafe { (*hand).full_until };
        full_until == 0 || coarse_now_secs() >= full_until || self.evict(entries)
    }

    /// Takes so many entries out of a table that is full. Returns whether there were as many that may go.
    #[inline(always)]
    pub fn make_room(&self, entries: u32) -> bool {
        if let Some(hand) = HEALTH_HANDS.get_ptr_mut(self.hand) {
            // SAFETY: an aligned word of a map value.
            unsafe { (*hand).full_until = coarse_now_secs() + FULL_SECS };
        }
        self.evict(entries)
    }

    /// Evicts until this processor has so many places for new keys.
    #[inline(always)]
    fn evict(&self, entries: u32) -> bool {
        let vacant = vacant(self.hand);
        (entries <= vacant || (self.evict_one)() != 0)
            && (entries <= vacant + 1 || (self.evict_one)() != 0)
    }
}

/// Places that evictions on a processor vacated and that were not written since, counted from 1; 0: none. A flow that is entered
/// takes two at most.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Vacated([u32; 2]);

/// How many places this processor vacated that were not written since.
#[inline(always)]
fn vacant(hand: u32) -> u32 {
    let Some(vacated) = HEALTH_VACATED.get_ptr(hand) else {
        return 0;
    };
    // SAFETY: a value of this processor's.
    let Vacated([first, second]) = unsafe { &*vacated };
    u32::from(*first != 0) + u32::from(*second != 0)
}

/// Takes a place that this processor vacated.
#[inline(always)]
fn vacated(hand: u32) -> Option<u32> {
    let vacated = HEALTH_VACATED.get_ptr_mut(hand)?;
    // SAFETY: a value of this processor's.
    let Vacated([first, second]) = unsafe { &mut *vacated };
    let last = if *second == 0 { first } else { second };
    let place = last.checked_sub(1)?;
    *last = 0;
    Some(place)
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
        let state = entry.state();
        let is_answered = state.rx_flags_seen() != 0 && state.tx_flags_seen() != 0;
        let is_open = state.has(CT_SEEN_NON_SYN) && !state.is_closed() && is_answered;
        if !is_open || entry.has_expired(coarse_now_secs()) {
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
                if service::is_turned(key, entry) {
                    return LEAST;
                }
                let mut flow = service::sent(key, entry);
                if service::comes_in(<$tuple>::service_flow_parts(entry).flags) {
                    flow.direction = TUPLE_IN;
                }
                worth_of_flow(&mut flow)
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

/// None of the keys that were looked at has an entry: the table is probably not full.
const ALL_STALE: u32 = u32::MAX;

/// Looks for an entry of a full table that may go. Returns where in the ring its key stands, counted from 1; 0: none may; or
/// [`ALL_STALE`].
#[inline(always)]
fn candidate(hand: u32, worth: impl Fn(u32) -> u32) -> u32 {
    let Some(hand) = HEALTH_HANDS.get_ptr_mut(hand) else {
        return 0;
    };
    let (mut chosen, mut least) = (0, NONE);
    let mut passed = 0;
    // The end is asked for at the end: Linux 6.1 refuses other loops as LLVM lays them out.
    loop {
        passed += 1;
        let Some(place) = next_place(hand) else {
            return 0;
        };
        let worth = worth(place);
        // SAFETY: aligned words of a map value, of which the last writer's serves.
        unsafe {
            if worth == 0 {
                (*hand).patience = ((*hand).patience + CANDIDATES).min((*hand).places);
                return place + 1;
            }
            if worth != NONE {
                (*hand).patience = (*hand).patience.saturating_sub(1);
            }
        }
        if worth < least {
            (chosen, least) = (place + 1, worth);
        }
        if passed == CANDIDATES {
            break;
        }
    }
    if least == NONE {
        return ALL_STALE;
    }
    // SAFETY: as above.
    if unsafe { (*hand).patience } == 0 {
        chosen
    } else {
        0
    }
}

/// Removes an entry that may go. Returns whether there is room then, as far as can be told.
#[inline(always)]
fn evict_one<T: Version, V>(
    table: &HashMap<T, V>,
    keys: &Array<T>,
    hand: u32,
    worth: impl Fn(u32) -> u32,
) -> u32 {
    let place = match candidate(hand, worth) {
        0 => return 0,
        ALL_STALE => return 1,
        place => place - 1,
    };
    let (Some(key), Some(vacated)) = (keys.get(place), HEALTH_VACATED.get_ptr_mut(hand)) else {
        return 0;
    };
    // Another processor may have been faster.
    if table.remove(key).is_err() {
        return 0;
    }
    // SAFETY: a value of this processor's.
    let Vacated([first, second]) = unsafe { &mut *vacated };
    *(if *first == 0 { first } else { second }) = place + 1;
    1
}

/// The rings, and functions of their own in the kernel too: the verifier looks at them once, and not once for each way that
/// leads there. Conntrack evicts where
/// the stack has no room for one more of them.
macro_rules! rings {
    ($($ring:ident: $tuple:ty, $table:ident, $keys:ident, $hand:ident, $evict_one:ident, $(#[$attribute:meta])+ $worth:ident;)+) => {$(
        #[doc = concat!("That of [`", stringify!($table), "`].")]
        pub const $ring: Ring<$tuple> = Ring {
            keys: &$keys,
            hand: $hand,
            evict_one: || $evict_one(),
        };

        $(#[$attribute])+
        extern "C" fn $worth(place: u32) -> u32 {
            worth(&$table, &$keys, place)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $evict_one() -> u32 {
            evict_one(&$table, &$keys, $hand, |place| $worth(place))
        }
    )+};
}

rings! {
    CT4: Tuple4, HEALTH_CT4, HEALTH_CT4_RING, RING_CT4, evict_ct4, #[inline(always)] worth_ct4;
    CT6: Tuple6, HEALTH_CT6, HEALTH_CT6_RING, RING_CT6, evict_ct6, #[inline(always)] worth_ct6;
    NAT4: Tuple4, HEALTH_NAT4, HEALTH_NAT4_RING, RING_NAT4, evict_nat4, #[unsafe(no_mangle)] #[inline(never)] worth_nat4;
    NAT6: Tuple6, HEALTH_NAT6, HEALTH_NAT6_RING, RING_NAT6, evict_nat6, #[unsafe(no_mangle)] #[inline(never)] worth_nat6;
    REVNAT4: Tuple4, HEALTH_REVNAT4, HEALTH_REVNAT4_RING, RING_REVNAT4, evict_revnat4, #[unsafe(no_mangle)] #[inline(never)] worth_revnat4;
    REVNAT6: Tuple6, HEALTH_REVNAT6, HEALTH_REVNAT6_RING, RING_REVNAT6, evict_revnat6, #[unsafe(no_mangle)] #[inline(never)] worth_revnat6;
}
