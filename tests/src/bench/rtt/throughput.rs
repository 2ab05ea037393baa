//! iperf3 through the uplink's programs, compared with the same path without them.

use std::time::Duration;

use anyhow::ensure;

use super::line::{FAR, Line};
use super::median;
use super::prober::Prober;
use crate::bench::iperf::received_gigabits;
use crate::bench::{Figure, Target};
use crate::process::{Running, print_line};
use crate::wait_for;

/// Runs per side, alternating between the sides.
const ROUNDS: u32 = 31;
const SECONDS: u32 = 1;
const PATIENCE: Duration = Duration::from_secs(10);
const RATIO: f64 = 0.97;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let line = Line::direct()?;
    let mut prober = Prober::new(&line)?;
    prober.follow(FAR)?;
    let _server = Running::start(line.far().command("iperf3").arg("-s"))?;
    // Also warms up.
    wait_for("iperf3 to serve", PATIENCE, || gigabits(&line).map(Some))?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        print_line(format_args!("  round {round} of {ROUNDS}"));
        prober.attach()?;
        let through = gigabits(&line)?;
        prober.detach()?;
        let past = gigabits(&line)?;
        with.push(through);
        without.push(past);
    }
    let samples = prober.followed_samples(FAR)?;
    ensure!(samples > 0, "no round trip of the connections was counted");
    Ok(vec![Figure {
        name: format!("iperf3, one connection, median of {ROUNDS} (other: without the programs)"),
        unit: "Gbit/s",
        ours: median(with)?,
        other: Some(median(without)?),
        target: Some(Target::RatioAtLeast(RATIO)),
    }])
}

/// Throughput at the far end in Gbit/s.
fn gigabits(line: &Line) -> anyhow::Result<f64> {
    let json = line
        .near()
        .exec(&format!("iperf3 -J -t {SECONDS} -c {FAR}"))?;
    received_gigabits(&json)
}
