//! The clock of the datapath.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which programs take their times from.
pub fn now_ns() -> u64 {
    // The kernel offers this clock to every process; one that seccomp keeps from it sees old times.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    now.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Seconds of `CLOCK_MONOTONIC`, as of the last tick of the kernel: what programs read afterwards is not
/// before it.
pub fn coarse_now_secs() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::ZERO, Duration::from);
    now.as_secs().try_into().unwrap_or(u32::MAX)
}
