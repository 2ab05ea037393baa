//! Waiting for a condition, up to a deadline.

use std::env;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

/// How long a test waits for something that must happen, however busy the machine is. `cargo xtask bench` measures
/// how soon it happens.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Shortest pause between two checks.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest pause of a long wait, unless the checks themselves take long.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// Environment variable: by how much to multiply waits on a slow machine.
const SLOWNESS: &str = "HEALTH_AGENT_SLOWNESS";
/// Environment variable: `1` if tests may take their time.
const LONG: &str = "HEALTH_AGENT_LONG";
/// Environment variable: the seed of random numbers, as for property tests.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Raises a flag on drop, so that a thread that polls it also stops when the test fails.
pub struct RaisedAtEnd<'a>(pub &'a AtomicBool);

impl Drop for RaisedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Calls `look` until it finds something, and returns it. Fails after `deadline`, with `what` it waited for and the
/// last error of `look`, if any. `HEALTH_AGENT_SLOWNESS` in the environment multiplies the deadline. Time in which
/// processes wait for a processor counts a quarter: a busy machine has up to four times as long.
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

/// For how long, since the machine started, some process was ready to run and had no processor. Zero where the kernel
/// does not say (Documentation/accounting/psi.rst).
fn cpu_stall() -> Duration {
    let pressure = fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let some = pressure.lines().find(|line| line.starts_with("some "));
    let total = some.and_then(|line| line.split_once("total="));
    let micros = total.and_then(|(_, total)| total.trim().parse().ok());
    Duration::from_micros(micros.unwrap_or(0))
}

/// The pause after a check that started at `begin`. Checks that cost much CPU time take a third of the time at most,
/// and least on a slow machine, whose only CPU also does the awaited work.
pub(crate) fn pause_since(begin: Instant) -> Duration {
    PAUSE.max(begin.elapsed() * 2 * slowness())
}

/// How many times as long everything takes on this machine.
pub fn slowness() -> u32 {
    env::var(SLOWNESS)
        .ok()
        .and_then(|times| times.parse().ok())
        .unwrap_or(1)
}

/// Seed of the tests' random numbers: the same for all runs, except for long ones and where the caller sets another
/// seed.
pub fn seed() -> u64 {
    env::var(SEED)
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1)
}

/// Whether tests should do more of their usual work.
pub fn is_long() -> bool {
    env::var_os(LONG).is_some_and(|value| value == "1")
}
