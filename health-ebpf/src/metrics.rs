//! Counting packets, and the one type in which a program's decision leaves it.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC};
use health_common::metrics::{Direction, Reason, metrics_index};

use crate::events;
use crate::frame::Frame;
use crate::maps::HEALTH_METRICS;

/// What becomes of a packet. Made by the functions of this module alone, so each one is counted.
#[must_use]
#[derive(Clone, Copy)]
pub struct Verdict(i32);

impl Verdict {
    /// The verdict as the return value of a classifier.
    #[inline(always)]
    pub fn code(self) -> i32 {
        self.0
    }
}

/// Lets a packet go where it was going; programs of others behind ours see it too.
#[inline(always)]
pub fn pass(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    Verdict(TC_ACT_UNSPEC)
}

/// The packet was handed to `bpf_redirect`, whose return value this is.
#[inline(always)]
pub fn redirected(frame: &Frame, reason: Reason, direction: Direction, code: i64) -> Verdict {
    count(frame, reason, direction);
    redirected_uncounted(code)
}

/// As [`redirected`], of a packet that is counted elsewhere, or by a datapath that keeps no state for benchmarks.
#[inline(always)]
pub fn redirected_uncounted(code: i64) -> Verdict {
    Verdict(if code == TC_ACT_REDIRECT as i64 {
        TC_ACT_REDIRECT
    } else {
        TC_ACT_SHOT
    })
}

/// Drops a packet, and tells whoever monitors that.
#[inline(always)]
pub fn refuse(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    events::dropped(frame, reason, direction);
    Verdict(TC_ACT_SHOT)
}

/// As [`refuse`], if one of these reasons is what a step returned: by its number, for functions in the kernel return nothing
/// else.
#[inline(always)]
pub fn refuse_for<const N: usize>(
    frame: &Frame,
    returned: u32,
    reasons: [Reason; N],
    direction: Direction,
) -> Option<Verdict> {
    for reason in reasons {
        if returned == reason as u32 {
            return Some(refuse(frame, reason, direction));
        }
    }
    None
}

/// The packet's bytes are kept, or on their way once more: what is left of it is dropped, and nobody hears of that.
#[inline(always)]
pub fn held(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    Verdict(TC_ACT_SHOT)
}

/// A packet that is none of our business: not counted, not touched.
#[inline(always)]
pub fn ignore() -> Verdict {
    Verdict(TC_ACT_UNSPEC)
}

/// Counts a packet without deciding about it.
#[inline(always)]
pub fn count(frame: &Frame, reason: Reason, direction: Direction) {
    count_bytes(frame.length(), reason, direction);
}

/// Counts what a process asked for, of which there is no packet. Such programs may be interrupted.
#[inline(always)]
pub fn count_call(reason: Reason, direction: Direction) {
    if let Some(counter) = HEALTH_METRICS.get_ptr_mut(metrics_index(reason, direction)) {
        // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`.
        unsafe {
            atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(&raw mut (*counter).packets, 1)
        };
    }
}

/// As [`count`], of a packet of this length.
#[inline(always)]
pub fn count_bytes(length: u32, reason: Reason, direction: Direction) {
    if let Some(counter) = HEALTH_METRICS.get_ptr_mut(metrics_index(reason, direction)) {
        // SAFETY: a valid pointer into this CPU's slot; programs on one CPU do not interrupt each
        // other here, as both tc hooks run with bottom halves off.
        unsafe {
            (*counter).packets += 1;
            (*counter).bytes += u64::from(length);
        }
    }
}
