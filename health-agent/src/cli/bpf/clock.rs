//! The clock of the datapath.

use std::time::Duration;

use anyhow::Context;
use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub(super) fn monotonic_ns() -> anyhow::Result<u64> {
    Ok(monotonic()?.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// Seconds of `CLOCK_MONOTONIC`.
pub(super) fn monotonic_s() -> anyhow::Result<i64> {
    Ok(monotonic()?.as_secs().try_into().unwrap_or(i64::MAX))
}

fn monotonic() -> anyhow::Result<Duration> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read the clock")?;
    Ok(now.into())
}
