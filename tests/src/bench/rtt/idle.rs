//! The spread of round-trip times over an otherwise idle veth pair, as measured by the kernel's programs, by a packet
//! socket and by processes.

use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::line::{FAR, Line};
use super::micros;
use super::prober::Prober;
use super::reference::round_trips;
use crate::Node;
use crate::bench::requests::quantile;
use crate::bench::{Figure, Target};
use crate::process::run;

/// Number of rounds, in which the sides alternate, and number of probes per side and round.
const ROUNDS: usize = 5;
const PROBES: usize = 1_000;
const WARM_UP: usize = 200;
/// Time between two probes, whether idle CPUs may halt, and the target relative to `tcpdump`. A halted virtual CPU
/// waits until its host schedules it again, and then has cold caches: this takes microseconds that depend on the
/// machine.
const LOADS: [(Duration, Halting, Option<Target>); 4] = [
    (
        Duration::from_micros(100),
        Halting::Prevented,
        Some(Target::RatioAtMost(1.1)),
    ),
    (Duration::from_millis(1), Halting::Prevented, None),
    (Duration::from_micros(100), Halting::Allowed, None),
    (Duration::from_millis(1), Halting::Allowed, None),
];
/// File with which a process requests a limit of the CPUs' wake-up latency: it writes a 32-bit number of microseconds,
/// which applies while the file is open (Linux, `Documentation/power/pm_qos_interface.rst`).
const LATENCY_REQUEST: &str = "/dev/cpu_dma_latency";

/// Whether idle CPUs may halt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Halting {
    Allowed,
    /// Idle CPUs poll for work instead, as with `cyclictest`.
    Prevented,
}

impl Halting {
    /// Applies the setting as long as the returned file is open.
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
            .with_context(|| format!("cannot keep CPUs from halting through {LATENCY_REQUEST}"))?;
        let [mut kernel, mut user, mut tcpdump, mut by_fping, mut by_ping] =
            [const { Vec::new() }; 5];
        for _ in 0..ROUNDS {
            prober.attach()?;
            // Warms up: resolves hardware addresses, creates rows, loads code.
            prober.probe_all(&[FAR; WARM_UP], gap)?;
            let answers = prober.probe_all(&[FAR; PROBES], gap)?;
            kernel.extend(answers.iter().map(|answer| answer.kernel));
            user.extend(answers.iter().map(|answer| answer.user));
            let capture = line.capture(2 * PROBES)?;
            prober.probe(&[FAR; PROBES], gap)?;
            tcpdump.extend(round_trips(&capture.finish()?).into_values());
            prober.detach()?;
            by_fping.extend(fping(line.near(), gap)?);
            by_ping.extend(ping(line.near(), gap)?);
        }
        let load = match halting {
            Halting::Prevented => format!("idle veth, a probe every {gap:?}"),
            Halting::Allowed => format!("idle veth, a probe every {gap:?}, CPUs may halt"),
        };
        let tcpdump = Spread::of(tcpdump)?;
        figures.extend(Spread::of(kernel)?.figures(
            &format!("{load}, the kernel's programs (other: tcpdump)"),
            Some(&tcpdump),
            target,
        ));
        for (side, times) in [
            ("the same probes timed in user space", user),
            ("fping", by_fping),
            ("ping", by_ping),
        ] {
            figures.extend(Spread::of(times)?.figures(&format!("{load}, {side}"), None, None));
        }
    }
    Ok(figures)
}

/// Spread and median of round-trip times in microseconds.
struct Spread {
    width: f64,
    median: f64,
}

impl Spread {
    fn of(mut times: Vec<Duration>) -> anyhow::Result<Self> {
        times.sort_unstable();
        Ok(Self {
            width: micros(quantile(&times, 0.95)? - quantile(&times, 0.05)?),
            median: micros(quantile(&times, 0.5)?),
        })
    }

    fn figures(&self, name: &str, other: Option<&Self>, target: Option<Target>) -> [Figure; 2] {
        let figure = |what: &str, ours, other, target| Figure {
            name: format!("{name}: {what}"),
            unit: "us",
            ours,
            other,
            target,
        };
        let width = other.map(|other| other.width);
        let median = other.map(|other| other.median);
        [
            figure("p95 - p5", self.width, width, target),
            figure("p50", self.median, median, None),
        ]
    }
}

/// Round-trip times measured by `fping`.
fn fping(node: &Node, gap: Duration) -> anyhow::Result<Vec<Duration>> {
    let millis = (gap.as_secs_f64() * 1e3).to_string();
    let ran = run(node
        .command("fping")
        .args(["-q", "-i", &millis, "-p", &millis])
        .args(["-C", &PROBES.to_string()])
        .arg(FAR.to_string()))?;
    // `10.0.0.2 : 0.035 0.021 -` in milliseconds; a dash means a loss.
    let (_, times) = ran
        .stderr
        .split_once(" : ")
        .with_context(|| format!("cannot parse the output of fping: {}", ran.stderr))?;
    read_times(times.split_whitespace().filter(|&time| time != "-"))
}

/// Round-trip times measured by `ping`.
fn ping(node: &Node, gap: Duration) -> anyhow::Result<Vec<Duration>> {
    let seconds = gap.as_secs_f64();
    let text = node.exec(&format!("ping -n -i {seconds} -c {PROBES} {FAR}"))?;
    read_times(
        text.lines()
            .filter_map(|line| line.split_once(" time=")?.1.strip_suffix(" ms")),
    )
}

/// Parses times in milliseconds.
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
