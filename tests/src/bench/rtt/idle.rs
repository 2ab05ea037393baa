//! The spread of round trips over a veth pair with nothing else to do, as the kernel's programs and as
//! processes see it.

use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::line::{FAR, Line};
use super::micros;
use super::prober::Prober;
use crate::Node;
use crate::bench::requests::quantile;
use crate::bench::{Figure, Target};
use crate::process::run;

const PROBES: usize = 5_000;
/// Time between two probes, whether CPUs without work may halt, and what is promised. A virtual CPU that
/// halted waits until its host runs it again, with caches that are cold: microseconds that are the machine's.
const LOADS: [(Duration, Halting, Option<Target>); 4] = [
    (
        Duration::from_micros(100),
        Halting::Prevented,
        Some(Target::AtMost(1.0)),
    ),
    (Duration::from_millis(1), Halting::Prevented, None),
    (Duration::from_micros(100), Halting::Allowed, None),
    (Duration::from_millis(1), Halting::Allowed, None),
];
/// Where a process says how late a CPU may be when it has work again: a 32-bit number of microseconds, in
/// force while the file is open (Linux, `Documentation/power/pm_qos_interface.rst`).
const LATENCY_REQUEST: &str = "/dev/cpu_dma_latency";

/// Whether CPUs without work may halt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Halting {
    Allowed,
    /// They poll for work, as `cyclictest` has them do.
    Prevented,
}

impl Halting {
    /// Holds for as long as what is returned lives.
    fn enforce(self) -> anyhow::Result<Option<File>> {
        if self == Self::Allowed {
            return Ok(None);
        }
        let mut request = File::options().write(true).open(LATENCY_REQUEST)?;
        request.write_all(&0_i32.to_ne_bytes())?;
        Ok(Some(request))
    }
}

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let line = Line::direct()?;
    let mut prober = Prober::new(&line)?;
    let mut figures = Vec::new();
    for (gap, halting, target) in LOADS {
        let _request = halting
            .enforce()
            .with_context(|| format!("cannot keep CPUs from halting by {LATENCY_REQUEST}"))?;
        prober.attach()?;
        // Hardware addresses are learned, rows and code are warm.
        prober.probe_all(&[FAR; 1_000], gap)?;
        let answers = prober.probe_all(&[FAR; PROBES], gap)?;
        let kernel = answers.iter().map(|answer| answer.kernel).collect();
        let user = answers.iter().map(|answer| answer.user).collect();
        prober.detach()?;
        let sides = [
            ("the kernel's programs", kernel, target),
            ("the same probes timed in user space", user, None),
            ("fping", fping(line.near(), gap)?, None),
            ("ping", ping(line.near(), gap)?, None),
        ];
        for (side, times, target) in sides {
            let load = match halting {
                Halting::Prevented => format!("a probe every {gap:?}"),
                Halting::Allowed => format!("a probe every {gap:?}, CPUs may halt"),
            };
            figures.extend(spread(&load, side, times, target)?);
        }
    }
    Ok(figures)
}

fn spread(
    load: &str,
    side: &str,
    mut times: Vec<Duration>,
    target: Option<Target>,
) -> anyhow::Result<[Figure; 2]> {
    times.sort_unstable();
    let figure = |name: &str, time, target| Figure {
        name: format!("idle veth, {load}, {side}: {name}"),
        unit: "us",
        ours: micros(time),
        other: None,
        target,
    };
    let spread = quantile(&times, 0.95)? - quantile(&times, 0.05)?;
    Ok([
        figure("p95 - p5", spread, target),
        figure("p50", quantile(&times, 0.5)?, None),
    ])
}

/// Round trips that `fping` finds.
fn fping(node: &Node, gap: Duration) -> anyhow::Result<Vec<Duration>> {
    let millis = (gap.as_secs_f64() * 1e3).to_string();
    let ran = run(node
        .command("fping")
        .args(["-q", "-i", &millis, "-p", &millis])
        .args(["-C", &PROBES.to_string()])
        .arg(FAR.to_string()))?;
    // `10.0.0.2 : 0.035 0.021 -`, milliseconds; a dash stands for a loss.
    let (_, times) = ran
        .stderr
        .split_once(" : ")
        .with_context(|| format!("fping is not understood: {}", ran.stderr))?;
    read_times(times.split_whitespace().filter(|&time| time != "-"))
}

/// Round trips that `ping` finds.
fn ping(node: &Node, gap: Duration) -> anyhow::Result<Vec<Duration>> {
    let seconds = gap.as_secs_f64();
    let text = node.exec(&format!("ping -n -i {seconds} -c {PROBES} {FAR}"))?;
    read_times(
        text.lines()
            .filter_map(|line| line.split_once(" time=")?.1.strip_suffix(" ms")),
    )
}

/// Numbers of milliseconds.
fn read_times<'a>(times: impl Iterator<Item = &'a str>) -> anyhow::Result<Vec<Duration>> {
    let times: Vec<Duration> = times
        .map(|time| {
            let millis: f64 = time
                .parse()
                .with_context(|| format!("no round trip: {time}"))?;
            Ok(Duration::from_secs_f64(millis / 1e3))
        })
        .collect::<anyhow::Result<_>>()?;
    ensure!(
        times.len() * 100 >= PROBES * 99,
        "{} round trips of {PROBES}",
        times.len()
    );
    Ok(times)
}
