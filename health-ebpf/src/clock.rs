//! The kernel's clocks, in nanoseconds.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_ktime_get_tai_ns};
use health_common::config::DatapathConfig;

use crate::frame::Frame;

/// Longest time that a packet can have waited for its program. A longer value is ignored: it means that the clock was
/// set in between.
const LONGEST_WAIT_NS: u64 = 10_000_000;

/// `CLOCK_MONOTONIC`.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

/// When a packet was received, `CLOCK_MONOTONIC`. If the kernel timestamped the packet when it came from the device,
/// the time spent since then (in a queue, or while captures copied it) is excluded.
#[inline(always)]
pub fn received_ns(frame: &Frame, config: &DatapathConfig) -> u64 {
    let now_ns = now_ns();
    let stamped_ns = frame.stamped_ns();
    if stamped_ns == 0 {
        return now_ns;
    }
    // Both clocks are read now, so setting the clock between a probe and its reply does no harm.
    let waited_ns = utc_now_ns(config).wrapping_sub(stamped_ns);
    if waited_ns < LONGEST_WAIT_NS {
        now_ns - waited_ns
    } else {
        now_ns
    }
}

/// `CLOCK_MONOTONIC`, up to one kernel tick behind, at a fraction of the cost of [`now_ns`].
#[inline(always)]
pub fn coarse_now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Like [`coarse_now_ns`], in whole seconds.
#[inline(always)]
pub fn coarse_now_secs() -> u32 {
    seconds(coarse_now_ns())
}

/// Whether new service flows and masqueraded flows are held back for now.
#[inline(always)]
pub fn are_flows_held(config: &DatapathConfig) -> bool {
    config.flows_held_until_ns != 0 && coarse_now_ns() < config.flows_held_until_ns
}

/// Converts nanoseconds to whole seconds.
#[inline(always)]
pub fn seconds(ns: u64) -> u32 {
    (ns / 1_000_000_000) as u32
}

/// UTC time since 1970.
#[inline(always)]
pub fn utc_now_ns(config: &DatapathConfig) -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_tai_ns() }.wrapping_sub(config.tai_offset_ns)
}
