//! The kernel's clocks, nanoseconds.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_ktime_get_tai_ns};
use health_common::config::DatapathConfig;

/// `CLOCK_MONOTONIC`.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

/// `CLOCK_MONOTONIC`, late by a tick of the kernel at most, and for a fraction of the cost.
#[inline(always)]
pub fn coarse_now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// The time of day, UTC, since 1970.
#[inline(always)]
pub fn utc_now_ns(config: &DatapathConfig) -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_tai_ns() }.wrapping_sub(config.tai_offset_ns)
}
