//! TCP connections that are open and idle while others flood the node with flows: what is left of them.

use std::time::{Duration, Instant};

use health_datapath::MapSizes;

use crate::bench::{Figure, Options, Target};
use crate::conntrack::flood::{FloodKind, IdleBed};

/// Connections of each IP version; each has two entries of a translation.
const CONNECTIONS: u32 = 30_000;
/// How long each flood is, seconds.
const SECONDS: u32 = 60;

/// How many entries of the connections are left after a flood of echoes and of datagrams from all ports, in maps of the
/// sizes that an agent makes; and how many after floods of TCP, which share theirs.
pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let seconds = options.seconds.unwrap_or(SECONDS);
    let bed = IdleBed::new(MapSizes::default(), CONNECTIONS)?;
    let before = bed.idle()?;
    let mut figures = Vec::new();
    for (what, kinds) in [
        (
            "echoes and UDP from all ports",
            &[FloodKind::Echoes, FloodKind::Datagrams][..],
        ),
        ("SYNs from outside", &[FloodKind::SynsIn]),
        ("SYNs to outside", &[FloodKind::SynsOut]),
        ("ACKs from outside", &[FloodKind::AcksIn]),
    ] {
        let end = Instant::now() + Duration::from_secs(seconds.into());
        let flood = bed.flood(kinds, |_| Instant::now() >= end)?;
        let after = bed.idle()?;
        let figure = |name: &str, unit, ours, other: Option<u64>| Figure {
            name: format!("{what}, {seconds} s: {name}"),
            unit,
            ours,
            other: other.map(|other| other as f64),
            // What floods may have the port of idle connections, too.
            target: other.map(|_| Target::RatioAtLeast(1.0)),
        };
        figures.extend([
            figure(
                "packets, each of another flow",
                "k/s",
                flood.packets as f64 / flood.took.as_secs_f64() / 1e3,
                None,
            ),
            figure(
                "idle TCP flows left (other: before)",
                "",
                after.flows as f64,
                Some(before.flows),
            ),
            figure(
                "entries of their translations left (other: before)",
                "",
                after.translations as f64,
                Some(before.translations),
            ),
        ]);
    }
    Ok(figures)
}
