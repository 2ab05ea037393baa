//! Random and mutated packets do no harm. `cargo xtask fuzz` runs more of them.

use tests::arguments::FuzzArgs;
use tests::fuzz::fuzz;

/// An arbitrary fixed seed, so that every run finds the same failures.
const SEED: u64 = 1;
const RUNS: u64 = 100_000;

#[test]
#[ignore = "needs root"]
fn no_packet_is_damaged_and_no_map_spoilt_by_whatever_packets_come() -> anyhow::Result<()> {
    let runs = FuzzArgs {
        seed: SEED,
        first: 0,
        count: RUNS,
    };
    let done = fuzz(runs, |_| ())?.unwrap_or_else(|finding| panic!("{finding}"));
    // The test would prove nothing if most packets were dropped early.
    assert!(done.runs > RUNS * 3 / 4, "{done}");
    assert!(done.dropped > RUNS / 100, "{done}");
    assert!(done.answered > RUNS / 200, "{done}");
    assert!(done.rewritten > RUNS / 200, "{done}");
    Ok(())
}
