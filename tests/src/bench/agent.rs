//! What one agent costs while it does nothing but its work: memory and CPU in a cluster of three.

use std::thread;
use std::time::{Duration, Instant};

use super::usage::{Resident, cpu_time};
use super::{Figure, Report, Target};
use crate::Bed;

const NODES: u8 = 3;
const WINDOW: Duration = Duration::from_secs(30);
const MEMORY_LIMIT_MIB: f64 = 25.0;
const CPU_LIMIT_PERCENT: f64 = 1.0;

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
    ];
    Report::new(figures, 1)
}
