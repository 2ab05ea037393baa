//! Compares the round-trip time of each probe in the map with that of the same packets captured by `tcpdump` on the
//! uplink, with the kernel's timestamps. The packets cross a relay that delays them. For reference, the times captured
//! on the uplink are also compared with those that `tcpdump` captures at the other end of the same veth pair.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::capture::Packet;
use super::line::{Line, peers};
use super::micros;
use super::prober::{ProbeOutcome, Prober, read_reply, read_request};
use crate::bench::requests::quantile;
use crate::bench::{Figure, Target};
use crate::process::print_line;
use crate::relay::Handling;

/// The relay's delay, in both directions together.
const DELAYS: [Duration; 5] = [
    Duration::from_micros(10),
    Duration::from_micros(100),
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(200),
];
/// One probe per peer, so that each peer's round-trip time is still in the map when all replies have arrived.
const PEERS: u16 = 2_000;
const GAP: Duration = Duration::from_millis(1);
const WARM_UP: usize = 100;

/// Limits relative to the difference between both ends of the veth pair.
const MEDIAN_RATIO: f64 = 0.42;
const P99_RATIO: f64 = 0.9;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut line = Line::relayed(Handling::hold(Duration::ZERO))?;
    let mut figures = Vec::new();
    for delay in DELAYS {
        print_line(format_args!("  packets held for {delay:?}"));
        line.set_relay(Handling::hold(delay / 2))?;
        figures.extend(compare(&line, delay)?);
    }
    Ok(figures)
}

fn compare(line: &Line, delay: Duration) -> anyhow::Result<Vec<Figure>> {
    let peers = peers(PEERS);
    let mut prober = Prober::new(line)?;
    // The first probes wait until the peer's hardware address is resolved.
    prober.probe_all(&peers[..WARM_UP], GAP)?;
    let near = line.capture(2 * peers.len())?;
    let far = line.capture_at_relay(2 * peers.len())?;
    let probed = prober.probe(&peers, GAP)?;
    let near = round_trips(&near.finish()?);
    let far = round_trips(&far.finish()?);
    let (mut differences, mut of_ends) = (Vec::new(), Vec::new());
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for ProbeOutcome {
        peer,
        sequence,
        answer,
        ..
    } in &probed
    {
        let answer =
            answer.with_context(|| format!("{peer} did not answer, or no program matched it"))?;
        let [near, far] = [&near, &far].map(|captured| captured.get(&(*peer, *sequence)));
        let (near, far) = near
            .zip(far)
            .with_context(|| format!("tcpdump missed probe {sequence} of {peer}"))?;
        differences.push(answer.kernel.abs_diff(*near));
        of_ends.push(near.abs_diff(*far));
        ours.push(answer.kernel);
        others.push(*near);
    }
    for values in [&mut differences, &mut of_ends, &mut ours, &mut others] {
        values.sort_unstable();
    }
    ensure!(
        others[0] >= delay,
        "packets were held for only {:?}",
        others[0]
    );
    let mut figures = vec![Figure {
        name: format!("held {delay:?}: round trip, p50 (other: tcpdump)"),
        unit: "us",
        ours: micros(quantile(&ours, 0.5)?),
        other: Some(micros(quantile(&others, 0.5)?)),
        target: None,
    }];
    for (name, part, limit) in [("p50", 0.5, MEDIAN_RATIO), ("p99", 0.99, P99_RATIO)] {
        figures.push(Figure {
            name: format!(
                "held {delay:?}: difference per probe from tcpdump, {name} (other: of tcpdump at both ends of the veth)"
            ),
            unit: "us",
            ours: micros(quantile(&differences, part)?),
            other: Some(micros(quantile(&of_ends, part)?)),
            target: Some(Target::RatioAtMost(limit)),
        });
    }
    Ok(figures)
}

/// The time from each probe to its reply.
pub(super) fn round_trips(packets: &[Packet]) -> HashMap<(Ipv4Addr, u16), Duration> {
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
