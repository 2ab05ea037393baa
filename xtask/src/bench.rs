//! `cargo xtask bench`: one benchmark, in the release profile.

use std::fmt::Display;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::privilege::as_root;
use crate::process::{cannot_run, run};
use crate::workspace::Workspace;
use crate::{packages, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Benchmark to run; list all if omitted
    name: Option<String>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// Number of peers that `mesh` simulates (repeatable, in ascending order)
    #[arg(long, value_name = "N")]
    peers: Vec<u32>,
    /// Kind of fault that `detection` causes, such as `link-down` (repeatable) [default: all, then a watch for false verdicts]
    #[arg(long, value_name = "KIND")]
    fault: Vec<String>,
    /// Number of faults of each kind that `detection` causes
    #[arg(long, value_name = "N")]
    faults: Option<u32>,
    /// Minutes that `detection` watches for false verdicts under random loss
    #[arg(long, value_name = "N")]
    minutes: Option<u32>,
    /// Seconds of each flood of `ct`
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// Number of probes that `rtt` accounts for
    #[arg(long, value_name = "N")]
    probes: Option<u64>,
    /// Number of services that `service` sends traffic through (repeatable, in ascending order)
    #[arg(long, value_name = "N")]
    services: Vec<u32>,
    /// Rounds of each measurement of `service`
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    #[command(flatten)]
    choice: vm::Choice,
    /// Part of `ct`, `endpoints`, `probe`, `rtt` or `service` to run (repeatable) [default: all]
    #[arg(long, value_name = "NAME")]
    part: Vec<String>,
}

pub(crate) fn bench(workspace: &Workspace, args: &Args) -> anyhow::Result<ExitCode> {
    setup::setup(workspace)?;
    packages::require(packages::BENCHES)?;
    let mut build = workspace.cargo()?;
    build.args([
        "build",
        "--release",
        "--package=health-agent",
        "--package=tests",
        "--package=vm-init",
        "--bin=health-agent",
        "--bin=bench",
        "--bin=machine",
    ]);
    if args.choice.wanted() {
        run(build.arg("--bin=vm-init"))?;
        return vm::bench(workspace, &args.choice, args.words());
    }
    run(&mut build)?;
    let mut bench = as_root(workspace.release_binary("machine"), "benchmarks")?;
    bench.arg(workspace.release_binary("bench"));
    bench.args(args.words());
    let error = bench.exec();
    Err(cannot_run(&bench, error))
}

impl Args {
    /// The arguments for the program `bench`.
    fn words(&self) -> Vec<String> {
        let mut words: Vec<String> = self.name.iter().cloned().collect();
        if self.json {
            words.push("--json".to_owned());
        }
        let mut give = |flag: &str, value: &dyn Display| words.push(format!("--{flag}={value}"));
        self.peers.iter().for_each(|peers| give("peers", peers));
        self.services.iter().for_each(|some| give("services", some));
        self.fault.iter().for_each(|kind| give("fault", kind));
        self.part.iter().for_each(|part| give("part", part));
        for (flag, value) in [
            ("faults", self.faults.map(u64::from)),
            ("minutes", self.minutes.map(u64::from)),
            ("seconds", self.seconds.map(u64::from)),
            ("probes", self.probes),
            ("rounds", self.rounds.map(u64::from)),
        ] {
            if let Some(value) = value {
                give(flag, &value);
            }
        }
        words
    }
}
