//! Cost per packet of the uplink's programs, measured by test runs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::ensure;
use health_common::probe::{DEFAULT_KEY, Path, ProbeId, ProbePayload};
use health_common::rtt::{ACCOUNT_SAMPLE, ALREADY_ANSWERED, AccountRequest, PROTOCOL_ICMP, RttKey};
use health_datapath::rtt_store::RttStore as _;

use super::{ICMP_ID, SESSION, median, settings};
use crate::bench::Figure;
use crate::bench::program_cost::{Floor, NetCosts, PACKETS, ProgramCost};
use crate::packet::{ARP, IPV4, IPV6, Ipv4, Ipv6, echo, echo4, ethernet, payload};
use crate::testrun::{GO_ON, TestRun, stamped, utc_ns};

/// Number of rounds, in which the programs alternate.
const ROUNDS: u16 = 151;
/// Passes per run for packets that change nothing in the maps.
const PASSES: u32 = 10_000;

/// Limit relative to a run that only reads the clock, which stamping and matching also do once.
const PROBE_RATIO: f64 = 1.2;
/// Limit relative to a run of the empty program.
const OTHER_RATIO: f64 = 0.35;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OWN4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const PEER4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 1);
const PEER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 2);
/// Turnaround time in the peer's replies.
const TURNROUND_NS: u64 = 5_000;

const OUT: &str = "to_netdev";
const IN: &str = "from_netdev";
const ACCOUNT: &str = "rtt_account";
/// Return values of the benchmarks' own programs and of the programs under test.
const EMPTY_CODE: u32 = 0;
const GO_ON_CODE: u32 = GO_ON.cast_unsigned();

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut bed = TestRun::load_alone();
    bed.datapath.configure(settings())?;
    let mut figures = Vec::new();
    for probe in [Probe::V4, Probe::V6] {
        figures.extend(probe_figures(&bed, probe)?);
    }
    figures.push(clock_figure(&bed)?);
    for (name, packet) in others() {
        for program in [OUT, IN] {
            figures.push(other_figure(&bed, program, name, &packet)?);
        }
    }
    Ok(figures)
}

#[derive(Clone, Copy)]
enum Probe {
    V4,
    V6,
}

impl Probe {
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    fn peer(self) -> IpAddr {
        match self {
            Self::V4 => PEER4.into(),
            Self::V6 => PEER6.into(),
        }
    }

    /// The requests of a round, with unique sequence numbers.
    fn requests(self, round: u16) -> Vec<Vec<u8>> {
        ids(round).map(|id| self.packet(true, id)).collect()
    }

    /// The replies to the requests of a round.
    fn replies(self, round: u16) -> Vec<Vec<u8>> {
        ids(round).map(|id| self.packet(false, id)).collect()
    }

    fn packet(self, is_request: bool, id: ProbeId) -> Vec<u8> {
        let mut payload = ProbePayload::new(DEFAULT_KEY, ICMP_ID, id, Path::Host, 0);
        if !is_request {
            payload.turnround_be = TURNROUND_NS.to_be();
        }
        let payload = payload.to_bytes();
        let (to, from) = match is_request {
            true => (PEER_MAC, MAC),
            false => (MAC, PEER_MAC),
        };
        match self {
            Self::V4 => {
                let (kind, ip) = match is_request {
                    true => (8, Ipv4::icmp(OWN4, PEER4)),
                    false => (0, Ipv4::icmp(PEER4, OWN4)),
                };
                let message = echo4(kind, 0, ICMP_ID, id.sequence, &payload);
                ethernet(to, from, IPV4, &ip.packet(&message))
            }
            Self::V6 => {
                let (kind, ip) = match is_request {
                    true => (128, Ipv6::icmp(OWN6, PEER6)),
                    false => (129, Ipv6::icmp(PEER6, OWN6)),
                };
                let message = ip.with_checksum(echo(kind, 0, ICMP_ID, id.sequence, &payload));
                ethernet(to, from, IPV6, &ip.packet(&message))
            }
        }
    }
}

fn ids(round: u16) -> impl Iterator<Item = ProbeId> {
    (0..).take(PACKETS as usize).map(move |sequence| ProbeId {
        session: SESSION,
        round,
        sequence,
    })
}

/// The agent's records of the replies in a round, each an [`AccountRequest`] in its memory layout.
fn accounts(key: RttKey, round: u16) -> Vec<Vec<u8>> {
    let account = |id: ProbeId| {
        let request = [
            &[0; 16][..],
            &key.peer.words_be.map(u32::to_ne_bytes).concat(),
            &[key.path, key.protocol, 0, 0],
            &ACCOUNT_SAMPLE.to_ne_bytes(),
            &[0; 8],
            &id.session.to_ne_bytes(),
            &id.round.to_ne_bytes(),
            &id.sequence.to_ne_bytes(),
        ]
        .concat();
        assert_eq!(request.len(), size_of::<AccountRequest>());
        request
    };
    ids(round).map(account).collect()
}

/// Cost of stamping, matching and recording probes. In each round, the first run stamps new probes, the second matches
/// the replies to them, and the last records their results, so that each pass finds the maps in the same state as with
/// real traffic.
fn probe_figures(bed: &TestRun, probe: Probe) -> anyhow::Result<Vec<Figure>> {
    let rows = bed.datapath.rtt()?;
    let key = RttKey {
        peer: probe.peer().into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    };
    rows.ensure(key)?;
    let (to_netdev, from_netdev) = (bed.program(OUT), bed.program(IN));
    let rtt_account = bed.program(ACCOUNT);
    let mut cost = ProgramCost::new(bed, &probe.requests(0))?;
    let [mut stamps, mut entries] = [(); 2].map(|()| NetCosts::beside(Floor::Clock));
    // Replies without a kernel timestamp, and replies with one, which the kernel adds on request.
    let mut matches = [(); 2].map(|()| NetCosts::beside(Floor::Clock));
    for round in 0..2 + 2 * ROUNDS {
        cost.set_packets(&probe.requests(round))?;
        stamps.measure(&mut cost, &to_netdev, PACKETS, GO_ON_CODE)?;
        cost.set_packets(&probe.replies(round))?;
        let is_stamped = round % 2 == 1;
        cost.set_context(is_stamped.then(|| stamped(utc_ns())));
        let kind = &mut matches[usize::from(is_stamped)];
        kind.measure(&mut cost, &from_netdev, PACKETS, GO_ON_CODE)?;
        cost.set_context(None);
        cost.set_packets(&accounts(key, round))?;
        entries.measure(&mut cost, &rtt_account, PACKETS, ALREADY_ANSWERED)?;
    }
    let samples = rows.row(key)?.map_or(0, |row| row.samples);
    let expected = u64::from(PACKETS) * u64::from(2 + 2 * ROUNDS);
    ensure!(
        samples == expected,
        "{samples} of {expected} probes were stamped, matched and entered"
    );
    let figure = |what: &str, program: &str, costs: NetCosts, warm_up, limit| {
        let family = probe.name();
        let what = format!("{what} an {family} probe ({program}), known flow, {PACKETS} in flight");
        costs.figure(&what, warm_up, limit)
    };
    let limit = Some(PROBE_RATIO);
    let [matches, stamped_matches] = matches;
    Ok(vec![
        figure("stamping", OUT, stamps, 2, limit)?,
        figure("matching", IN, matches, 1, limit)?,
        figure(
            "if the agent is notified, entering",
            ACCOUNT,
            entries,
            2,
            None,
        )?,
        figure("during a capture, matching", IN, stamped_matches, 1, None)?,
    ])
}

/// Cost of reading the clock, the only step that cannot be avoided.
fn clock_figure(bed: &TestRun) -> anyhow::Result<Figure> {
    let mut cost: ProgramCost = ProgramCost::new(bed, &Probe::V4.replies(0))?;
    let mut net = Vec::new();
    for _ in 0..ROUNDS {
        let floor = cost.measure_own("bench_empty", PASSES, EMPTY_CODE)?;
        net.push(cost.measure_own("bench_clock", PASSES, EMPTY_CODE)? - floor);
    }
    Ok(Figure {
        name: "one step of it: reading the clock, net".to_owned(),
        unit: "ns",
        ours: median(net)?,
        other: None,
        target: None,
    })
}

/// Packets that are not probes.
fn others() -> [(&'static str, Vec<u8>); 3] {
    const UDP: u8 = 17;
    let ipv4 = |protocol, payload: &[u8]| {
        let ip = Ipv4 {
            protocol,
            ..Ipv4::icmp(OWN4, PEER4)
        };
        ethernet(PEER_MAC, MAC, IPV4, &ip.packet(payload))
    };
    let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
    arp.extend([0; 20]);
    [
        ("UDP datagram", ipv4(UDP, &payload(60))),
        (
            "foreign ping",
            ipv4(1, &echo4(8, 0, ICMP_ID + 1, 1, &payload(56))),
        ),
        ("ARP request", ethernet([0xff; 6], MAC, ARP, &arp)),
    ]
}

fn other_figure(bed: &TestRun, program: &str, name: &str, packet: &[u8]) -> anyhow::Result<Figure> {
    let under_test = bed.program(program);
    let mut cost = ProgramCost::new(bed, &[packet.to_vec()])?;
    let mut costs = NetCosts::beside(Floor::Empty);
    for _ in 0..=ROUNDS {
        costs.measure(&mut cost, &under_test, PASSES, GO_ON_CODE)?;
    }
    let what = format!("another packet: {name} ({program})");
    costs.figure(&what, 1, Some(OTHER_RATIO))
}
