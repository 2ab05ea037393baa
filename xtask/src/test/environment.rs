//! The tests' environment.

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

use super::events;

/// Makes tests of many rounds run long enough to find rare failures.
const LONG: &str = "HEALTH_AGENT_LONG";

/// Seed of the tests' random numbers; the same for all runs except long ones.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Prefixes of variables that are passed on.
const HANDED_ON: &[&str] = &["HEALTH_", "PROPTEST_"];

/// The variables, each as `NAME=VALUE`.
pub(super) fn of_tests(long: bool) -> Vec<String> {
    let (name, value) = events::ENVIRONMENT;
    // Otherwise every error that a wait sees would capture a whole backtrace.
    let mut variables = vec![format!("{name}={value}"), "RUST_BACKTRACE=0".to_owned()];
    variables.extend(env::vars().filter_map(|(name, value)| {
        let handed_on = HANDED_ON.iter().any(|start| name.starts_with(start));
        handed_on.then(|| format!("{name}={value}"))
    }));
    if long {
        let seed = new_seed();
        println!("random seed: {SEED}={seed}");
        // The last value of a name counts.
        variables.extend([format!("{LONG}=1"), format!("{SEED}={seed}")]);
    }
    variables
}

/// A seed that no earlier run had.
pub(super) fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // The lower half changes most.
    now.map_or(0, |now| now.as_nanos() as u64)
}
