//! Connections, datagrams and requests through services, alternating between a node with the agent, a node with
//! kube-proxy's nftables rules and, if the kernel has IPVS, nodes that serve with it.

use std::iter;

use anyhow::{Context as _, ensure};
use health_model::settings::HostRouting;
use health_net::netns::NetNs;

use super::cluster::{counted, endpoint_count};
use super::stand::{AGENT_BY_IPVS, KUBE_PROXY_BY_IPVS, Place, Stand, cpu};
use super::traffic::{Medians, Rates, Targets, Traffic};
use crate::bench::{Figure, Options, Target};
use crate::process::print_line;

const ROUNDS: u32 = 8;
/// Numbers of services in ascending order.
const SIZES: [u32; 4] = [1, 1_000, 10_000, 50_000];
/// Limit for the rate of new connections relative to kube-proxy's.
const NEW_LIMIT: Target = Target::RatioAtLeast(1.5);
/// Limit for the rate of established traffic relative to kube-proxy's.
const KNOWN_LIMIT: Target = Target::RatioAtLeast(1.0);
/// Limit for the latency of new connections relative to kube-proxy's.
const LATENCY_LIMIT: Target = Target::RatioAtMost(1.0);
/// Limit for rates with the most services relative to those with the fewest.
const FLAT_LIMIT: Target = Target::RatioAtLeast(0.9);

/// Results for one number of services.
struct Found {
    ours: Medians,
    /// The medians of the other sides, by name.
    others: Vec<(&'static str, Medians)>,
}

pub(super) fn figures(options: &Options, routing: HostRouting) -> anyhow::Result<Vec<Figure>> {
    let rounds = options.rounds_or(ROUNDS);
    let sizes = match &options.services[..] {
        [] => &SIZES[..],
        chosen => chosen,
    };
    ensure!(sizes.is_sorted(), "numbers of services must ascend");
    let mut stand = Stand::start(routing)?;
    let mut figures = Vec::new();
    let mut inside = Vec::new();
    for services in sizes.iter().copied() {
        let [ours, nft] = stand.serve(services)?;
        print_line(format_args!(
            "  {} with {} endpoints: the agent served them after {:.1} s, nft after {:.1} s",
            counted(services),
            endpoint_count(services),
            ours.as_secs_f64(),
            nft.as_secs_f64()
        ));
        let (found, [bare, floor]) = cluster_ips(&stand, services, rounds)?;
        let named = format!(
            "{}, host routing by {routing}, ClusterIP, {rounds} rounds",
            counted(services)
        );
        let new = side_by_side(&named, &found);
        new.iter().for_each(Figure::print);
        figures.extend(new);
        figures.extend(added(&named, &found, &bare));
        figures.extend(least(&named, &found, &floor));
        inside.push((found.ours, bare));
        if let Some(found) = node_ports(&stand, rounds)? {
            figures.extend(side_by_side(
                &format!(
                    "{}, host routing by {routing}, NodePort from outside, {rounds} rounds",
                    counted(services)
                ),
                &found,
            ));
        } else {
            print_line("  the agent serves no NodePort to hosts outside");
        }
    }
    if let ([few, .., many], [first, .., last]) = (sizes, &inside[..]) {
        figures.extend(flat([*few, *many], [*first, *last]));
    }
    Ok(figures)
}

/// Traffic from an endpoint to ClusterIPs; and directly to endpoints on the bare node, and on the node that only
/// redirects.
fn cluster_ips(stand: &Stand, services: u32, rounds: u32) -> anyhow::Result<(Found, [Medians; 2])> {
    let others = stand.others().into_iter().map(|(_, place)| place);
    let served = iter::once(&stand.ours).chain(others);
    let mut sides: Vec<_> = served
        .map(|place| (place, Place::cluster_ips(services)))
        .collect();
    for place in [&stand.bare, &stand.floor.place] {
        sides.push((place, place.direct()?));
    }
    let mut medians = by_turns(stand, |place| &place.client, &sides, rounds)?;
    let floor = medians.pop().context("no redirecting node")?;
    let bare = medians.pop().context("no bare node")?;
    Ok((Found::new(stand, medians)?, [bare, floor]))
}

/// Traffic from an outside host to the NodePorts of the first service. Returns `None` if the agent does not serve them.
fn node_ports(stand: &Stand, rounds: u32) -> anyhow::Result<Option<Found>> {
    if !stand.ours.node_ports().are_served(&stand.outside)? {
        return Ok(None);
    }
    let others = stand.others().into_iter().map(|(_, place)| place);
    let served = iter::once(&stand.ours).chain(others);
    let sides: Vec<_> = served.map(|place| (place, place.node_ports())).collect();
    let medians = by_turns(stand, |_| &stand.outside, &sides, rounds)?;
    Found::new(stand, medians).map(Some)
}

/// Runs rounds in which the sides alternate.
fn by_turns<'a>(
    stand: &Stand,
    client: impl Fn(&'a Place) -> &'a NetNs,
    sides: &[(&'a Place, Targets)],
    rounds: u32,
) -> anyhow::Result<Vec<Medians>> {
    let empty = || sides.iter().map(|_| Rates::default()).collect::<Vec<_>>();
    let mut rates = empty();
    for round in 0..=rounds {
        stand.forget()?;
        // All sides do the same work right after each other, and each is first as often as last, so that other load on
        // the machine and leftovers of earlier traffic affect all sides alike.
        for what in Traffic::ALL {
            let mut order: Vec<_> = sides.iter().zip(&mut rates).collect();
            if round % 2 == 0 {
                order.reverse();
            }
            for ((place, targets), rates) in order {
                targets.run(what, client(place), cpu(), &place.servers, rates)?;
            }
        }
        if round == 0 {
            // The first round warms up.
            rates = empty();
        }
    }
    rates.into_iter().map(Rates::medians).collect()
}

impl Found {
    /// The medians of the agent's node must come first, followed by those of the other sides.
    fn new(stand: &Stand, medians: Vec<Medians>) -> anyhow::Result<Self> {
        let mut medians = medians.into_iter();
        let ours = medians.next().context("no node with the agent")?;
        let names = stand.others().into_iter().map(|(name, _)| name);
        Ok(Self {
            ours,
            others: names.zip(medians).collect(),
        })
    }

    fn of(&self, name: &str) -> Option<&Medians> {
        let found = self.others.iter().find(|(other, _)| *other == name);
        found.map(|(_, medians)| medians)
    }
}

/// Compares the agent's programs with each other side, and the agent's IPVS with kube-proxy's IPVS.
fn side_by_side(named: &str, found: &Found) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (other, medians) in &found.others {
        figures.extend(compare(named, &found.ours, other, medians));
    }
    if let [Some(ours), Some(theirs)] = [AGENT_BY_IPVS, KUBE_PROXY_BY_IPVS].map(|it| found.of(it)) {
        let named = format!("{named}, {AGENT_BY_IPVS}");
        let of_ipvs = compare(&named, ours, KUBE_PROXY_BY_IPVS, theirs).into_iter();
        // No target, since both run the same kernel code.
        figures.extend(of_ipvs.map(|figure| Figure {
            target: None,
            ..figure
        }));
    }
    figures
}

fn compare(named: &str, ours: &Medians, name: &str, other: &Medians) -> Vec<Figure> {
    let figure = |what: &str, unit, of: fn(&Medians) -> f64, target| Figure {
        name: format!("{named}: {what} (other: {name})"),
        unit,
        ours: of(ours),
        other: Some(of(other)),
        target: Some(target),
    };
    vec![
        figure(
            "new connections a second",
            "k/s",
            |it| it.connections / 1e3,
            NEW_LIMIT,
        ),
        figure(
            "SYNs a second, each of a new flow",
            "k/s",
            |it| it.flows / 1e3,
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

/// Selects one of the medians.
type Rate = fn(&Medians) -> f64;

/// The time that each side adds to that of a bare node.
fn added(named: &str, found: &Found, bare: &Medians) -> Vec<Figure> {
    const WHATS: [(&str, Rate); 4] = [
        ("a connection", |it| it.connections),
        ("a SYN of a new flow", |it| it.flows),
        ("a datagram", |it| it.datagrams),
        ("a request", |it| it.requests),
    ];
    let mut figures = Vec::new();
    for (name, other) in &found.others {
        for (what, of) in WHATS {
            let more = |it: &Medians| 1e6 / of(it) - 1e6 / of(bare);
            figures.push(Figure {
                name: format!(
                    "{named}: time added to {what} of {:.2} us on a bare node (other: {name})",
                    1e6 / of(bare)
                ),
                unit: "us",
                ours: more(&found.ours),
                other: Some(more(other)),
                target: None,
            });
        }
    }
    figures
}

/// The potential gain over each side: redirection only, without services, policy and conntrack.
fn least(named: &str, found: &Found, floor: &Medians) -> Vec<Figure> {
    let all = found.others.iter().map(|(name, other)| {
        let named = format!("{named}, redirection alone");
        compare(&named, floor, name, other)
    });
    all.flatten()
        .map(|figure| Figure {
            target: None,
            ..figure
        })
        .collect()
}

/// Compares results with the most and the fewest services. Each is relative to the bare node at that time, since
/// minutes lie between them.
fn flat([few, many]: [u32; 2], [first, last]: [(Medians, Medians); 2]) -> Vec<Figure> {
    let figure = |what: &str, of: Rate| {
        let part = |(ours, bare): &(Medians, Medians)| 100.0 * of(ours) / of(bare);
        Figure {
            name: format!(
                "{}: {what}, as a share of a bare node's (other: {})",
                counted(many),
                counted(few)
            ),
            unit: "%",
            ours: part(&last),
            other: Some(part(&first)),
            target: Some(FLAT_LIMIT),
        }
    };
    vec![
        figure("new connections", |it| it.connections),
        figure("SYNs, each of a new flow", |it| it.flows),
        figure("datagrams of one flow", |it| it.datagrams),
    ]
}
