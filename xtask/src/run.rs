//! `cargo xtask run`: a cluster of real agents on this machine, or in a virtual one.

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use crate::privilege::as_root;
use crate::process::{cannot_run, run as run_command};
use crate::workspace::Workspace;
use crate::{packages, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Exit once the result is known: 0 if all is reachable, else 1
    #[arg(long)]
    once: bool,
    /// Number of nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=250))]
    nodes: u8,
    /// Give nodes and endpoints IPv6 addresses too
    #[arg(long)]
    ipv6: bool,
    /// Print the first node's status and the results of requests to services as JSON
    #[arg(long)]
    json: bool,
    /// Run containers under containerd on the first node, and show their probes
    #[arg(long)]
    probes: bool,
    /// Run a web service with three backends, and show which ones answer while one is not ready
    #[arg(long, conflicts_with = "probes")]
    services: bool,
    #[command(flatten)]
    vm: vm::Choice,
}

impl Args {
    /// The flags for the program `bed`.
    fn flags(&self) -> Vec<String> {
        let mut flags = vec![format!("--nodes={}", self.nodes)];
        for (wanted, flag) in [
            (self.once, "--once"),
            (self.ipv6, "--ipv6"),
            (self.json, "--json"),
            (self.probes, "--probes"),
            (self.services, "--services"),
        ] {
            if wanted {
                flags.push(flag.to_owned());
            }
        }
        flags
    }
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<ExitCode> {
    if args.vm.wanted() {
        return vm::run(workspace, &args.vm, args.flags());
    }
    setup::setup(workspace)?;
    packages::require(packages::BED)?;
    if args.probes {
        packages::require(packages::CONTAINERS)?;
    }
    if args.services {
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
    bed.args(args.flags());
    // The bed replaces this process, so that signals reach it and its exit code is ours.
    let error = bed.exec();
    Err(cannot_run(&bed, error))
}
