//! Each probe's round trip in the map against that of the same packets as `tcpdump` captures them on the
//! uplink, with the kernel's stamps, over a relay that holds them.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::capture::{Capture, Packet};
use super::line::{DEVICE, Line, peers};
use super::micros;
use super::prober::{Probed, Prober, read_reply, read_request};
use crate::bench::requests::quantile;
use crate::bench::{Figure, Target};
use crate::process::tell;
use crate::relay::Handling;

/// How long the relay holds packets, both ways together.
const DELAYS: [Duration; 5] = [
    Duration::from_micros(10),
    Duration::from_micros(100),
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(200),
];
/// One probe each, so that each one's round trip is still in the map when all are back.
const PEERS: u16 = 2_000;
const GAP: Duration = Duration::from_millis(1);
const WARM_UP: usize = 100;

const MEDIAN_LIMIT_US: f64 = 1.0;
const P99_LIMIT_US: f64 = 5.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut line = Line::relayed(Handling::hold(Duration::ZERO))?;
    let mut figures = Vec::new();
    for delay in DELAYS {
        tell(format_args!("  packets held for {delay:?}"));
        line.set_relay(Handling::hold(delay / 2))?;
        figures.extend(compare(&line, delay)?);
    }
    Ok(figures)
}

fn compare(line: &Line, delay: Duration) -> anyhow::Result<Vec<Figure>> {
    let peers = peers(PEERS);
    let mut prober = Prober::new(line)?;
    // The first probes wait for the peer's hardware address.
    prober.probe_all(&peers[..WARM_UP], GAP)?;
    let capture = Capture::start(line.near(), DEVICE, 2 * peers.len())?;
    let probed = prober.probe(&peers, GAP)?;
    let reference = round_trips(&capture.finish()?);
    let mut differences = Vec::new();
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for Probed {
        peer,
        sequence,
        answer,
        ..
    } in &probed
    {
        let answer = answer.with_context(|| format!("{peer} did not answer"))?;
        let other = reference
            .get(&(*peer, *sequence))
            .with_context(|| format!("tcpdump missed probe {sequence} of {peer}"))?;
        differences.push(answer.kernel.abs_diff(*other));
        ours.push(answer.kernel);
        others.push(*other);
    }
    for values in [&mut differences, &mut ours, &mut others] {
        values.sort_unstable();
    }
    ensure!(
        others[0] >= delay,
        "packets were held for {:?} only",
        others[0]
    );
    let mut figures = vec![Figure {
        name: format!("held {delay:?}: round trip, p50 (other: tcpdump)"),
        unit: "us",
        ours: micros(quantile(&ours, 0.5)?),
        other: Some(micros(quantile(&others, 0.5)?)),
        target: None,
    }];
    for (name, part, limit) in [("p50", 0.5, MEDIAN_LIMIT_US), ("p99", 0.99, P99_LIMIT_US)] {
        figures.push(Figure {
            name: format!("held {delay:?}: difference a probe from tcpdump, {name}"),
            unit: "us",
            ours: micros(quantile(&differences, part)?),
            other: None,
            target: Some(Target::AtMost(limit)),
        });
    }
    Ok(figures)
}

/// The time from each probe to its answer.
fn round_trips(packets: &[Packet]) -> HashMap<(Ipv4Addr, u16), Duration> {
    let sent: HashMap<_, Duration> = packets
        .iter()
        .filter_map(|(at, packet)| Some((read_request(packet)?, *at)))
        .collect();
    let answered = packets
        .iter()
        .filter_map(|(at, packet)| Some((read_reply(packet)?, *at)));
    answered
        .filter_map(|(probe, at)| Some((probe, at.checked_sub(*sent.get(&probe)?)?)))
        .collect()
}
