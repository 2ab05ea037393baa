//! Runs a cluster of real agents on this machine until Ctrl-C, or with `--once` until all probes were answered.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use health_model::api::ContainerProbe;
use nix::sys::signal::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tests::arguments::BedArgs;
use tests::bed::{Bed, BedLock, Node, WaitOutcome};
use tests::probed::ProbedContainers;
use tests::process::{Running, print_line, shown};
use tests::served::show::{Folders, Report, Show};
use tests::{PATIENCE, wait_for};

#[derive(Parser)]
#[command(name = "bed", about = "Run a cluster of real agents on this machine")]
struct Cli {
    #[command(flatten)]
    args: BedArgs,
    /// Time limit for the first answers to all probes
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    patience: u64,
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

fn run(Cli { args, patience }: &Cli) -> anyhow::Result<()> {
    // While this process waits for the lock, a signal may simply kill it.
    let lock = BedLock::acquire()?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let start = Instant::now();
    let mut builder = Bed::builder().nodes(args.nodes).ipv6(args.ipv6);
    let containers = args.probes.then(ProbedContainers::new).transpose()?;
    if let Some(containers) = &containers {
        builder = builder.first_agent_args(&containers.agent_args());
    }
    let folders = args.services.then(Folders::new).transpose()?;
    if let Some(folders) = &folders {
        builder = builder
            .agent_args(&folders.agent_args())
            .first_agent_args(&folders.first_agent_args());
    }
    let bed = builder.start_with(lock)?;
    let patience = Duration::from_secs(*patience);
    let waited = bed.wait_reachable_or(patience, || signals.pending().next().is_some())?;
    let result = match waited {
        WaitOutcome::AllReachable => {
            print_line(format_args!(
                "{} nodes, all reachable after {:.1} s",
                args.nodes,
                start.elapsed().as_secs_f64()
            ));
            Ok(())
        }
        WaitOutcome::Stopped => bail!("interrupted before every probe had an answer"),
        WaitOutcome::DeadlinePassed(unanswered) => {
            for pair in &unanswered {
                print_line(pair);
            }
            Err(anyhow::anyhow!(
                "{} probes did not succeed within {} s; the log of each node is {}",
                unanswered.len(),
                patience.as_secs(),
                "/run/health-agent/<node>/agent.log"
            ))
        }
    };

    print_status(bed.node(1), args.json)?;
    let _containerd = match &containers {
        Some(containers) => {
            print_line("starting containers");
            let containerd = containers.start(bed.node(1))?;
            wait_until_probed(bed.node(1), || signals.pending().next().is_some())?;
            Some(containerd)
        }
        None => None,
    };
    let mut result = result;
    let show = match folders {
        Some(folders) => {
            print_line("starting a service");
            let show = Show::start(folders, &bed)?;
            let report = show.run(|| signals.pending().next().is_some())?;
            print_report(&report, args.json)?;
            if !report.is_good() {
                result = result.and(Err(anyhow::anyhow!("requests reached the wrong backends")));
            }
            Some(show)
        }
        None => None,
    };
    if args.once {
        return result;
    }
    if let Err(error) = result {
        print_line(format_args!("warning: {error:#}"));
    }
    print_guide(&bed);
    if let Some(show) = &show {
        print_line(show.guide(bed.node(1)));
    }
    let watch = match &containers {
        Some(_) => Some(watch_probes(bed.node(1))?),
        None => None,
    };
    signals.forever().next();
    print_line("removing the cluster");
    drop(watch);
    if containers.is_some() {
        // The agent would restart containers that are being removed.
        bed.node(1).kill_agent(Signal::SIGTERM)?;
    }
    Ok(())
}

fn print_status(node: &Node, json: bool) -> anyhow::Result<()> {
    let ran = node.cli(if json { "status -o json" } else { "status" })?;
    if ran.stdout.is_empty() {
        bail!("{}: {}", ran.command, ran.stderr.trim_end());
    }
    io::stdout()
        .write_all(ran.stdout.as_bytes())
        .context("cannot print the status")
}

fn print_report(report: &Report, json: bool) -> anyhow::Result<()> {
    let text = match json {
        true => serde_json::to_string_pretty(report)? + "\n",
        false => report.to_string(),
    };
    io::stdout()
        .write_all(text.as_bytes())
        .context("cannot print the report of requests")
}

/// Waits until every container probe on the node has a result, and prints the results.
fn wait_until_probed(node: &Node, mut is_stopped: impl FnMut() -> bool) -> anyhow::Result<()> {
    let is_probed = wait_for("the containers to be probed", PATIENCE, || {
        if is_stopped() {
            return Ok(Some(false));
        }
        let listed: Vec<ContainerProbe> = serde_json::from_value(node.listing("probe list")?)?;
        let is_probed = |probe: &ContainerProbe| probe.result.is_some();
        let pods: BTreeSet<&str> = listed.iter().map(|probe| &*probe.pod).collect();
        let are_all = pods.len() == ProbedContainers::COUNT;
        Ok((are_all && listed.iter().all(is_probed)).then_some(true))
    })?;
    ensure!(is_probed, "interrupted before every container was probed");
    let listed = node.cli("probe list")?;
    io::stdout()
        .write_all(listed.stdout.as_bytes())
        .context("cannot print the probes")
}

/// Prints changes of the container probes from now on.
fn watch_probes(node: &Node) -> anyhow::Result<Running> {
    print_line("");
    let mut watch = node.cli_command();
    Running::start_printing(watch.args(["probe", "list", "--watch"]))
}

fn print_guide(bed: &Bed) {
    let node = bed.node(1);
    let last = bed.nodes().last().unwrap_or(node);
    print_line(format_args!(
        "\nThe cluster runs until Ctrl-C. Its nodes are the network namespaces {first} to {last}; \
         for {first}:\n  \
         run a command on it   nsenter --net={netns} COMMAND\n  \
         ask its agent         {cli} status\n  \
         its API               curl --unix-socket {socket} http://agent/v1beta/status\n  \
         its log               {runtime}/agent.log\n  \
         kill its agent        kill -9 $(cat {runtime}/health-agent.pid)\n  \
         start it again        {daemon}",
        first = node.name(),
        last = last.name(),
        netns = node.netns().display(),
        cli = shown(&node.cli_command()),
        socket = node.socket().display(),
        runtime = node.runtime_dir().display(),
        daemon = shown(&node.agent_command()),
    ));
}
