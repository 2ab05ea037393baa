//! What tests find in their environment.

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

use super::events;

/// Has tests of many rounds run for as long as it takes to find what is rare.
const LONG: &str = "HEALTH_AGENT_LONG";

/// Where the random numbers of tests begin; the same for all runs but long ones.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Variables that are handed on, by how their names begin.
const HANDED_ON: &[&str] = &["HEALTH_", "PROPTEST_"];

/// `NAME=VALUE`, each.
pub(super) fn of_tests(long: bool) -> Vec<String> {
    let (name, value) = events::ENVIRONMENT;
    // Each error that a wait sees would have the whole stack read.
    let mut variables = vec![format!("{name}={value}"), "RUST_BACKTRACE=0".to_owned()];
    variables.extend(env::vars().filter_map(|(name, value)| {
        let handed_on = HANDED_ON.iter().any(|start| name.starts_with(start));
        handed_on.then(|| format!("{name}={value}"))
    }));
    if long {
        let seed = new_seed();
        println!("random numbers begin with {SEED}={seed}");
        // The last one of a name counts.
        variables.extend([format!("{LONG}=1"), format!("{SEED}={seed}")]);
    }
    variables
}

/// A number that no earlier run had.
pub(super) fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // Its lower half changes most.
    now.map_or(0, |now| now.as_nanos() as u64)
}
