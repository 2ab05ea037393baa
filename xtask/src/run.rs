//! `cargo xtask run`: a cluster of real agents on this machine, or in a virtual one.

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::arguments::BedArgs;
use crate::passed::Passed;
use crate::privilege::as_root;
use crate::process::{cannot_run, run as run_command};
use crate::workspace::Workspace;
use crate::{packages, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    bed: Passed<BedArgs>,
    #[command(flatten)]
    vm: vm::Choice,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<ExitCode> {
    if args.vm.wanted() {
        return vm::run(workspace, &args.vm, &args.bed.words);
    }
    setup::setup(workspace)?;
    packages::require(packages::BED)?;
    if args.bed.args.probes {
        packages::require(packages::CONTAINERS)?;
    }
    if args.bed.args.services {
        packages::require(packages::SERVICES)?;
    }
    run_command(workspace.cargo()?.args([
        "build",
        "--package=health-agent",
        "--package=tests",
        "--bin=health-agent",
        "--bin=bed",
    ]))?;

    let mut bed = as_root(workspace.dev_binary("bed"), "making network namespaces")?;
    bed.args(&args.bed.words);
    // The bed replaces this process, so that signals reach it and its exit code is ours.
    let error = bed.exec();
    Err(cannot_run(&bed, error))
}
