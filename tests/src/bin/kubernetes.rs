//! Runs a real Kubernetes cluster, with agents as its pods, until Ctrl-C.

use std::process::{self, ExitCode};
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tests::kubernetes::Cluster;
use tests::process::print_line;

#[derive(Parser)]
#[command(
    name = "kubernetes",
    about = "Run a Kubernetes cluster on this machine"
)]
struct Cli {
    /// Exit once all nodes are ready
    #[arg(long)]
    once: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_line(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let start = Instant::now();
    let cluster = Cluster::boot(&["n1", "n2"])?;
    if !cli.once {
        print_guide(&cluster)?;
    }
    print_line("waiting for the nodes");
    let result = cluster.wait_until_ready();
    print_line(cluster.plane.kubectl("get nodes -o wide")?);
    print_line(cluster.plane.kubectl("get pods -A -o wide")?);
    match result {
        Ok(()) => print_line(format_args!(
            "all nodes are ready after {:.1} s",
            start.elapsed().as_secs_f64()
        )),
        Err(error) if cli.once => return Err(error),
        Err(error) => print_line(format_args!("warning: {error:#}")),
    }
    if !cli.once {
        signals.forever().next();
        print_line("removing the cluster");
    }
    Ok(())
}

fn print_guide(cluster: &Cluster) -> anyhow::Result<()> {
    let node = cluster.nodes().first().context("no node")?;
    print_line(format_args!(
        "The cluster runs until Ctrl-C.\n  \
         kubectl                 nsenter -a -t {own} kubectl --kubeconfig {kubeconfig} get pods -A\n  \
         on node {name}              nsenter -a -t {pid} COMMAND",
        own = process::id(),
        kubeconfig = cluster.plane.kubeconfig().display(),
        name = node.name(),
        pid = node.pid()?,
    ));
    Ok(())
}
