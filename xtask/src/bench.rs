//! `cargo xtask bench`: one benchmark, in the release profile.

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::arguments::BenchArgs;
use crate::passed::Passed;
use crate::privilege::as_root;
use crate::process::{cannot_run, run};
use crate::workspace::Workspace;
use crate::{packages, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    bench: Passed<BenchArgs>,
    #[command(flatten)]
    choice: vm::Choice,
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
        return vm::bench(workspace, &args.choice, &args.bench.words);
    }
    run(&mut build)?;
    let mut bench = as_root(workspace.release_binary("machine"), "benchmarks")?;
    bench.arg(workspace.release_binary("bench"));
    bench.args(&args.bench.words);
    let error = bench.exec();
    Err(cannot_run(&bench, error))
}
