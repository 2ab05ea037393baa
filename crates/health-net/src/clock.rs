//! The kernel's clocks: the clock that programs and this agent use for timestamps, and the accuracy of the time of day.

use std::fs;
use std::io;
use std::time::Duration;

use nix::time::{ClockId, clock_getres, clock_gettime};
use serde::Serialize;

/// Returns `CLOCK_MONOTONIC`, the clock of the programs' timestamps, in nanoseconds.
pub fn now_ns() -> u64 {
    // The kernel offers this clock to every process. If seccomp denies it, the times are 0, which is long ago.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    now.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// The ID of the current boot, which changes each time the machine starts.
pub fn boot_id() -> io::Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim_end().to_owned())
}

/// Returns when the machine was started, as the time since 1970 according to the current time of day.
pub fn boot_time() -> io::Result<Duration> {
    let [now, up] = [ClockId::CLOCK_REALTIME, ClockId::CLOCK_BOOTTIME].map(clock_gettime);
    Ok(Duration::from(now?).saturating_sub(up?.into()))
}

/// Returns `CLOCK_MONOTONIC` in seconds, as of the kernel's last tick: times that programs read afterwards are never
/// earlier.
pub fn coarse_now_secs() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::ZERO, Duration::from);
    now.as_secs().try_into().unwrap_or(u32::MAX)
}

/// Returns the duration of a kernel tick (`jiffies`), in nanoseconds: the resolution of clocks that only advance with
/// ticks (kernel/time/posix-timers.c, `posix_get_coarse_res`).
pub fn tick_ns() -> u64 {
    // The longest tick (HZ = 100). As with `now_ns`, the kernel offers this clock to every process.
    const LONGEST: Duration = Duration::from_millis(10);
    let tick = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(LONGEST, Duration::from);
    tick.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// The state of the clock (adjtimex(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ClockState {
    /// Whether the clock is kept synchronised (`STA_UNSYNC` is not set).
    pub synchronised: bool,
    /// Maximum error in microseconds.
    pub max_error_us: u64,
    /// Estimated error in microseconds.
    pub estimated_error_us: u64,
    /// How many seconds `CLOCK_TAI` is ahead of UTC; 0 if the kernel does not know the leap seconds.
    pub tai_offset_s: i32,
}

impl ClockState {
    /// How many nanoseconds `CLOCK_TAI` is ahead of UTC.
    pub fn tai_offset_ns(&self) -> u64 {
        u64::from(self.tai_offset_s.unsigned_abs()) * 1_000_000_000
    }
}

/// Reads the clock's state from the kernel; changes nothing and needs no privilege.
pub fn state() -> io::Result<ClockState> {
    // SAFETY: all zero is a valid `timex`, and without a mode the kernel only fills it in.
    let timex = unsafe {
        let mut timex: libc::timex = std::mem::zeroed();
        if libc::adjtimex(&raw mut timex) < 0 {
            return Err(io::Error::last_os_error());
        }
        timex
    };
    Ok(ClockState {
        synchronised: timex.status & libc::STA_UNSYNC == 0,
        max_error_us: timex.maxerror.unsigned_abs(),
        estimated_error_us: timex.esterror.unsigned_abs(),
        tai_offset_s: timex.tai,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_was_started_when_the_kernel_says() {
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let line = stat.lines().find_map(|line| line.strip_prefix("btime "));
        let btime: u64 = line.unwrap().parse().unwrap();
        assert!(boot_time().unwrap().as_secs().abs_diff(btime) <= 1);
    }

    #[test]
    fn the_kernel_reports_the_state_of_its_clock() {
        let state = state().unwrap();
        // Leap seconds: either none, or all of them since 1972.
        assert!(
            state.tai_offset_s == 0 || state.tai_offset_s >= 37,
            "{state:?}"
        );
    }
}
