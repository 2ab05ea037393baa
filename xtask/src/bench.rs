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
}

pub(crate) fn bench(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    setup::setup(workspace)?;
    packages::require(packages::BENCHES)?;
    run(workspace.cargo()?.args([
        "build",
        "--release",
        "--package=health-agent",
        "--package=tests",
        "--bin=health-agent",
        "--bin=bench",
    ]))?;

    let mut bench = as_root(workspace.release_binary("bench"), "benchmarks")?;
    bench.args(&args.name);
    if args.json {
        bench.arg("--json");
    }
    for peers in &args.peers {
        bench.arg(format!("--peers={peers}"));
    }
    let error = bench.exec();
    Err(cannot_run(&bench, error))
}
