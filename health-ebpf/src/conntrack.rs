//! Conntrack entries of ICMP echoes.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::maps::LruHashMap;
use health_common::ct::CtEntry;

use crate::clock::coarse_now_ns;

/// What one packet, or one exchange, adds to its entry.
#[derive(Clone, Copy, Default)]
pub struct Traffic {
    /// Bytes received, from the IP header on; 0 for no packet.
    pub rx_bytes: u32,
    /// Bytes sent, from the IP header on; 0 for no packet.
    pub tx_bytes: u32,
    /// Identity of the side that opened the flow.
    pub source_identity: u32,
    /// Device on which it was opened.
    pub ifindex: u32,
    /// Lifetime of the entry after this packet, seconds.
    pub timeout_secs: u32,
}

/// How the entry was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tracked {
    /// It was there.
    Established,
    /// It was made.
    New,
    /// It could not be made.
    Full,
}

/// Updates a flow's entry, or makes it.
#[inline(always)]
pub fn track<K>(map: &LruHashMap<K, CtEntry>, tuple: &K, traffic: Traffic) -> Tracked {
    // Milliseconds of error do not matter in seconds.
    track_at(map, tuple, traffic, coarse_now_ns())
}

/// As [`track`], at a time that is known already: `CLOCK_MONOTONIC`, nanoseconds.
#[inline(always)]
pub fn track_at<K>(
    map: &LruHashMap<K, CtEntry>,
    tuple: &K,
    traffic: Traffic,
    now_ns: u64,
) -> Tracked {
    if let Some(entry) = map.get_ptr_mut(tuple) {
        // SAFETY: a map value.
        unsafe { update(entry, traffic, now_ns) };
        return Tracked::Established;
    }
    let now = seconds(now_ns);
    let entry = CtEntry {
        rx_packets: u64::from(traffic.rx_bytes != 0),
        rx_bytes: u64::from(traffic.rx_bytes),
        tx_packets: u64::from(traffic.tx_bytes != 0),
        tx_bytes: u64::from(traffic.tx_bytes),
        expires: now + traffic.timeout_secs,
        flags: 0,
        rx_flags_seen: 0,
        tx_flags_seen: 0,
        last_rx: if traffic.rx_bytes != 0 { now } else { 0 },
        last_tx: if traffic.tx_bytes != 0 { now } else { 0 },
        source_identity: traffic.source_identity,
        ifindex: traffic.ifindex,
    };
    if map.insert(tuple, entry, u64::from(BPF_NOEXIST)).is_ok() {
        return Tracked::New;
    }
    // Another CPU may have made it in the meantime.
    match map.get_ptr_mut(tuple) {
        Some(entry) => {
            // SAFETY: as above.
            unsafe { update(entry, traffic, now_ns) };
            Tracked::Established
        }
        None => Tracked::Full,
    }
}

/// Adds to an entry what happened at `now_ns`: `CLOCK_MONOTONIC`, nanoseconds.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
pub unsafe fn update(entry: *mut CtEntry, traffic: Traffic, now_ns: u64) {
    let now = seconds(now_ns);
    // SAFETY: the caller's promise; map values stay valid memory for the program's run. Counters are added
    // to atomically, since several CPUs may carry one flow; the rest are single words of which the last
    // writer's serves.
    unsafe {
        if traffic.rx_bytes != 0 {
            add(&raw mut (*entry).rx_packets, 1);
            add(&raw mut (*entry).rx_bytes, u64::from(traffic.rx_bytes));
            (*entry).last_rx = now;
        }
        if traffic.tx_bytes != 0 {
            add(&raw mut (*entry).tx_packets, 1);
            add(&raw mut (*entry).tx_bytes, u64::from(traffic.tx_bytes));
            (*entry).last_tx = now;
        }
        (*entry).expires = now + traffic.timeout_secs;
    }
}

#[inline(always)]
fn seconds(ns: u64) -> u32 {
    (ns / 1_000_000_000) as u32
}

/// Adds to a counter that several CPUs write.
///
/// # Safety
///
/// `counter` must point to a counter in a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller's promise; map values are aligned to eight bytes. The standard library offers
    // no `fetch_add` on targets without compare-and-swap, which BPF is to it; the unused result makes
    // this one `lock add`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, value) };
}
