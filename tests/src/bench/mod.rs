//! Benchmarks. Each measures figures and compares them with those of a competitor or with a floor.

mod agent;
mod bare;
mod cluster;
mod ct;
mod damage;
mod detection;
mod echo;
mod endpoint;
mod endpoints;
mod files;
mod identities;
mod iperf;
mod lookups;
mod mesh;
mod objects;
mod parts;
mod policy;
mod probe;
mod program_cost;
mod report;
mod requests;
mod responder;
mod rtt;
mod sent;
mod service;
mod tap;
mod usage;
pub mod verifier;

pub use crate::arguments::BenchOptions as Options;
pub use files::raise_open_files_limit;

use report::Findings;
pub use report::{Figure, MIB, Machine, Report, Target, Unmeasured};

/// A benchmark and its name.
#[derive(Clone, Copy, Debug)]
pub struct Benchmark {
    /// The benchmark's name on the command line.
    pub name: &'static str,
    /// What the benchmark measures.
    pub about: &'static str,
    /// Runs the benchmark.
    pub run: fn(&Options) -> anyhow::Result<Report>,
}

impl Options {
    /// Number of rounds of a measurement: the requested number, or this default.
    fn rounds_or(&self, usual: u32) -> u32 {
        self.rounds.unwrap_or(usual)
    }
}

/// All benchmarks.
pub const ALL: &[Benchmark] = &[
    Benchmark {
        name: "agent",
        about: "Memory and CPU of one agent in a cluster of three",
        run: |_| agent::run(),
    },
    Benchmark {
        name: "ct",
        about: "Conntrack at a million entries, compared with bpftool and the kernel's conntrack",
        run: ct::run,
    },
    Benchmark {
        name: "damage",
        about: "Time until damage to the health endpoint is reported in each place",
        run: |_| damage::run(),
    },
    Benchmark {
        name: "detection",
        about: "Time until faults and recoveries of peers are reported, and false reports",
        run: detection::run,
    },
    Benchmark {
        name: "echo",
        about: "Echo answers in eBPF and by the stack, and the cost of the program alone",
        run: |_| echo::run(),
    },
    Benchmark {
        name: "endpoints",
        about: "Creating and deleting endpoints, compared with Debian's CNI plugins, and a node with 1000 endpoints",
        run: endpoints::run,
    },
    Benchmark {
        name: "identities",
        about: "Identities of a Kubernetes cluster of 1000 nodes: an agent's memory and requests",
        run: identities::run,
    },
    Benchmark {
        name: "mesh",
        about: "One agent with up to 50 000 simulated peers, compared with other probers",
        run: mesh::run,
    },
    Benchmark {
        name: "policy",
        about: "Policies of a Kubernetes cluster: time until a change is in force on three nodes, and its CPU time",
        run: policy::run,
    },
    Benchmark {
        name: "probe",
        about: "Container probes of one agent: 10,000 at 1 s, 1,000 at 50 ms, and compared with the blackbox exporter",
        run: probe::run,
    },
    Benchmark {
        name: "rtt",
        about: "Round trips timestamped in the kernel: accuracy, completeness and cost",
        run: rtt::run,
    },
    Benchmark {
        name: "service",
        about: "Services compared with kube-proxy's nftables rules, and their cost per packet",
        run: service::run,
    },
    Benchmark {
        name: "verifier",
        about: "Work of this kernel's verifier for each program, compared with its limits",
        run: |_| verifier::run(),
    },
];
