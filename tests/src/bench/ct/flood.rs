//! How many entries of idle TCP connections survive when floods of new flows hit the node.

use std::time::{Duration, Instant};

use health_datapath::MapSizes;

use crate::bench::{Figure, Options, Target};
use crate::conntrack::flood::{FloodKind, IdleBed};

/// Connections per IP version; each has two NAT entries.
const CONNECTIONS: u32 = 30_000;
/// Duration of each flood in seconds.
const SECONDS: u32 = 60;

/// Number of the connections' entries that survive a flood of echoes and datagrams from all ports with an agent's
/// default map sizes, and number of entries that survive floods of TCP segments, which use the same maps.
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
            // Packets of the flood may also use the port of idle connections.
            target: other.map(|_| Target::RatioAtLeast(1.0)),
        };
        figures.extend([
            figure(
                "packets, each of its own flow",
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
                "their NAT entries left (other: before)",
                "",
                after.translations as f64,
                Some(before.translations),
            ),
        ]);
    }
    Ok(figures)
}
