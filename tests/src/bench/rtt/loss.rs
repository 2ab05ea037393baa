//! The number of losses in the map compared with the number that a relay caused.

use std::time::Duration;

use anyhow::ensure;
use health_datapath::rtt_store::LossOutcome;

use super::line::{Line, peers};
use super::prober::Prober;
use crate::bench::{Figure, Target};
use crate::relay::{Handling, is_echo_request};

/// Number of probes and of peers: one probe per peer.
const PROBES: u16 = 50_000;
const GAP: Duration = Duration::from_micros(50);
/// One in this many probes is lost, at irregular positions.
const ONE_OF: u64 = 37;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut line = Line::relayed(Handling::hold(Duration::ZERO))?;
    {
        // Resolves hardware addresses.
        let mut prober = Prober::new(&line)?;
        prober.probe_all(&peers(1), GAP)?;
    }
    let mut seen = 0;
    line.set_relay(Handling::drop_if(move |frame| {
        if !is_echo_request(frame) {
            return false;
        }
        seen += 1;
        scattered(seen)
    }))?;
    let mut prober = Prober::new(&line)?;
    let peers = peers(PROBES);
    let probed = prober.probe(&peers, GAP)?;
    for probe in probed.iter().filter(|probe| probe.answer.is_none()) {
        let outcome = prober.give_up(probe)?;
        ensure!(outcome == LossOutcome::Counted, "{probe:?}: {outcome:?}");
    }
    let (mut samples, mut lost) = (0, 0);
    for peer in &peers {
        let row = prober.row(*peer)?;
        samples += row.samples;
        lost += row.lost;
    }
    let dropped = line.dropped();
    ensure!(dropped > 0, "nothing was dropped");
    Ok(vec![
        Figure {
            name: format!("{PROBES} probes: lost by the map (other: dropped on the way)"),
            unit: "probes",
            ours: lost as f64,
            other: Some(dropped as f64),
            target: Some(Target::Equal),
        },
        Figure {
            name: format!("{PROBES} probes: samples (other: not dropped)"),
            unit: "probes",
            ours: samples as f64,
            other: Some((u64::from(PROBES) - dropped) as f64),
            target: Some(Target::Equal),
        },
    ])
}

/// Returns true for one in [`ONE_OF`] numbers, without a pattern (the finalizer of SplitMix64).
fn scattered(number: u64) -> bool {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)).is_multiple_of(ONE_OF)
}
