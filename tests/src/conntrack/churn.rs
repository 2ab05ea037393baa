//! Churn of an endpoint's masqueraded connections: they are opened, closed and reopened on the same ports as fast as
//! the programs process their segments, while conntrack entries are collected continuously.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use aya::TestRunOptions;
use aya::maps::{HashMap, Map, MapData, MapError};
use aya::programs::{SchedClassifier, TestRun as _};
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, TUPLE_OUT, Timeouts, Tuple4};
use health_datapath::conntrack::KernelTables;
use health_datapath::conntrack::{Family, Tables as _};
use health_datapath::{MapSizes, layout};
use health_net::clock::now_ns;
use health_settings::MasqueradeSettings;

use super::script::{ACK, FIN, SYN};
use crate::packet::Tcp;
use crate::testrun::{GO_ON, TestRun};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
/// The first host that the endpoint connects to.
const SERVERS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const PORTS_OF_A_SERVER: u32 = 25_000;
const FIRST_PORT: u16 = 10_000;
/// The masquerade address.
const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
/// The masquerade ports. They exclude some of the connections' source ports, so that those connections get other ports.
const MASQUERADE_PORTS: &str = "20000-65535";
const IP_PROTOCOL_TCP: u8 = 6;
/// Fill level of the table in percent if all connections were open at once.
const FULL_PERCENT: u32 = 95;
/// Number of times that each connection is opened.
const OPENINGS: u32 = 3;
/// Lifetime of entries of open connections in seconds. Longer than one pass over a million connections.
const OPEN_SECS: u32 = 60;
/// Lifetime of entries of closed connections in seconds.
const CLOSED_SECS: u32 = 2;
const SECOND_NS: u64 = 1_000_000_000;
/// The minimum time that an entry lives after a segment: lifetimes are whole seconds.
const SHORTEST_NS: u64 = (CLOSED_SECS as u64 - 1) * SECOND_NS;
/// The time after which the entry of a closed connection has certainly expired.
const FORGOTTEN_NS: u64 = (CLOSED_SECS as u64 + 1) * SECOND_NS;

/// Offsets of addresses and ports in a frame with IPv4 and TCP.
const SOURCE_AT: usize = 26;
const DESTINATION_AT: usize = 30;
const SOURCE_PORT_AT: usize = 34;
const DESTINATION_PORT_AT: usize = 36;

/// The results of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChurnTotals {
    /// Number of opened connections, including reopened ones.
    pub opened: u64,
    /// Number of connections opened on the ports of a closed connection whose entry was still alive.
    pub reopened: u64,
    /// Number of segments that passed through the programs.
    pub segments: u64,
    /// Number of times that an entry was checked within its lifetime.
    pub looks: u64,
    /// Number of those checks in which the entry was missing or its packet counts did not match the connection's.
    pub wrong: u64,
    /// Number of segments of live connections that got a different port than earlier segments, or whose destination was
    /// not restored.
    pub moved: u64,
    /// Number of connections that got a port other than their own.
    pub translated: u64,
    /// Number of collections during the run.
    pub collections: u64,
    /// Number of entries that the collections removed.
    pub removed: u64,
    /// Maximum number of entries found by a collection, in percent of the table's size.
    pub fullest_percent: u64,
    /// Duration of the run.
    pub took: Duration,
}

/// Opens, closes and reopens this many connections.
pub fn churn(connections: u32) -> anyhow::Result<ChurnTotals> {
    let capacity = connections / FULL_PERCENT * 100 + 100;
    let mut bed = TestRun::load_sized(MapSizes {
        conntrack: capacity,
        nat: 2 * capacity,
        ..MapSizes::default()
    });
    let settings = DatapathConfig {
        timeouts: Timeouts {
            tcp_syn: OPEN_SECS,
            tcp_established: OPEN_SECS,
            tcp_close: CLOSED_SECS,
            ..Timeouts::default()
        },
        ..DatapathConfig::default()
    };
    bed.set_health_endpoint((ENDPOINT, ENDPOINT6), MAC, HOST_MAC, settings);
    let masquerade = MasqueradeSettings {
        native_routing_cidrs: vec!["10.0.0.0/8".parse()?],
        masquerade_excludes: Vec::new(),
        masquerade_ports: MASQUERADE_PORTS.parse()?,
        gateway_cidrs: Vec::new(),
    };
    bed.datapath
        .set_masquerade(masquerade.of_node(&[NODE.into()], &[])?)?;
    let tables = bed.datapath.tables()?;
    let mut endpoint = Endpoint::new(&bed)?;
    let start = Instant::now();
    let is_over = AtomicBool::new(false);
    let (collected, churned) = thread::scope(|scope| {
        let collector = scope.spawn(|| collect_until(&tables, &is_over));
        let churned = endpoint.churn(connections);
        is_over.store(true, Ordering::Relaxed);
        (collector.join(), churned)
    });
    churned?;
    let collected = collected.ok().context("the collector panicked")??;
    Ok(ChurnTotals {
        collections: collected.runs,
        removed: collected.removed,
        fullest_percent: collected.most * 100 / u64::from(capacity),
        took: start.elapsed(),
        ..endpoint.found
    })
}

#[derive(Default)]
struct Collections {
    runs: u64,
    removed: u64,
    /// Maximum number of entries that a single collection found.
    most: u64,
}

fn collect_until(tables: &KernelTables, is_over: &AtomicBool) -> anyhow::Result<Collections> {
    let mut collections = Collections::default();
    while !is_over.load(Ordering::Relaxed) {
        let flows = tables.collect(Family::Ipv4)?.flows;
        collections.runs += 1;
        collections.removed += flows.removed;
        collections.most = collections.most.max(flows.removed + flows.alive);
    }
    Ok(collections)
}

/// State of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Closed,
    Open,
    Used,
}

/// A connection, as its endpoints see it.
#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    stage: Stage,
    openings: u32,
    /// Time at which sending of the last segment started (`CLOCK_MONOTONIC`, in nanoseconds).
    last_ns: u64,
    /// Number of segments sent since the entry was created.
    sent: u64,
    received: u64,
    /// The masquerade port.
    port: u16,
}

impl Connection {
    /// The time until which the entry certainly exists: expiry is in whole seconds, rounded down.
    fn lives_until(&self) -> u64 {
        let seconds = match self.stage {
            Stage::Closed => CLOSED_SECS,
            Stage::Open | Stage::Used => OPEN_SECS,
        };
        self.last_ns + u64::from(seconds - 1) * SECOND_NS
    }
}

/// The programs on an endpoint's path to the outside and back, and the frames that pass through them.
struct Endpoint {
    from_endpoint: SchedClassifier,
    to_netdev: SchedClassifier,
    from_netdev: SchedClassifier,
    to_endpoint: SchedClassifier,
    flows: HashMap<MapData, Tuple4, CtEntry>,
    /// One frame per direction and combination of flags, in which addresses and ports are filled in. Checksums stay
    /// invalid, as neither conntrack nor masquerading verifies them.
    frames: [[Vec<u8>; 32]; 2],
    found: ChurnTotals,
}

impl Endpoint {
    fn new(bed: &TestRun) -> anyhow::Result<Self> {
        let pin = bed.location.pins().join(layout::CT4.name);
        let flows = Map::from_map_data(MapData::from_pin(pin)?)?;
        let frame = |flags: usize| {
            let segment = Tcp {
                flags: flags as u8,
                ..Tcp::default()
            };
            segment.frame(ENDPOINT.into(), SERVERS.into())
        };
        Ok(Self {
            from_endpoint: bed.program("from_endpoint"),
            to_netdev: bed.program("to_netdev"),
            from_netdev: bed.program("from_netdev"),
            to_endpoint: bed.program("to_endpoint"),
            flows: HashMap::try_from(flows)?,
            frames: std::array::from_fn(|_| std::array::from_fn(frame)),
            found: ChurnTotals::default(),
        })
    }

    /// Visits all connections repeatedly until each was opened [`OPENINGS`] times.
    fn churn(&mut self, connections: u32) -> anyhow::Result<()> {
        let mut all = vec![Connection::default(); connections as usize];
        let mut open = connections;
        while open > 0 {
            for (number, connection) in (0..).zip(&mut all) {
                let mut is_done = self.visit(number, connection)?;
                let is_closed = connection.stage == Stage::Closed && !is_done;
                if is_closed && !is_forgotten_first(number) {
                    is_done = self.visit(number, connection)?;
                }
                open -= u32::from(is_done);
            }
        }
        Ok(())
    }

    /// Advances a connection by one stage. Returns whether that was its last stage.
    fn visit(&mut self, number: u32, connection: &mut Connection) -> anyhow::Result<bool> {
        let is_new = connection.openings == 0;
        if connection.stage == Stage::Closed && !is_new {
            if connection.openings == OPENINGS {
                return Ok(false);
            }
            let age_ns = now_ns() - connection.last_ns;
            if is_forgotten_first(number) && age_ns < FORGOTTEN_NS {
                return Ok(false);
            }
        }
        let was_there = self.look(number, connection)?;
        let lives_until = if is_new { 0 } else { connection.lives_until() };
        connection.last_ns = now_ns();
        let (next, segments): (Stage, &[(bool, u8)]) = match connection.stage {
            Stage::Closed => {
                connection.openings += 1;
                self.found.opened += 1;
                self.found.reopened += u64::from(was_there);
                (Stage::Open, &[(true, SYN), (false, SYN | ACK), (true, ACK)])
            }
            Stage::Open => (Stage::Used, &[(true, ACK), (false, ACK)]),
            Stage::Used => (
                Stage::Closed,
                &[
                    (true, FIN | ACK),
                    (false, ACK),
                    (false, FIN | ACK),
                    (true, ACK),
                ],
            ),
        };
        for (place, &(is_sent, flags)) in segments.iter().enumerate() {
            // After its first segment, an entry that one of these segments created or closed is alive for a while.
            let is_alive_until = if place == 0 {
                lives_until
            } else {
                connection.last_ns + SHORTEST_NS
            };
            if is_sent {
                let port = self.send(number, flags)?;
                let must_stay = now_ns() < is_alive_until;
                self.found.moved += u64::from(must_stay && port != connection.port);
                connection.port = port;
                connection.sent += 1;
            } else {
                let is_given_back = self.receive(number, connection.port, flags)?;
                let must_stay = now_ns() < is_alive_until;
                self.found.moved += u64::from(must_stay && !is_given_back);
                connection.received += 1;
            }
        }
        if next == Stage::Open {
            let own = u16::from_be(tuple(number).sport_be);
            self.found.translated += u64::from(connection.port != own);
        }
        connection.stage = next;
        Ok(next == Stage::Closed && connection.openings == OPENINGS)
    }

    /// Checks the connection's entry and, if it is alive, adopts its counters. Returns whether it is alive.
    fn look(&mut self, number: u32, connection: &mut Connection) -> anyhow::Result<bool> {
        let entry = match self.flows.get(&tuple(number), 0) {
            Ok(entry) => Some(entry),
            Err(MapError::KeyNotFound) => None,
            Err(error) => return Err(error.into()),
        };
        let counted = entry.map(|entry| (entry.tx_packets, entry.rx_packets));
        let now = now_ns();
        if connection.openings > 0 && now < connection.lives_until() {
            self.found.looks += 1;
            self.found.wrong += u64::from(counted != Some((connection.sent, connection.received)));
        }
        // The next segment recreates an expired entry, whether or not the expired one is still in the map.
        let is_alive = entry.is_some_and(|entry| u64::from(entry.expires) * SECOND_NS > now);
        (connection.sent, connection.received) = match counted {
            Some(counted) if is_alive => counted,
            _ => (0, 0),
        };
        Ok(is_alive)
    }

    /// Sends a segment from the endpoint. Returns the source port with which it leaves the node.
    fn send(&mut self, number: u32, flags: u8) -> anyhow::Result<u16> {
        let key = tuple(number);
        let own = (key.saddr_be.to_ne_bytes(), key.sport_be.to_ne_bytes());
        let other = (key.daddr_be.to_ne_bytes(), key.dport_be.to_ne_bytes());
        let frame = filled(&mut self.frames[1][usize::from(flags)], own, other);
        pass(&self.from_endpoint, frame)?;
        let left = pass(&self.to_netdev, frame)?;
        self.found.segments += 1;
        ensure!(
            left[SOURCE_AT..][..4] == NODE.octets(),
            "a segment was not masqueraded"
        );
        let port = &left[SOURCE_PORT_AT..][..2];
        Ok(u16::from_be_bytes([port[0], port[1]]))
    }

    /// Sends a reply to this port of the node and on to the endpoint. Returns whether the endpoint's address and port
    /// were restored.
    fn receive(&mut self, number: u32, port: u16, flags: u8) -> anyhow::Result<bool> {
        let key = tuple(number);
        let own = (key.saddr_be.to_ne_bytes(), key.sport_be.to_ne_bytes());
        let other = (key.daddr_be.to_ne_bytes(), key.dport_be.to_ne_bytes());
        let outside = (NODE.octets(), port.to_be_bytes());
        let frame = filled(&mut self.frames[0][usize::from(flags)], other, outside);
        let came = pass(&self.from_netdev, frame)?;
        let frame = filled(frame, other, own);
        let is_given_back =
            came[DESTINATION_AT..][..4] == own.0 && came[DESTINATION_PORT_AT..][..2] == own.1;
        pass(&self.to_endpoint, frame)?;
        self.found.segments += 1;
        Ok(is_given_back)
    }
}

/// Fills in addresses and ports in network byte order.
fn filled(
    frame: &mut Vec<u8>,
    source: ([u8; 4], [u8; 2]),
    destination: ([u8; 4], [u8; 2]),
) -> &mut Vec<u8> {
    frame[SOURCE_AT..][..4].copy_from_slice(&source.0);
    frame[DESTINATION_AT..][..4].copy_from_slice(&destination.0);
    frame[SOURCE_PORT_AT..][..2].copy_from_slice(&source.1);
    frame[DESTINATION_PORT_AT..][..2].copy_from_slice(&destination.1);
    frame
}

/// Runs a frame through a program. Returns the resulting frame.
fn pass(program: &SchedClassifier, frame: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut out = vec![0; frame.len()];
    let options = TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut out),
        ..TestRunOptions::new()
    };
    let ran = program.test_run(options)?;
    ensure!(
        ran.return_value as i32 == GO_ON,
        "a segment did not pass: {}",
        ran.return_value
    );
    Ok(out)
}

/// Whether a connection is reopened only after its entry has expired. The others are reopened immediately.
fn is_forgotten_first(number: u32) -> bool {
    number.is_multiple_of(2)
}

/// The conntrack tuple of connection `number`.
fn tuple(number: u32) -> Tuple4 {
    Tuple4 {
        saddr_be: ENDPOINT.to_bits().to_be(),
        daddr_be: (SERVERS.to_bits() + number / PORTS_OF_A_SERVER).to_be(),
        sport_be: (FIRST_PORT + (number % PORTS_OF_A_SERVER) as u16).to_be(),
        dport_be: 443_u16.to_be(),
        protocol: IP_PROTOCOL_TCP,
        direction: TUPLE_OUT,
        pad: 0,
    }
}
