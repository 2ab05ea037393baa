//! `cargo xtask fuzz`: runs random and mutated packets through the datapath's programs.

use std::os::unix::process::CommandExt as _;

use crate::privilege::as_root;
use crate::process::{cannot_run, run};
use crate::setup;
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of packets
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    runs: u64,
    /// Seed of the random packets
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of the first packet
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u64,
}

pub(crate) fn fuzz(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    run(workspace
        .cargo()?
        .args(["build", "--release", "--package=tests", "--bin=fuzz"]))?;

    let mut fuzz = as_root(workspace.release_binary("fuzz"), "loading programs")?;
    for (flag, value) in [
        ("--runs", args.runs),
        ("--seed", args.seed),
        ("--first", args.first),
    ] {
        fuzz.arg(format!("{flag}={value}"));
    }
    let error = fuzz.exec();
    Err(cannot_run(&fuzz, error))
}
