//! The environment variables of tests.

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

use super::events;

/// Makes tests with many rounds run long enough to find rare failures.
const LONG: &str = "HEALTH_AGENT_LONG";

/// Seed of the tests' random numbers, the same for all runs except long ones.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Prefixes of variables that are passed on to the tests.
const HANDED_ON: &[&str] = &["HEALTH_", "PROPTEST_"];

/// The variables, each as `NAME=VALUE`.
pub(super) fn of_tests(long: bool) -> Vec<String> {
    let (name, value) = events::ENVIRONMENT;
    // Otherwise every error seen while waiting for a condition would capture a whole backtrace.
    let mut variables = vec![format!("{name}={value}"), "RUST_BACKTRACE=0".to_owned()];
    variables.extend(env::vars().filter_map(|(name, value)| {
        let handed_on = HANDED_ON.iter().any(|start| name.starts_with(start));
        handed_on.then(|| format!("{name}={value}"))
    }));
    if long {
        let seed = new_seed();
        println!("random seed: {SEED}={seed}");
        // If a variable occurs twice, the last value wins.
        variables.extend([format!("{LONG}=1"), format!("{SEED}={seed}")]);
    }
    variables
}

/// Returns a seed that no earlier run has used.
pub(super) fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // The lower half changes fastest.
    now.map_or(0, |now| now.as_nanos() as u64)
}
