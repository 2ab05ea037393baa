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
/// Time between two probes, and what is promised of them. After a millisecond of sleep the CPU and its
/// caches have gone cold, and that takes microseconds of its own.
const GAPS: [(Duration, Option<Target>); 2] = [
    (Duration::from_micros(100), Some(Target::AtMost(1.0))),
    (Duration::from_millis(1), None),
];

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let line = Line::direct()?;
    let mut prober = Prober::new(&line)?;
    let mut figures = Vec::new();
    for (gap, target) in GAPS {
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
            figures.extend(spread(gap, side, times, target)?);
        }
    }
    Ok(figures)
}

fn spread(
    gap: Duration,
    side: &str,
    mut times: Vec<Duration>,
    target: Option<Target>,
) -> anyhow::Result<[Figure; 2]> {
    times.sort_unstable();
    let figure = |name: &str, time, target| Figure {
        name: format!("idle veth, a probe every {gap:?}, {side}: {name}"),
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
