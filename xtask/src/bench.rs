//! `cargo xtask bench`: one benchmark, in the release profile.

use std::os::unix::process::CommandExt as _;

use crate::privilege::as_root;
use crate::process::{cannot_run, run};
use crate::workspace::Workspace;
use crate::{packages, setup};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which one; without a name all are listed
    name: Option<String>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// Number of peers that `mesh` simulates; may be repeated, in ascending order
    #[arg(long, value_name = "N")]
    peers: Vec<u32>,
    /// Kind of fault that `detection` makes, such as `link-down`; may be repeated. Without it: all kinds,
    /// and then it watches for false verdicts while there is no fault
    #[arg(long, value_name = "KIND")]
    fault: Vec<String>,
    /// Faults of each kind that `detection` makes
    #[arg(long, value_name = "N")]
    faults: Option<u32>,
    /// Minutes that `detection` watches for false verdicts under random loss
    #[arg(long, value_name = "N")]
    minutes: Option<u32>,
    /// Seconds of each flood that `ct` makes
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// Probes that `rtt` accounts for
    #[arg(long, value_name = "N")]
    probes: Option<u64>,
    /// Number of services that `service` sends traffic through; may be repeated, in ascending order
    #[arg(long, value_name = "N")]
    services: Vec<u32>,
    /// Rounds of each measurement of `service`
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Part of `ct`, `endpoints`, `probe`, `rtt` or `service` to run, all without; may be repeated
    #[arg(long, value_name = "NAME")]
    part: Vec<String>,
}

pub(crate) fn bench(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    packages::require(packages::BENCHES)?;
    run(workspace.cargo()?.args([
        "build",
        "--release",
        "--package=health-agent",
        "--package=tests",
        "--package=vm-init",
        "--bin=health-agent",
        "--bin=bench",
        "--bin=machine",
    ]))?;

    let mut bench = as_root(workspace.release_binary("machine"), "benchmarks")?;
    bench.arg(workspace.release_binary("bench"));
    bench.args(&args.name);
    if args.json {
        bench.arg("--json");
    }
    for peers in &args.peers {
        bench.arg(format!("--peers={peers}"));
    }
    for services in &args.services {
        bench.arg(format!("--services={services}"));
    }
    for kind in &args.fault {
        bench.arg(format!("--fault={kind}"));
    }
    for part in &args.part {
        bench.arg(format!("--part={part}"));
    }
    for (flag, value) in [
        ("--faults", args.faults.map(u64::from)),
        ("--minutes", args.minutes.map(u64::from)),
        ("--seconds", args.seconds.map(u64::from)),
        ("--probes", args.probes),
        ("--rounds", args.rounds.map(u64::from)),
    ] {
        if let Some(value) = value {
            bench.arg(format!("{flag}={value}"));
        }
    }
    let error = bench.exec();
    Err(cannot_run(&bench, error))
}
