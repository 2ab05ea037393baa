//! `cargo xtask run`: a cluster of real agents on this machine or in a virtual one, or a Kubernetes cluster.

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::arguments::BedArgs;
use crate::passed::Passed;
use crate::privilege::as_root;
use crate::process::cannot_run;
use crate::workspace::Workspace;
use crate::{kubernetes, packages, progress, setup, vm};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask run                  three agents, until Ctrl-C
  cargo xtask run --once           the same, and exit with the result
  cargo xtask run --vm 6.12        on another kernel
  cargo xtask run --kubernetes     two nodes with kubelets, containerd, and the agents as pods")]
pub(crate) struct Args {
    /// Run a Kubernetes cluster whose agents are pods; builds Kubernetes first (10 to 20 minutes)
    #[arg(long, conflicts_with_all = ["nodes", "ipv6", "json", "probes", "services", "vm"])]
    kubernetes: bool,
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
    if args.kubernetes {
        return run_kubernetes(workspace, args.bed.args.once);
    }
    packages::require(packages::BED)?;
    if args.bed.args.probes {
        packages::require(packages::CONTAINERS)?;
    }
    if args.bed.args.services {
        packages::require(packages::SERVICES)?;
    }
    // Leaves out everything that the bed does not need, which saves a third of a first build.
    progress::build(workspace.cargo()?.args([
        "build",
        "--package=health-agent",
        "--package=tests",
        "--bin=health-agent",
        "--bin=bed",
        "--no-default-features",
    ]))?;

    let mut bed = as_root(workspace.dev_binary("bed"), "making network namespaces")?;
    bed.args(&args.bed.words);
    // The bed replaces this process, so that signals reach it and its exit code is ours.
    let error = bed.exec();
    Err(cannot_run(&bed, error))
}

/// Runs a Kubernetes cluster on a machine of its own, so that it leaves nothing.
fn run_kubernetes(workspace: &Workspace, once: bool) -> anyhow::Result<ExitCode> {
    kubernetes::setup(workspace)?;
    progress::build(workspace.cargo()?.args([
        "build",
        "--package=health-agent",
        "--package=tests",
        "--package=vm-init",
        "--bin=health-agent",
        "--bin=kubernetes",
        "--bin=machine",
        "--no-default-features",
        "--features=health-agent/etcd,health-agent/kubernetes,tests/all",
    ]))?;
    let mut cluster = as_root(workspace.dev_binary("machine"), "making namespaces")?;
    cluster.arg(workspace.dev_binary("kubernetes"));
    if once {
        cluster.arg("--once");
    }
    let error = cluster.exec();
    Err(cannot_run(&cluster, error))
}

#[cfg(test)]
mod tests {
    /// The modules of `tests/src/lib.rs` that the bed needs. They may use only non-optional dependencies.
    const OF_THE_BED: [&str; 13] = [
        "arguments",
        "bed",
        "conntrack",
        "containerd",
        "http",
        "image",
        "member",
        "packet",
        "probed",
        "process",
        "relay",
        "served",
        "wait",
    ];

    #[test]
    fn the_build_of_the_bed_has_no_module_that_only_tests_need() {
        let library = include_str!("../../tests/src/lib.rs");
        let mut is_gated = false;
        let mut ungated = Vec::new();
        for line in library.lines() {
            let module = line.strip_prefix("pub mod ");
            let module = module.and_then(|rest| rest.strip_suffix(';'));
            ungated.extend(module.filter(|_| !is_gated));
            is_gated = line == "#[cfg(feature = \"all\")]";
        }
        assert_eq!(ungated, OF_THE_BED, "add #[cfg(feature = \"all\")]");
    }
}
