//! The spread of round trips over a veth pair with nothing else to do, as the kernel's programs and as
//! processes see it.

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
const GAP: Duration = Duration::from_millis(1);
const SPREAD_LIMIT_US: f64 = 1.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let line = Line::direct()?;
    let mut prober = Prober::new(&line)?;
    // Hardware addresses are learned, rows and code are warm.
    prober.probe_all(&[FAR; 1_000], GAP)?;
    let answers = prober.probe_all(&[FAR; PROBES], GAP)?;
    let kernel = answers.iter().map(|answer| answer.kernel).collect();
    let user = answers.iter().map(|answer| answer.user).collect();
    prober.detach()?;

    let sides = [
        ("the kernel's programs", kernel),
        ("the same probes timed in user space", user),
        ("fping", fping(line.near())?),
        ("ping", ping(line.near())?),
    ];
    let mut figures = Vec::new();
    for (index, (name, mut times)) in sides.into_iter().enumerate() {
        times.sort_unstable();
        let spread = quantile(&times, 0.95)? - quantile(&times, 0.05)?;
        figures.push(Figure {
            name: format!("idle veth, {name}: round trip, p95 - p5"),
            unit: "us",
            ours: micros(spread),
            other: None,
            target: (index == 0).then_some(Target::AtMost(SPREAD_LIMIT_US)),
        });
        figures.push(Figure {
            name: format!("idle veth, {name}: round trip, p50"),
            unit: "us",
            ours: micros(quantile(&times, 0.5)?),
            other: None,
            target: None,
        });
    }
    Ok(figures)
}

/// Round trips that `fping` finds.
fn fping(node: &Node) -> anyhow::Result<Vec<Duration>> {
    let ran = run(node
        .command("fping")
        .args(["-q", "-i", "1", "-p", "1", "-C", &PROBES.to_string()])
        .arg(FAR.to_string()))?;
    // `10.0.0.2 : 0.035 0.021 -`, milliseconds; a dash stands for a loss.
    let (_, times) = ran
        .stderr
        .split_once(" : ")
        .with_context(|| format!("fping is not understood: {}", ran.stderr))?;
    read_times(times.split_whitespace())
}

/// Round trips that `ping` finds.
fn ping(node: &Node) -> anyhow::Result<Vec<Duration>> {
    let text = node.exec(&format!("ping -n -i 0.001 -c {PROBES} {FAR}"))?;
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
        times.len() == PROBES,
        "{} round trips, not {PROBES}",
        times.len()
    );
    Ok(times)
}
