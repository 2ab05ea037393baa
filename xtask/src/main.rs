//! Set-up, local cluster, tests and benchmarks.
fn main() {}
