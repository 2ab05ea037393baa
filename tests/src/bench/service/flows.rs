//! Connections, datagrams and requests through services, by turns on a node with the agent and on one with kube-proxy's
//! rules for nftables.

use anyhow::ensure;

use super::cluster::{counted, endpoint_count};
use super::stand::{CPU, Place, Stand};
use super::traffic::{Medians, Rates, Targets};
use crate::bench::{Figure, Options, Target};
use crate::process::tell;

const ROUNDS: u32 = 7;
/// Numbers of services, ascending.
const SIZES: [u32; 4] = [1, 1_000, 10_000, 50_000];
/// Connections against kube-proxy's.
const NEW_LIMIT: Target = Target::RatioAtLeast(1.5);
/// What goes on against kube-proxy's.
const KNOWN_LIMIT: Target = Target::RatioAtLeast(1.0);
/// Latency of connections against kube-proxy's.
const LATENCY_LIMIT: Target = Target::RatioAtMost(1.0);
/// Connections with the most services against those with one.
const FLAT_LIMIT: Target = Target::RatioAtLeast(0.9);

/// What one size found.
struct Found {
    ours: Medians,
    nftables: Medians,
}

pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let rounds = options.rounds_or(ROUNDS);
    let sizes = match &options.services[..] {
        [] => &SIZES[..],
        chosen => chosen,
    };
    ensure!(sizes.is_sorted(), "numbers of services must ascend");
    let mut stand = Stand::start()?;
    let mut figures = Vec::new();
    let mut inside = Vec::new();
    for services in sizes.iter().copied() {
        let [ours, nft] = stand.serve(services)?;
        tell(format_args!(
            "  {} with {} endpoints: the agent served them after {:.1} s, nft after {:.1} s",
            counted(services),
            endpoint_count(services),
            ours.as_secs_f64(),
            nft.as_secs_f64()
        ));
        let (found, bare) = cluster_ips(&stand, services, rounds)?;
        let named = format!("{}, ClusterIP, {rounds} rounds", counted(services));
        let new = side_by_side(&named, &found);
        new.iter().for_each(Figure::tell);
        figures.extend(new);
        figures.extend(added(&named, &found, &bare));
        inside.push(found);
        if let Some(found) = node_ports(&stand, rounds)? {
            figures.extend(side_by_side(
                &format!(
                    "{}, NodePort from outside, {rounds} rounds",
                    counted(services)
                ),
                &found,
            ));
        } else {
            tell("  the agent serves no NodePort to hosts outside");
        }
    }
    if let ([few, .., many], [first, .., last]) = (sizes, &inside[..]) {
        figures.extend(flat([*few, *many], [first, last]));
    }
    Ok(figures)
}

/// From an endpoint to ClusterIPs; and with nothing in the way to endpoints.
fn cluster_ips(stand: &Stand, services: u32, rounds: u32) -> anyhow::Result<(Found, Medians)> {
    let [mut ours, mut nftables, mut bare] = [(); 3].map(|()| Rates::default());
    let targets = Place::cluster_ips(services);
    let direct = stand.bare.direct()?;
    for round in 0..=rounds {
        // The first one warms up.
        let run = |targets: &Targets, place: &Place, rates: &mut Rates| {
            let into = (round > 0).then_some(rates);
            targets.run(&place.client, CPU, &place.servers, into)
        };
        stand.forget()?;
        run(&targets, &stand.ours, &mut ours)?;
        run(&targets, &stand.nftables, &mut nftables)?;
        run(&direct, &stand.bare, &mut bare)?;
    }
    let found = Found {
        ours: ours.medians()?,
        nftables: nftables.medians()?,
    };
    Ok((found, bare.medians()?))
}

/// From a host outside to the node ports of the first service; nothing if the agent does not serve them.
fn node_ports(stand: &Stand, rounds: u32) -> anyhow::Result<Option<Found>> {
    let [our_targets, targets] = [&stand.ours, &stand.nftables].map(Place::node_ports);
    if !our_targets.are_served(&stand.outside)? {
        return Ok(None);
    }
    let [mut ours, mut nftables] = [(); 2].map(|()| Rates::default());
    for round in 0..=rounds {
        let run = |targets: &Targets, place: &Place, rates: &mut Rates| {
            let into = (round > 0).then_some(rates);
            targets.run(&stand.outside, CPU, &place.servers, into)
        };
        stand.forget()?;
        run(&our_targets, &stand.ours, &mut ours)?;
        run(&targets, &stand.nftables, &mut nftables)?;
    }
    Ok(Some(Found {
        ours: ours.medians()?,
        nftables: nftables.medians()?,
    }))
}

fn side_by_side(named: &str, found: &Found) -> Vec<Figure> {
    let Found { ours, nftables } = found;
    let figure = |what: &str, unit, of: fn(&Medians) -> f64, target| Figure {
        name: format!("{named}: {what} (other: nftables)"),
        unit,
        ours: of(ours),
        other: Some(of(nftables)),
        target: Some(target),
    };
    vec![
        figure(
            "new connections a second",
            "k/s",
            |it| it.connections / 1e3,
            NEW_LIMIT,
        ),
        figure("connect, p50", "us", |it| it.connect_p50_us, LATENCY_LIMIT),
        figure("connect, p99", "us", |it| it.connect_p99_us, LATENCY_LIMIT),
        figure(
            "datagrams of one flow a second",
            "k/s",
            |it| it.datagrams / 1e3,
            KNOWN_LIMIT,
        ),
        figure(
            "requests on one connection a second",
            "k/s",
            |it| it.requests / 1e3,
            KNOWN_LIMIT,
        ),
    ]
}

/// What either side adds to what a bare node takes.
fn added(named: &str, found: &Found, bare: &Medians) -> Vec<Figure> {
    let figure = |what: &str, of: fn(&Medians) -> f64| {
        let more = |it: &Medians| 1e6 / of(it) - 1e6 / of(bare);
        Figure {
            name: format!(
                "{named}: what is added to {what} of {:.2} us with nothing in the way (other: nftables)",
                1e6 / of(bare)
            ),
            unit: "us",
            ours: more(&found.ours),
            other: Some(more(&found.nftables)),
            target: None,
        }
    };
    vec![
        figure("a connection", |it| it.connections),
        figure("a datagram", |it| it.datagrams),
        figure("a request", |it| it.requests),
    ]
}

/// The most services against the fewest.
fn flat([few, many]: [u32; 2], [first, last]: [&Found; 2]) -> Vec<Figure> {
    let figure = |what: &str, of: fn(&Medians) -> f64, target| Figure {
        name: format!("{}: {what} (other: {})", counted(many), counted(few)),
        unit: "k/s",
        ours: of(&last.ours) / 1e3,
        other: Some(of(&first.ours) / 1e3),
        target: Some(target),
    };
    vec![
        figure("new connections a second", |it| it.connections, FLAT_LIMIT),
        figure(
            "datagrams of one flow a second",
            |it| it.datagrams,
            FLAT_LIMIT,
        ),
    ]
}
