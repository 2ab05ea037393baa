//! Cost of an agent that does only its normal work: memory and CPU in a cluster of three nodes, and the check of its
//! health endpoint.

use std::net::Ipv4Addr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use health_datapath::Datapath;
use health_datapath::dump::Pinned;
use health_endpoint::health::HealthEndpoint;
use health_net::link;
use health_net::netns::netlink_in;

use super::endpoint::with_endpoint;
use super::parts::median;
use super::sent::SentProbes;
use super::usage::{ResidentMemory, cpu_time, cpu_time_of_ended};
use super::{Figure, MIB, Report, Target};
use crate::{Bed, Node, process};

const NODES: u8 = 3;
/// Length of a measurement of the agent, and number of rounds. The `ping` processes run after each.
const WINDOW: Duration = Duration::from_secs(10);
const ROUNDS: u32 = 3;
const MEMORY_LIMIT_MIB: f64 = 20.0;
/// CPU limit relative to one `ping` process per probe.
const CPU_RATIO: f64 = 7.0;

const INSTANCE: &str = "bench-agent";
/// Number of timed checks. Each is followed by a single device dump for comparison.
const CHECKS: u32 = 1001;
const CHECK_RATIO: f64 = 8.0;

pub(super) fn run() -> anyhow::Result<Report> {
    let bed = Bed::builder().nodes(NODES).start()?;
    bed.wait_all_reachable(Duration::from_secs(30))?;
    let pid = bed.node(1).agent_pid()?;

    let (mut used, mut pings) = (Duration::ZERO, Duration::ZERO);
    let mut probes = 0;
    for _ in 0..ROUNDS {
        let before = (cpu_time(pid)?, SentProbes::by(bed.node(1))?);
        // The measurement covers this window; there is nothing else to wait for.
        thread::sleep(WINDOW);
        used += cpu_time(pid)? - before.0;
        let sent = (SentProbes::by(bed.node(1))? - before.1).total();
        pings += ping_each(bed.node(1), bed.node(2).ipv4(), sent)?;
        probes += sent;
    }
    let window = (WINDOW * ROUNDS).as_secs_f64();
    let percent = |time: Duration| time.as_secs_f64() / window * 100.0;

    let figures = vec![
        Figure {
            name: "resident memory".to_owned(),
            unit: MIB,
            ours: ResidentMemory::of(pid)?.now,
            other: None,
            target: Some(Target::MibAtMost(MEMORY_LIMIT_MIB)),
        },
        Figure {
            name: format!("CPU over {window} s (other: a ping for each of {probes} probes)"),
            unit: "% of a core",
            ours: percent(used),
            other: Some(percent(pings)),
            target: Some(Target::RatioAtMost(CPU_RATIO)),
        },
        with_endpoint(INSTANCE, check)?,
    ];
    Report::new(figures, ROUNDS)
}

/// CPU time of `count` consecutive `ping` processes with one echo each.
fn ping_each(node: &Node, address: Ipv4Addr, count: u64) -> anyhow::Result<Duration> {
    let ping = || {
        let mut command = Command::new("ping");
        let command = command.args(["-n", "-q", "-c", "1", "-W", "1", &address.to_string()]);
        process::run(command)?.success()
    };
    let before = cpu_time_of_ended()?;
    node.run_in(|| (0..count).try_for_each(|_| ping().map(drop)))??;
    Ok(cpu_time_of_ended()? - before)
}

/// Measures the check of a healthy health endpoint, which an agent repeats periodically.
async fn check(endpoint: &HealthEndpoint, _: &mut Datapath, _: &Pinned) -> anyhow::Result<Figure> {
    let netlink = netlink_in(endpoint.netns())?;
    let mut checks = Vec::new();
    let mut lists = Vec::new();
    for _ in 0..CHECKS {
        let start = Instant::now();
        let faults = endpoint.check().await?;
        checks.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(
            faults.is_empty(),
            "the endpoint is not in order: {faults:?}"
        );
        let start = Instant::now();
        link::list(&netlink).await?;
        lists.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Figure {
        name: "check of the health endpoint (other: a list of two devices)".to_owned(),
        unit: "us",
        ours: median(checks)?,
        other: Some(median(lists)?),
        target: Some(Target::RatioAtMost(CHECK_RATIO)),
    })
}
