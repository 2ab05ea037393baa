//! Arguments of the programs that `cargo xtask` runs. `xtask` compiles this file too, so that it can check the
//! arguments before building.

use clap::{Args, value_parser};

/// Arguments of `bed`.
#[derive(Args)]
pub struct BedArgs {
    /// Exit once the result is known: 0 if all is reachable, else 1
    #[arg(long)]
    pub once: bool,
    /// Number of nodes
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u8).range(1..=250))]
    pub nodes: u8,
    /// Give nodes and endpoints IPv6 addresses too
    #[arg(long)]
    pub ipv6: bool,
    /// Print the first node's status and the results of requests to services as JSON
    #[arg(long)]
    pub json: bool,
    /// Run containers under containerd on the first node, and show their probes
    #[arg(long)]
    pub probes: bool,
    /// Run a web service with three backends, and show which ones answer while one is not ready
    #[arg(long, conflicts_with = "probes")]
    pub services: bool,
}

/// Arguments of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Benchmark to run; list all if omitted
    pub name: Option<String>,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
    /// How to run the benchmark.
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Options of a benchmark. Each benchmark has its own defaults for omitted options.
#[derive(Args)]
pub struct BenchOptions {
    /// Number of peers that `mesh` simulates (repeatable, in ascending order)
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub peers: Vec<u32>,
    /// Kind of fault that `detection` causes, such as `link-down` (repeatable) [default: all, then a watch for false
    /// verdicts]
    #[arg(long = "fault", value_name = "KIND")]
    pub kinds: Vec<String>,
    /// Number of faults of each kind that `detection` causes
    #[arg(long, value_name = "N")]
    pub faults: Option<u32>,
    /// Minutes that `detection` watches for false verdicts under random loss
    #[arg(long, value_name = "N")]
    pub minutes: Option<u32>,
    /// Seconds of each flood of `ct`
    #[arg(long, value_name = "N")]
    pub seconds: Option<u32>,
    /// Number of probes that `rtt` accounts for
    #[arg(long, value_name = "N")]
    pub probes: Option<u64>,
    /// Number of services that `service` sends traffic through (repeatable, in ascending order)
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=60_000))]
    pub services: Vec<u32>,
    /// Rounds of each measurement of `service`
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000))]
    pub rounds: Option<u32>,
    /// Part of `ct`, `endpoints`, `probe`, `rtt` or `service` to run (repeatable) [default: all]
    #[arg(long = "part", value_name = "NAME")]
    pub parts: Vec<String>,
}

/// Arguments of `fuzz`: which packets to run.
#[derive(Args, Clone, Copy)]
pub struct FuzzArgs {
    /// Number of packets
    #[arg(long = "runs", value_name = "N", default_value_t = 1_000_000)]
    pub count: u64,
    /// Seed of the random packets
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Number of the first packet
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub first: u64,
}
