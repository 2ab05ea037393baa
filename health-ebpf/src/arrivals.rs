//! Counts probes from other agents that arrive here, and the replies that leave.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_NOEXIST;
use health_common::arrivals::{Arrivals, Prober, WAYS, WayCounts};

use crate::clock::coarse_now_ns;
use crate::maps::HEALTH_ARRIVALS;

/// Counts a probe that arrived, and creates its sender's entry if necessary.
#[inline(always)]
pub fn arrived(prober: &Prober, way: usize) {
    let entry = match HEALTH_ARRIVALS.get_ptr_mut(prober) {
        Some(entry) => entry,
        None => {
            let entry = Arrivals {
                since_ns: coarse_now_ns(),
                ..Arrivals::default()
            };
            // Another CPU may have created the entry in the meantime.
            let _ = HEALTH_ARRIVALS.insert(prober, entry, u64::from(BPF_NOEXIST));
            match HEALTH_ARRIVALS.get_ptr_mut(prober) {
                Some(entry) => entry,
                None => return,
            }
        }
    };
    // SAFETY: the entry is a map value.
    unsafe { count(&raw mut (*counts(entry, way)).arrived) }
}

/// Counts a reply that left.
#[inline(always)]
pub fn replied(prober: &Prober, way: usize) {
    if let Some(entry) = HEALTH_ARRIVALS.get_ptr_mut(prober) {
        // SAFETY: the entry is a map value.
        unsafe { count(&raw mut (*counts(entry, way)).replied) }
    }
}

/// # Safety
///
/// `entry` must point to a value of `HEALTH_ARRIVALS`.
#[inline(always)]
unsafe fn counts(entry: *mut Arrivals, way: usize) -> *mut WayCounts {
    // SAFETY: the caller's promise. The mask shows the verifier that the index is in range.
    unsafe {
        (&raw mut (*entry).ways)
            .cast::<WayCounts>()
            .add(way & (WAYS - 1))
    }
}

/// # Safety
///
/// `counter` must point to a counter in a map value.
#[inline(always)]
unsafe fn count(counter: *mut u32) {
    // SAFETY: the caller's promise; as in `conntrack::add`.
    unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(counter, 1) };
}
