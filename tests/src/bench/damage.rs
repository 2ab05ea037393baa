//! Time until damage to the health endpoint is reported in its log, its state and health, and by `/healthz`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_common::identity;
use health_endpoint::log::{LogEntry, Status};
use health_model::api::{Endpoint, EndpointHealth};
use jiff::Timestamp;
use nix::sys::signal::{Signal, kill};

use super::requests::{get, quantile};
use super::{Figure, Report, Target};
use crate::liveness::liveness;
use crate::{Bed, Node, PATIENCE, wait_for};

const ROUNDS: u32 = 20;
/// The promised maximum delay.
const LIMIT: Duration = Duration::from_secs(2);
const PLACES: [&str; 4] = [
    "endpoint list",
    "endpoint health",
    "endpoint log",
    "/healthz",
];

pub(super) fn run() -> anyhow::Result<Report> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let namespace = format!("health-{}", node.name());
    let mut figures = Vec::new();
    // Damage that is repaired immediately, so the report is in the log.
    for (words, harm) in [
        ("lxc_health", "ip link delete lxc_health".to_owned()),
        (
            "health0",
            format!("ip netns exec {namespace} ip link set health0 down"),
        ),
        ("route", format!("ip route delete {}", node.health_ipv4()?)),
        ("namespace", format!("ip netns delete {namespace}")),
    ] {
        let mut reported = Vec::new();
        let mut again = Vec::new();
        for round in 0..ROUNDS {
            pause(round);
            let begun = Timestamp::now();
            node.exec(&harm)?;
            let (first, last) = wait_for("the repair", PATIENCE, || {
                let log = log(node)?;
                let mut since = log.iter().filter(|line| line.timestamp >= begun);
                let first = since
                    .by_ref()
                    .find(|line| line.status == Status::Failure && line.message.contains(words));
                let last = since.find(|line| line.message.starts_with("regenerated"));
                Ok(first.zip(last).map(|(a, b)| (a.timestamp, b.timestamp)))
            })?;
            let after = |at: Timestamp| at.duration_since(begun).unsigned_abs();
            reported.push(after(first));
            again.push(after(last));
        }
        figures.extend(of(&format!("`{harm}`: reported in its log"), reported)?);
        figures.extend(of(&format!("`{harm}`: recovery reported"), again)?);
    }
    // Another device that occupies the name until it is removed.
    let mut delays: [Vec<Duration>; PLACES.len()] = Default::default();
    for round in 0..ROUNDS {
        pause(round);
        for (place, delay) in delays.iter_mut().zip(foreign_device(node)?) {
            place.push(delay);
        }
    }
    for (place, delays) in PLACES.iter().zip(delays) {
        figures.extend(of(
            &format!("another device lxc_health: reported by {place}"),
            delays,
        )?);
    }
    Report::new(figures, ROUNDS)
}

/// Checks run at fixed intervals: the pause varies, so that damage happens at different points of the interval.
fn pause(round: u32) {
    std::thread::sleep(Duration::from_millis(500 + u64::from(round * 37 % 500)));
}

/// Replaces the health endpoint's device with a foreign one, and waits until each place reports the damage. Returns the
/// delays.
fn foreign_device(node: &Node) -> anyhow::Result<[Duration; PLACES.len()]> {
    let agent = node.agent_pid()?;
    // Otherwise the agent would recreate its own device first.
    kill(agent, Signal::SIGSTOP)?;
    let harmed = node
        .exec("ip link delete lxc_health")
        .and_then(|_| node.exec("ip link add lxc_health type veth peer name foreign0"));
    let begun = Instant::now();
    kill(agent, Signal::SIGCONT)?;
    harmed?;
    let mut delays = [None; PLACES.len()];
    let delays = wait_for("each place to report it", PATIENCE, || {
        for (delay, is_reported) in delays.iter_mut().zip(places(node)?) {
            if is_reported {
                delay.get_or_insert_with(|| begun.elapsed());
            }
        }
        let all: Option<Vec<Duration>> = delays.iter().copied().collect();
        Ok(all)
    })?;
    node.exec("ip link delete lxc_health")?;
    wait_for("all problems to be gone", PATIENCE, || {
        Ok((places(node)? == [false; PLACES.len()]).then_some(()))
    })?;
    Ok(std::array::from_fn(|place| delays[place]))
}

/// Whether each place reports a problem.
fn places(node: &Node) -> anyhow::Result<[bool; PLACES.len()]> {
    let endpoint = endpoint(node)?;
    let health = get(
        &node.socket(),
        &format!("/v1/endpoints/{}/healthz", endpoint.id),
    )?;
    let health: EndpointHealth = serde_json::from_str(&health)?;
    let last = log(node)?;
    let last = last
        .iter()
        .rfind(|line| line.status == Status::Failure || line.message.starts_with("regenerated"));
    let (_, liveness) = liveness(node)?;
    let problems = liveness.problems();
    Ok([
        endpoint.state != "ready",
        !health.connected,
        last.is_some_and(|line| line.status == Status::Failure),
        problems.iter().any(|problem| problem.check == "datapath"),
    ])
}

fn endpoint(node: &Node) -> anyhow::Result<Endpoint> {
    let all: Vec<Endpoint> = serde_json::from_str(&get(&node.socket(), "/v1/endpoints")?)?;
    let health = all.into_iter().find(|one| one.identity == identity::HEALTH);
    health.context("no health endpoint")
}

fn log(node: &Node) -> anyhow::Result<Vec<LogEntry>> {
    let id = endpoint(node)?.id;
    let log = get(&node.socket(), &format!("/v1/endpoints/{id}/log"))?;
    Ok(serde_json::from_str(&log)?)
}

fn of(what: &str, mut delays: Vec<Duration>) -> anyhow::Result<Vec<Figure>> {
    delays.sort_unstable();
    ensure!(!delays.is_empty(), "{what} was never measured");
    let limit = LIMIT.as_secs_f64() * 1e3;
    let parts = [
        ("p50", 0.5, None),
        ("max", 1.0, Some(Target::RatioAtMost(1.0))),
    ];
    let figures = parts.map(|(part, share, target)| {
        let figure = Figure {
            name: format!("{what}, {part} (other: promised)"),
            unit: "ms",
            ours: quantile(&delays, share)?.as_secs_f64() * 1e3,
            other: Some(limit),
            target,
        };
        figure.print();
        anyhow::Ok(figure)
    });
    figures.into_iter().collect()
}
