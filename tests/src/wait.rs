//! Waiting for a condition, up to a deadline.

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

/// How long a test waits for what must come, however busy the machine is. How soon it comes is
/// measured by `cargo xtask bench`.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Shortest time between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// The longest pause of a wait that takes long, unless looks take long themselves.
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// In the environment: how many times as long to wait on a slow machine.
const SLOWNESS: &str = "HEALTH_AGENT_SLOWNESS";
/// In the environment: `1` where tests may take their time.
const LONG: &str = "HEALTH_AGENT_LONG";
/// In the environment: the seed of random numbers, as property tests have it.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Raises a flag as it is dropped, so that a thread that runs until then ends also when the test fails.
pub struct RaisedAtEnd<'a>(pub &'a AtomicBool);

impl Drop for RaisedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Looks again and again until `look` finds something, and returns it. Fails after `deadline`, with
/// `what` it waited for and the last error of `look`, if it had one. Where the environment has
/// `HEALTH_AGENT_SLOWNESS`, that many times the deadline.
pub fn wait_for<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    let deadline = deadline * slowness();
    loop {
        let begin = Instant::now();
        let found = look();
        if let Ok(Some(found)) = found {
            return Ok(found);
        }
        if start.elapsed() > deadline {
            let because = found.err().map(|error| format!(": {error:#}"));
            bail!(
                "waited {deadline:?} in vain for {what}{}",
                because.unwrap_or_default()
            );
        }
        let long_wait = (start.elapsed() / 10).min(LONGEST_PAUSE);
        thread::sleep(pause_since(begin).max(long_wait));
    }
}

/// The pause after a look that began then. What costs a processor much is looked at for a third of the time at most, and
/// least on a slow machine, whose only processor also does what is waited for.
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

/// Where random numbers of tests begin: the same for all runs but long ones, and where the caller sets another seed.
pub fn seed() -> u64 {
    env::var(SEED)
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1)
}

/// Whether tests are to do more of what they do anyway.
pub fn is_long() -> bool {
    env::var_os(LONG).is_some_and(|value| value == "1")
}
