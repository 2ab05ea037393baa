//! Conntrack updates for packets that XDP forwards.

use health_common::ct::{
    CT_RX_CLOSING, CT_SEEN_NON_SYN, CT_TX_CLOSING, CtEntry, TUPLE_OUT, Timeouts, lifetime,
};
use health_common::service::xdp::Pending;
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::Tuple;

use crate::clock::{coarse_now_ns, seconds};
use crate::conntrack::{Traffic, add, advance, find, update};
use crate::table::Table;

/// Records a packet with this tuple, in the packet's direction, in the entry of a flow that is under way: a TCP flow
/// must be open in both directions, and this segment must leave it so. Returns for how many seconds the flow lasts,
/// including the current one; `None` for all other packets, which are not recorded.
#[inline(always)]
pub(super) fn enter_under_way<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    tcp_flags: u8,
    packet: Pending,
    timeouts: &Timeouts,
) -> Option<u32> {
    let protocol = tuple.protocol();
    let is_sent = tuple.direction() == TUPLE_OUT;
    let (entry, side) = find(flows, tuple)?;
    if protocol == IP_PROTOCOL_TCP {
        // SAFETY: a value of a conntrack map, as below.
        let state = unsafe { (*entry).state() };
        let is_open =
            state.has(CT_SEEN_NON_SYN) && state.flags() & (CT_RX_CLOSING | CT_TX_CLOSING) == 0;
        // SAFETY: as above.
        if !is_open || unsafe { !advance(entry, tuple, side, tcp_flags) } {
            return None;
        }
    }
    let now_ns = coarse_now_ns();
    // SAFETY: as above; a single word.
    unsafe {
        add_passed(entry, is_sent, packet, seconds(now_ns));
        update(entry, protocol, Traffic::default(), timeouts, now_ns);
        Some((*entry).expires.wrapping_sub(seconds(now_ns)))
    }
}

/// Adds packets with this tuple, in their direction, to the entry of their flow, if it exists. They passed after
/// `since_ns`, when the flow was in conntrack: `CLOCK_MONOTONIC`, in nanoseconds. Once an entry from that time would
/// have expired, the current one belongs to a later flow between the same ports, and the packets are not counted.
#[inline(always)]
pub(super) fn enter_passed<K: Tuple>(
    flows: Table<K, CtEntry>,
    tuple: &mut K,
    passed: Pending,
    since_ns: u64,
    timeouts: &Timeouts,
) {
    if passed.packets() == 0 {
        return;
    }
    let protocol = tuple.protocol();
    let is_sent = tuple.direction() == TUPLE_OUT;
    let Some((entry, _)) = find(flows, tuple) else {
        return;
    };
    let now = seconds(coarse_now_ns());
    // SAFETY: a value of a conntrack map.
    unsafe {
        let lasts = lifetime(protocol, (*entry).state(), timeouts);
        if now.wrapping_sub(seconds(since_ns)) < lasts {
            add_passed(entry, is_sent, passed, now);
        }
    }
}

/// Adds packets to one side of an entry; the last of them passed in the second `now`.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
unsafe fn add_passed(entry: *mut CtEntry, is_sent: bool, passed: Pending, now: u32) {
    // SAFETY: the caller's promise; as in `update`.
    unsafe {
        if is_sent {
            add(&raw mut (*entry).tx_packets, passed.packets());
            add(&raw mut (*entry).tx_bytes, passed.bytes());
            (*entry).last_tx = now;
        } else {
            add(&raw mut (*entry).rx_packets, passed.packets());
            add(&raw mut (*entry).rx_bytes, passed.bytes());
            (*entry).last_rx = now;
        }
    }
}
