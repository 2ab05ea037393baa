//! Waits for a condition, up to a deadline.

use std::env;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

/// How long a test waits for something that must happen, however busy the machine is. `cargo xtask bench` measures how
/// soon it actually happens.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Minimum pause between two checks.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum pause in a long wait, unless the checks themselves take long.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// Environment variable: factor by which to multiply waits on a slow machine.
const SLOWNESS: &str = "HEALTH_AGENT_SLOWNESS";
/// Environment variable: `1` allows tests to take long.
const LONG: &str = "HEALTH_AGENT_LONG";
/// Environment variable: the seed for random numbers, the same one that property tests use.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Sets a flag on drop, so that a thread that polls the flag also stops when the test fails.
pub struct RaisedAtEnd<'a>(pub &'a AtomicBool);

impl Drop for RaisedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Calls `look` until it returns a value, and returns that value. Fails after `deadline`, reporting `what` it waited
/// for and the last error of `look`, if any. `HEALTH_AGENT_SLOWNESS` in the environment multiplies the deadline. Time
/// in which processes wait for a CPU counts a quarter: a busy machine gets up to four times as long.
pub fn wait_for<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let (start, stalled) = (Instant::now(), cpu_stall());
    let deadline = deadline * slowness();
    loop {
        let begin = Instant::now();
        let found = look();
        if let Ok(Some(found)) = found {
            return Ok(found);
        }
        let elapsed = start.elapsed();
        let stalled = cpu_stall().saturating_sub(stalled).min(elapsed);
        if elapsed - stalled * 3 / 4 > deadline {
            let because = found.err().map(|error| format!(": {error:#}"));
            bail!(
                "waited {elapsed:.1?} in vain for {what}{}",
                because.unwrap_or_default()
            );
        }
        let long_wait = (start.elapsed() / 10).min(LONGEST_PAUSE);
        thread::sleep(pause_since(begin).max(long_wait));
    }
}

/// How long since boot at least one process was ready to run but had no CPU. Zero if the kernel does not report it
/// (Documentation/accounting/psi.rst).
fn cpu_stall() -> Duration {
    let pressure = fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let some = pressure.lines().find(|line| line.starts_with("some "));
    let total = some.and_then(|line| line.split_once("total="));
    let micros = total.and_then(|(_, total)| total.trim().parse().ok());
    Duration::from_micros(micros.unwrap_or(0))
}

/// The pause after a check that started at `begin`. Expensive checks take at most a third of the time, and even less on
/// a slow machine, whose only CPU also does the awaited work.
pub(crate) fn pause_since(begin: Instant) -> Duration {
    PAUSE.max(begin.elapsed() * 2 * slowness())
}

/// How many times slower this machine is than a fast one.
pub fn slowness() -> u32 {
    env::var(SLOWNESS)
        .ok()
        .and_then(|times| times.parse().ok())
        .unwrap_or(1)
}

/// Seed of the tests' random numbers: the same for all runs, unless a long run or the caller sets another seed.
pub fn seed() -> u64 {
    env::var(SEED)
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1)
}

/// Whether tests should do more of their usual work and take longer.
pub fn is_long() -> bool {
    env::var_os(LONG).is_some_and(|value| value == "1")
}
