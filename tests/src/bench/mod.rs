//! Benchmarks.
pub mod program_cost;
