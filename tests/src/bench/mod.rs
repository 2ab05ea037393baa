//! Benchmarks: each measures figures and compares them with a peer's or a floor's.

mod agent;
mod echo;
mod program_cost;
mod report;

pub use report::{Figure, Machine, Report, Target};

/// A benchmark by its name.
#[derive(Clone, Copy, Debug)]
pub struct Benchmark {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// Measures.
    pub run: fn() -> anyhow::Result<Report>,
}

/// All benchmarks.
pub const ALL: &[Benchmark] = &[
    Benchmark {
        name: "agent",
        about: "Memory and CPU of one agent in a cluster of three",
        run: agent::run,
    },
    Benchmark {
        name: "echo",
        about: "An echo answered in eBPF against one by the stack, and the cost of the program alone",
        run: echo::run,
    },
];
