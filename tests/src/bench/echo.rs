//! Cost of an echo answered in eBPF, compared with one answered by the namespace's network stack on the same veth pair,
//! and cost of the program itself, compared with a stateless program that sends the same reply.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_common::config::DatapathConfig;
use health_datapath::dump::Pinned;
use health_datapath::{Datapath, Hook};
use health_endpoint::health::HealthEndpoint;

use super::endpoint::{NODE, with_endpoint};
use super::parts::median;
use super::program_cost::ProgramCost;
use super::{Figure, Report, Target};
use crate::packet::{IPV4, IPV6, Ipv4, Ipv6, echo, echo4, ethernet, payload};
use crate::testrun::TestRun;

/// Echoes per run of `ping -f`.
const ECHOES: u32 = 300_000;
/// Runs per side, alternating between the sides.
const ROUNDS: u32 = 7;
/// Passes of the program per test run.
const PASSES: u32 = 1_000_000;
/// All runs use one CPU, so that none of them pays for waking another CPU.
const CPU: &str = "1";

/// Number of echoes that the stack may lose before a run is invalid. It loses some on a busy machine.
const STACK_LOSSES: u32 = 10;
/// How long `ping -f` waits for a reply before it sends the next echo, in milliseconds (ping(8)).
const FLOOD_PATIENCE_MS: f64 = 10.0;

const INSTANCE: &str = "bench-echo";
/// Limit for the cost of state: the stateful reply relative to the stateless one.
const STATE_RATIO: f64 = 4.3;

const EMPTY_CODE: u32 = 0;
const REDIRECT_CODE: u32 = 7;

pub(super) fn run() -> anyhow::Result<Report> {
    let (ebpf, stack) = ping_cycles()?;
    let mut figures = vec![Figure {
        name: "ping -f cycle, answered in eBPF (other: by the stack)".to_owned(),
        unit: "us",
        ours: ebpf,
        other: Some(stack),
        target: Some(Target::RatioAtMost(0.78)),
    }];
    let headline = ebpf / stack;
    figures.extend(program_figures()?);
    Ok(Report::new(figures, ROUNDS)?.with_last_ratio(headline))
}

/// Median time per `ping -f` cycle in microseconds: answered in eBPF, and by the namespace's stack.
fn ping_cycles() -> anyhow::Result<(f64, f64)> {
    with_endpoint(INSTANCE, alternate)
}

async fn alternate(
    endpoint: &HealthEndpoint,
    datapath: &mut Datapath,
    _: &Pinned,
) -> anyhow::Result<(f64, f64)> {
    let address = endpoint
        .ipv4()
        .context("the endpoint has no IPv4 address")?;
    let hooks = Hook::endpoint(endpoint.ifname(), endpoint.ifindex());
    let mut ebpf = Vec::new();
    let mut stack = Vec::new();
    for round in 0..=ROUNDS {
        datapath.attach(&hooks)?;
        let answered = flood(address, 0).context("answered in eBPF")?;
        datapath.attach(&[])?;
        let by_stack = flood(address, STACK_LOSSES).context("answered by the stack")?;
        // The first round warms up both sides.
        if round > 0 {
            ebpf.push(answered);
            stack.push(by_stack);
        }
    }
    Ok((median(ebpf)?, median(stack)?))
}

/// Runs `ping -f` once, with at most `tolerated` lost echoes. Returns the microseconds per cycle.
fn flood(address: Ipv4Addr, tolerated: u32) -> anyhow::Result<f64> {
    // Switching sides may lose a packet in flight.
    ping(address, &["-c", "3", "-i", "0.01"])?;
    let summary = ping(address, &["-f", "-c", &ECHOES.to_string()])?;
    let figures = || {
        let (_, received) = summary.split_once("transmitted, ")?;
        let received: u32 = received.split_once(" received")?.0.parse().ok()?;
        let millis: f64 = summary
            .rsplit_once("time ")?
            .1
            .strip_suffix("ms")?
            .parse()
            .ok()?;
        Some((ECHOES.saturating_sub(received), millis))
    };
    let (lost, millis) =
        figures().with_context(|| format!("cannot parse the output of ping: {summary}"))?;
    ensure!(lost <= tolerated, "ping lost packets: {summary}");
    // Losses must not count against the side that has them.
    let waited = f64::from(lost) * FLOOD_PATIENCE_MS;
    Ok((millis - waited) * 1_000.0 / f64::from(ECHOES))
}

/// Runs `ping` and returns its summary line.
fn ping(address: Ipv4Addr, flags: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("taskset")
        .args(["-c", CPU, "ping", "-q"])
        .args(flags)
        .arg(address.to_string())
        .output()
        .context("cannot run taskset and ping (Debian: util-linux, iputils-ping)")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let summary = text
        .lines()
        .find(|line| line.contains("packets transmitted"));
    Ok(summary.context("ping printed no summary")?.to_owned())
}

/// Cost of the program itself for IPv4 and IPv6, minus the cost of the same run with an empty program.
fn program_figures() -> anyhow::Result<Vec<Figure>> {
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
    const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    let health4 = Ipv4Addr::new(10, 244, 1, 7);
    let health6: Ipv6Addr = "fd00:10:244:1::7".parse()?;
    let ip4 = Ipv4::icmp(NODE, health4);
    let packet4 = ethernet(
        MAC,
        HOST_MAC,
        IPV4,
        &ip4.packet(&echo4(8, 0, 5, 6, &payload(56))),
    );
    let ip6 = Ipv6::icmp("fd00:30::1".parse()?, health6);
    let message6 = ip6.with_checksum(echo(128, 0, 5, 6, &payload(56)));
    let packet6 = ethernet(MAC, HOST_MAC, IPV6, &ip6.packet(&message6));

    let mut figures = Vec::new();
    for (family, packet, target) in [
        ("IPv4", packet4, Some(Target::RatioAtMost(STATE_RATIO))),
        ("IPv6", packet6, None),
    ] {
        let mut bed = TestRun::load_alone();
        bed.set_health_endpoint((health4, health6), MAC, HOST_MAC, DatapathConfig::default());
        let mut cost = ProgramCost::new(&bed, &[packet])?;
        let program = bed.program("to_endpoint");
        let (mut empty, mut stateless, mut full) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            empty.push(cost.measure_own("bench_empty", PASSES, EMPTY_CODE)?);
            stateless.push(cost.measure_own("bench_echo_stateless", PASSES, REDIRECT_CODE)?);
            full.push(cost.measure(&program, PASSES, REDIRECT_CODE)?);
        }
        let empty = median(empty)?;
        figures.push(Figure {
            name: format!("to_endpoint, {family}, known flow, net (other: without state)"),
            unit: "ns",
            ours: median(full)? - empty,
            other: Some(median(stateless)? - empty),
            target,
        });
        figures.push(Figure {
            name: format!("empty program behind the front, {family} (subtracted)"),
            unit: "ns",
            ours: empty,
            other: None,
            target: None,
        });
    }
    Ok(figures)
}
