//! Cost per TCP segment of the uplink's programs, measured by test runs.

use std::net::IpAddr;

use aya::programs::SchedClassifier;
use health_common::probe::Path;
use health_datapath::rtt_store::RttStore as _;

use super::settings;
use crate::bench::Figure;
use crate::bench::program_cost::{Floor, NetCosts, PACKETS, ProgramCost};
use crate::packet::{Tcp, timestamps};
use crate::testrun::{GO_ON, TestRun};

/// Runs of each program, alternating with the empty program.
const ROUNDS: u32 = 201;
/// Limit relative to a run of the empty program.
const RATIO: f64 = 1.8;
/// Data bytes per segment.
const DATA_LEN: u32 = 100;
const ACK: u8 = 0x10;

/// A connection of this host.
struct Connection {
    name: &'static str,
    local: &'static str,
    peer: &'static str,
    /// Whether its round-trip times are measured.
    is_followed: bool,
}

const CONNECTIONS: [Connection; 3] = [
    Connection {
        name: "to a peer by IPv4",
        local: "172.30.0.1",
        peer: "172.30.0.2",
        is_followed: true,
    },
    Connection {
        name: "to a peer by IPv6",
        local: "fd00:30::1",
        peer: "fd00:30::2",
        is_followed: true,
    },
    Connection {
        name: "to another host",
        local: "172.30.0.1",
        peer: "192.0.2.9",
        is_followed: false,
    },
];

/// Cost of passive round-trip measurement for segments that are not timed themselves. A connection has at most a
/// hundred timed segments per second.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut bed = TestRun::load_alone();
    bed.datapath.configure(settings())?;
    let rows = bed.datapath.rtt()?;
    for connection in CONNECTIONS.iter().filter(|known| known.is_followed) {
        rows.follow(connection.peer.parse()?, Path::Host)?;
    }
    let mut figures = Vec::new();
    for connection in &CONNECTIONS {
        for (what, program, is_outgoing, data_len) in [
            ("data", "to_netdev", true, DATA_LEN),
            ("acknowledgement", "to_netdev", true, 0),
            ("data", "from_netdev", false, DATA_LEN),
            ("acknowledgement", "from_netdev", false, 0),
        ] {
            let under_test = bed.program(program);
            let segments = |round| connection.segments(round, is_outgoing, data_len);
            let costs = net_costs(&bed, &under_test, segments)?;
            let what = format!("TCP {what} {} ({program})", connection.name);
            // In the first round, the connection is new to the programs.
            figures.push(costs.figure(&what, 1, Some(RATIO))?);
        }
    }
    Ok(figures)
}

/// Net cost of the segments of each round.
fn net_costs(
    bed: &TestRun,
    program: &SchedClassifier,
    segments: impl Fn(u32) -> anyhow::Result<Vec<Vec<u8>>>,
) -> anyhow::Result<NetCosts> {
    let mut cost = ProgramCost::new(bed, &segments(0)?)?;
    let mut costs = NetCosts::beside(Floor::Empty);
    for round in 0..=ROUNDS {
        cost.set_packets(&segments(round)?)?;
        costs.measure(&mut cost, program, PACKETS, GO_ON.cast_unsigned())?;
    }
    Ok(costs)
}

impl Connection {
    /// The segments of a round. Each round continues where the last one ended.
    fn segments(
        &self,
        round: u32,
        is_outgoing: bool,
        data_len: u32,
    ) -> anyhow::Result<Vec<Vec<u8>>> {
        let (local, peer): (IpAddr, IpAddr) = (self.local.parse()?, self.peer.parse()?);
        let (source, destination, ports) = match is_outgoing {
            true => (local, peer, (40_000, 443)),
            false => (peer, local, (443, 40_000)),
        };
        let first = round.wrapping_mul(PACKETS);
        Ok((0..PACKETS)
            .map(|number| {
                let segment = Tcp {
                    source: ports.0,
                    destination: ports.1,
                    sequence: first.wrapping_add(number).wrapping_mul(data_len),
                    acknowledgement: 1,
                    flags: ACK,
                    options: timestamps(round, round),
                    data: vec![0; data_len as usize],
                };
                segment.frame(source, destination)
            })
            .collect())
    }
}
