//! Cost of tracking an endpoint's packets in conntrack, measured by test runs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::ensure;
use aya::programs::SchedClassifier;
use health_common::config::DatapathConfig;

use crate::bench::Figure;
use crate::bench::parts::median;
use crate::bench::program_cost::{PACKETS, ProgramCost};
use crate::packet::{Tcp, timestamps};
use crate::testrun::{GO_ON, TestRun};

/// Number of rounds. Each uses new flows.
const ROUNDS: u16 = 101;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
const PEER4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);
const PEER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 2);
/// First source port. The alternating packets use consecutive ports.
const FIRST_PORT: u16 = 20_000;

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

const EMPTY: &str = "bench_empty";
const EMPTY_CODE: u32 = 0;
const GO_ON_CODE: u32 = GO_ON.cast_unsigned();

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (family, endpoint, peer) in [
        ("IPv4", ENDPOINT4.into(), PEER4.into()),
        ("IPv6", ENDPOINT6.into(), PEER6.into()),
    ] {
        figures.extend(family_figures(family, endpoint, peer)?);
    }
    Ok(figures)
}

/// Measures a SYN from the endpoint, the reply, and further segments, for [`PACKETS`] connections at once.
fn family_figures(family: &str, endpoint: IpAddr, peer: IpAddr) -> anyhow::Result<Vec<Figure>> {
    let mut bed = TestRun::load_alone();
    bed.set_health_endpoint(
        (ENDPOINT4, ENDPOINT6),
        MAC,
        HOST_MAC,
        DatapathConfig::default(),
    );
    let (out, back) = (bed.program("from_endpoint"), bed.program("to_endpoint"));
    let mut cost = ProgramCost::new(&bed, &sent(0, SYN, endpoint, peer))?;
    let [mut new, mut reply, mut established] = [const { Vec::new() }; 3];
    for round in 0..=ROUNDS {
        let opened = net(&mut cost, &out, &sent(round, SYN, endpoint, peer))?;
        let answered = net(
            &mut cost,
            &back,
            &returned(round, SYN | ACK, endpoint, peer),
        )?;
        let went_on = net(&mut cost, &out, &sent(round, ACK, endpoint, peer))?;
        // The first round warms up.
        if round > 0 {
            new.push(opened);
            reply.push(answered);
            established.push(went_on);
        }
    }
    let entries = bed.maps().conntrack()?.len();
    let expected = (usize::from(ROUNDS) + 1) * PACKETS as usize;
    // A map full of established connections rejects new ones at first.
    ensure!(
        entries <= expected && entries * 4 > 65_536.min(expected) * 3,
        "{entries} entries of {expected} connections"
    );
    [
        ("new", "from_endpoint", new),
        ("reply", "to_endpoint", reply),
        ("established", "from_endpoint", established),
    ]
    .into_iter()
    .map(|(what, program, times)| {
        Ok(Figure {
            name: format!("TCP segment by {family}, {what} ({program}), net"),
            unit: "ns",
            ours: median(times)?,
            other: None,
            target: None,
        })
    })
    .collect()
}

/// Nanoseconds per pass, minus the floor. Each pass handles one packet.
pub(super) fn net(
    cost: &mut ProgramCost,
    program: &SchedClassifier,
    packets: &[Vec<u8>],
) -> anyhow::Result<f64> {
    cost.set_packets(packets)?;
    let floor = cost.measure_own(EMPTY, PACKETS, EMPTY_CODE)?;
    Ok(cost.measure(program, PACKETS, GO_ON_CODE)? - floor)
}

fn sent(round: u16, flags: u8, endpoint: IpAddr, peer: IpAddr) -> Vec<Vec<u8>> {
    ports()
        .map(|port| segment(port, 443 + round, flags).frame(endpoint, peer))
        .collect()
}

fn returned(round: u16, flags: u8, endpoint: IpAddr, peer: IpAddr) -> Vec<Vec<u8>> {
    ports()
        .map(|port| segment(443 + round, port, flags).frame(peer, endpoint))
        .collect()
}

fn ports() -> impl Iterator<Item = u16> {
    (FIRST_PORT..).take(PACKETS as usize)
}

fn segment(source: u16, destination: u16, flags: u8) -> Tcp {
    Tcp {
        source,
        destination,
        flags,
        options: timestamps(7, 8),
        ..Tcp::default()
    }
}
