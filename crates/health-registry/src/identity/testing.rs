//! The size of the model tests of identities.

use proptest::test_runner::Config;

/// Number of sequences in a normal test run and in a long one.
const SEQUENCES: [u32; 2] = [100, 100_000];

/// Returns the number of sequences for this test run.
pub(super) fn sequences() -> Config {
    let is_long = std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1");
    Config::with_cases(SEQUENCES[usize::from(is_long)])
}
