//! Packet counting, and the only type for a program's final decision.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC};
use health_common::metrics::{Direction, Reason, metrics_index};

use crate::events;
use crate::frame::Frame;
use crate::maps::HEALTH_METRICS;

/// The fate of a packet. Only the functions of this module create it, so every verdict is counted.
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

/// Lets a packet continue to its destination; later programs, not ours, see it too.
#[inline(always)]
pub fn pass(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    Verdict(TC_ACT_UNSPEC)
}

/// The packet was passed to `bpf_redirect`, whose return value is `code`.
#[inline(always)]
pub fn redirected(frame: &Frame, reason: Reason, direction: Direction, code: i64) -> Verdict {
    count(frame, reason, direction);
    redirected_uncounted(code)
}

/// Like [`redirected`], for a packet that is counted elsewhere, or by a stateless datapath in benchmarks.
#[inline(always)]
pub fn redirected_uncounted(code: i64) -> Verdict {
    Verdict(if code == TC_ACT_REDIRECT as i64 {
        TC_ACT_REDIRECT
    } else {
        TC_ACT_SHOT
    })
}

/// Drops a packet, and notifies monitors.
#[inline(always)]
pub fn refuse(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    events::dropped(frame, reason, direction);
    Verdict(TC_ACT_SHOT)
}

/// Drops a packet whose bytes are stored or queued elsewhere, without notifying monitors.
#[inline(always)]
pub fn held(frame: &Frame, reason: Reason, direction: Direction) -> Verdict {
    count(frame, reason, direction);
    Verdict(TC_ACT_SHOT)
}

/// Leaves alone a packet that we do not handle: it is neither counted nor changed.
#[inline(always)]
pub fn ignore() -> Verdict {
    Verdict(TC_ACT_UNSPEC)
}

/// Counts a packet without deciding on it.
#[inline(always)]
pub fn count(frame: &Frame, reason: Reason, direction: Direction) {
    count_bytes(frame.length(), reason, direction);
}

/// Counts a request of a process, which involves no packet. The programs that handle such requests may be interrupted.
#[inline(always)]
pub fn count_call(reason: Reason, direction: Direction) {
    if let Some(counter) = HEALTH_METRICS.get_ptr_mut(metrics_index(reason, direction)) {
        // SAFETY: an aligned word of a map value. See `conntrack::add` for why this is an intrinsic.
        unsafe {
            atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(&raw mut (*counter).packets, 1)
        };
    }
}

/// Like [`count`], for a packet of this length.
#[inline(always)]
pub fn count_bytes(length: u32, reason: Reason, direction: Direction) {
    if let Some(counter) = HEALTH_METRICS.get_ptr_mut(metrics_index(reason, direction)) {
        // SAFETY: a valid pointer into this CPU's slot; programs on one CPU do not interrupt each other here, as both
        // tc hooks run with bottom halves disabled.
        unsafe {
            (*counter).packets += 1;
            (*counter).bytes += u64::from(length);
        }
    }
}
