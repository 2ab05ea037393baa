//! What one agent costs while it does nothing but its work: memory and CPU in a cluster of three, and the
//! check of its health endpoint.

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
use super::usage::{Resident, cpu_time};
use super::{Figure, Report, Target};
use crate::Bed;

const NODES: u8 = 3;
const WINDOW: Duration = Duration::from_secs(30);
const MEMORY_LIMIT_MIB: f64 = 25.0;
const CPU_LIMIT_PERCENT: f64 = 1.0;

const INSTANCE: &str = "bench-agent";
/// Checks that are timed, each beside a single list of devices.
const CHECKS: u32 = 1001;
const CHECK_LIMIT_US: f64 = 200.0;

pub(super) fn run() -> anyhow::Result<Report> {
    let bed = Bed::builder().nodes(NODES).start()?;
    bed.wait_all_reachable(Duration::from_secs(30))?;
    let pid = bed.node(1).agent_pid()?;

    let start = Instant::now();
    let before = cpu_time(pid)?;
    // The figure is a share of this window; there is nothing to wait for but its end.
    thread::sleep(WINDOW);
    let used = cpu_time(pid)? - before;
    let share = used.as_secs_f64() / start.elapsed().as_secs_f64();

    let figures = vec![
        Figure {
            name: "resident memory".to_owned(),
            unit: "MiB",
            ours: Resident::of(pid)?.now,
            other: None,
            target: Some(Target::AtMost(MEMORY_LIMIT_MIB)),
        },
        Figure {
            name: format!("CPU over {} s", WINDOW.as_secs()),
            unit: "% of a core",
            ours: share * 100.0,
            other: None,
            target: Some(Target::AtMost(CPU_LIMIT_PERCENT)),
        },
        with_endpoint(INSTANCE, check)?,
    ];
    Report::new(figures, 1)
}

/// The check of a health endpoint that is in order, which the agent does again and again.
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
        target: Some(Target::AtMost(CHECK_LIMIT_US)),
    })
}
