//! How far this host's time of day can be trusted, as the kernel knows it.

use std::io;
use std::time::Duration;

use serde::Serialize;

/// The state of the clock (adjtimex(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ClockState {
    /// Whether something keeps it in step (`STA_UNSYNC` is not set).
    pub synchronised: bool,
    /// Most that it can be wrong by, microseconds.
    pub max_error_us: u64,
    /// What it is estimated to be wrong by, microseconds.
    pub estimated_error_us: u64,
    /// By how many seconds `CLOCK_TAI` is ahead of UTC; 0 where the kernel was not told of leap seconds.
    pub tai_offset_s: i32,
}

impl ClockState {
    /// Most that the clock can be wrong by; `None` while nothing keeps it in step.
    pub fn max_error(&self) -> Option<Duration> {
        self.synchronised
            .then(|| Duration::from_micros(self.max_error_us))
    }

    /// By how many nanoseconds `CLOCK_TAI` is ahead of UTC.
    pub fn tai_offset_ns(&self) -> u64 {
        u64::from(self.tai_offset_s.unsigned_abs()) * 1_000_000_000
    }
}

/// Asks the kernel for the state of the clock; changes nothing and needs no privilege.
pub fn state() -> io::Result<ClockState> {
    // SAFETY: all zero is a valid `timex`, and with no mode set the kernel only fills it in.
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
    fn the_kernel_tells_the_state_of_its_clock() {
        let state = state().unwrap();
        assert_eq!(state.max_error().is_some(), state.synchronised);
        // Leap seconds: none, or all since 1972.
        assert!(
            state.tai_offset_s == 0 || state.tai_offset_s >= 37,
            "{state:?}"
        );
    }
}
