//! Floods of packets that each start a flow, while TCP connections are open and idle.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use aya::TestRunOptions;
use aya::maps::{Array, Map, MapData};
use aya::programs::{SchedClassifier, TestRun as _};
use health_common::config::DatapathConfig;
use health_common::ct::{Tuple4, Tuple6};
use health_datapath::MapSizes;
use health_datapath::conntrack::KernelTables;
use health_datapath::conntrack::{Family, Tables as _};
use health_datapath::layout::{self, MapLayout};
use health_settings::MasqueradeSettings;

use super::script::{ACK, SYN};
use crate::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, echo, echo4, ethernet};
use crate::testrun::TestRun;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
const NODE4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const NODE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 1);
/// First addresses of the hosts that the endpoint connects to. The last two bytes hold the host's number.
const SERVER4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const SERVER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0);
/// Addresses that the flood comes from or goes to. The last two bytes vary.
const FLOODER4: Ipv4Addr = Ipv4Addr::new(198, 51, 0, 0);
const FLOODER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, 0);
/// The server port of idle connections. Flood packets use it only together with [`FLOOD_PORT`].
const IDLE_PORT: u16 = 443;
const FLOOD_PORT: u16 = 53;
const FIRST_PORT: u16 = 10_000;
const PORTS_OF_A_SERVER: u32 = 25_000;
/// Includes the source ports of all connections, so that masquerading keeps them.
const MASQUERADE_PORTS: &str = "10000-65535";
const IP_PROTOCOL_TCP: u8 = 6;
const IP_PROTOCOL_UDP: u8 = 17;
/// Time between two collections, which is also the minimum that an agent waits when a map is nearly full.
const COLLECTION: Duration = Duration::from_secs(10);
const NAP: Duration = Duration::from_millis(20);

/// Offsets of fields in a frame.
const IP_ID_AT: usize = 18;
const PORT4_AT: usize = 34;
const PORT6_AT: usize = 54;

/// Kinds of floods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloodKind {
    /// ICMP echo requests to the health endpoint.
    Echoes,
    /// UDP datagrams from all ports, both to an endpoint and from it to the outside.
    Datagrams,
    /// TCP SYNs from all ports to an endpoint, which are never answered.
    SynsIn,
    /// TCP SYNs from an endpoint to the outside.
    SynsOut,
    /// TCP segments to an endpoint, as if in the middle of connections, which do not exist.
    AcksIn,
}

/// The size of a flood.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// Number of packets sent.
    pub packets: u64,
    /// Duration of the flood.
    pub took: Duration,
}

/// Numbers of map entries of idle connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleEntries {
    /// Number of conntrack entries.
    pub flows: u64,
    /// Number of NAT entries, two per connection.
    pub translations: u64,
}

/// Loaded programs, and an endpoint with idle, masqueraded connections over both IPv4 and IPv6.
pub struct IdleBed {
    run: TestRun,
    tables: KernelTables,
}

impl IdleBed {
    /// Opens this many connections per IP version.
    pub fn new(sizes: MapSizes, connections: u32) -> anyhow::Result<Self> {
        let mut run = TestRun::load_sized(sizes);
        let endpoint = (ENDPOINT4, ENDPOINT6);
        run.set_health_endpoint(endpoint, MAC, HOST_MAC, DatapathConfig::default());
        let masquerade = MasqueradeSettings {
            native_routing_cidrs: vec!["10.0.0.0/8".parse()?, "fd00::/8".parse()?],
            masquerade_excludes: Vec::new(),
            masquerade_ports: MASQUERADE_PORTS.parse()?,
            gateway_cidrs: Vec::new(),
        };
        let masquerade = masquerade.of_node(&[NODE4.into(), NODE6.into()], &[])?;
        run.datapath.set_masquerade(masquerade)?;
        let tables = run.datapath.tables()?;
        let bed = Self { run, tables };
        bed.open(0..connections)?;
        let connections = 2 * u64::from(connections);
        let expected = IdleEntries {
            flows: connections,
            translations: 2 * connections,
        };
        let entries = bed.idle()?;
        ensure!(entries == expected, "{entries:?}, not {expected:?}");
        Ok(bed)
    }

    /// Opens the connections with these numbers over each IP version. Fails if a program cannot be run.
    pub fn open(&self, connections: Range<u32>) -> anyhow::Result<()> {
        let out = ["from_endpoint", "to_netdev"].map(|name| self.run.program(name));
        let [from_netdev, to_endpoint] =
            ["from_netdev", "to_endpoint"].map(|name| self.run.program(name));
        for number in connections {
            for (own, node, first) in [
                (ENDPOINT4.into(), NODE4.into(), IpAddr::from(SERVER4)),
                (ENDPOINT6.into(), NODE6.into(), IpAddr::from(SERVER6)),
            ] {
                let server = nth(first, number / PORTS_OF_A_SERVER);
                let port = FIRST_PORT + (number % PORTS_OF_A_SERVER) as u16;
                let there = |flags| Tcp::between((port, IDLE_PORT), flags).frame(own, server);
                let back = |to| Tcp::between((IDLE_PORT, port), SYN | ACK).frame(server, to);
                for program in &out {
                    pass(program, &there(SYN))?;
                }
                pass(&from_netdev, &back(node))?;
                pass(&to_endpoint, &back(own))?;
                for program in &out {
                    pass(program, &there(ACK))?;
                }
            }
        }
        Ok(())
    }

    /// Counts the map entries of the idle connections.
    pub fn idle(&self) -> anyhow::Result<IdleEntries> {
        let maps = self.run.maps();
        let is_idle = |flow: &health_datapath::dump::Flow| {
            let ports = [flow.source_port, flow.destination_port];
            flow.protocol == IP_PROTOCOL_TCP
                && ports.contains(&IDLE_PORT)
                && !ports.contains(&FLOOD_PORT)
        };
        let flows = maps.conntrack()?;
        let translations = maps.nat()?;
        Ok(IdleEntries {
            flows: flows.iter().filter(|(flow, _)| is_idle(flow)).count() as u64,
            translations: translations
                .iter()
                .filter(|(flow, _)| is_idle(flow))
                .count() as u64,
        })
    }

    /// Number of connections in this range that conntrack knows, over both IP versions together. The range must belong
    /// to the first server.
    pub fn known(&self, connections: Range<u32>) -> anyhow::Result<usize> {
        ensure!(connections.end <= PORTS_OF_A_SERVER, "{connections:?}");
        let flows = self.run.maps().conntrack()?;
        let known = flows.iter().filter(|(flow, _)| {
            // If the SYN on the way out created no entry, the reply may have created one.
            let ports = [flow.source_port, flow.destination_port];
            let [own, other] = if flow.inbound {
                [ports[1], ports[0]]
            } else {
                ports
            };
            let number = u32::from(own).checked_sub(FIRST_PORT.into());
            other == IDLE_PORT && number.is_some_and(|number| connections.contains(&number))
        });
        Ok(known.count())
    }

    /// Runs the agent's collector over the tables once.
    pub fn collect(&self) -> anyhow::Result<()> {
        for family in Family::ALL {
            self.tables.collect(family)?;
        }
        Ok(())
    }

    /// Clears the keys in the rings of conntrack.
    pub fn forget_keys(&self) -> anyhow::Result<()> {
        let pins = self.run.location.pins();
        let ring =
            |layout: &MapLayout| Map::from_map_data(MapData::from_pin(pins.join(layout.name))?);
        let mut fours: Array<_, Tuple4> = ring(&layout::CT4_RING)?.try_into()?;
        let mut sixes: Array<_, Tuple6> = ring(&layout::CT6_RING)?.try_into()?;
        for place in 0..fours.len() {
            fours.set(place, Tuple4::default(), 0)?;
            sixes.set(place, Tuple6::default(), 0)?;
        }
        Ok(())
    }

    /// Number of distinct keys in the rings of conntrack.
    pub fn keys(&self) -> anyhow::Result<usize> {
        let maps = self.run.maps();
        let mut keys = BTreeSet::new();
        for ring in [layout::CT4_RING, layout::CT6_RING] {
            let rows = maps.ring_rows(ring.name)?.context("no such ring")?;
            rows.each(|(_, flow)| {
                if flow.protocol != 0 {
                    keys.insert(flow);
                }
            })?;
        }
        Ok(keys.len())
    }

    /// Number of conntrack entries for protocols other than TCP.
    pub fn others(&self) -> anyhow::Result<usize> {
        let flows = self.run.maps().conntrack()?;
        let others = flows
            .iter()
            .filter(|(flow, _)| flow.protocol != IP_PROTOCOL_TCP);
        Ok(others.count())
    }

    /// Floods from all CPUs until `is_over` returns true for the number of packets that one CPU has sent. Each packet
    /// belongs to a different flow than the ones before. Meanwhile, entries are collected.
    pub fn flood(
        &self,
        kinds: &[FloodKind],
        is_over: impl Fn(u64) -> bool + Sync,
    ) -> anyhow::Result<Flood> {
        let cpus = thread::available_parallelism()?.get() as u32;
        let is_done = AtomicBool::new(false);
        let begun = Instant::now();
        let sent = thread::scope(|scope| -> anyhow::Result<u64> {
            let collector = scope.spawn(|| collect_until(&self.tables, &is_done));
            let senders: Vec<_> = (0..cpus)
                .map(|cpu| {
                    let is_over = &is_over;
                    scope.spawn(move || self.send(kinds, cpu, cpus, is_over))
                })
                .collect();
            let sent: Vec<_> = senders
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            is_done.store(true, Ordering::Relaxed);
            collector.join().ok().context("the collector panicked")??;
            let sent = sent
                .into_iter()
                .map(|sent| sent.ok().context("a sender panicked")?);
            sent.sum()
        })?;
        Ok(Flood {
            packets: sent,
            took: begun.elapsed(),
        })
    }

    fn send(
        &self,
        kinds: &[FloodKind],
        cpu: u32,
        cpus: u32,
        is_over: &(impl Fn(u64) -> bool + Sync),
    ) -> anyhow::Result<u64> {
        let mut streams: Vec<Stream> = kinds.iter().flat_map(|kind| self.streams(*kind)).collect();
        let mut number = cpu;
        let mut sent = 0;
        while !is_over(sent) {
            for stream in &mut streams {
                stream.send(number)?;
                sent += 1;
            }
            number = number.wrapping_add(cpus);
        }
        Ok(sent)
    }

    fn streams(&self, kind: FloodKind) -> Vec<Stream> {
        let incoming = || vec![self.run.program("to_endpoint")];
        let outgoing = || {
            vec![
                self.run.program("from_endpoint"),
                self.run.program("to_netdev"),
            ]
        };
        let ends = [
            (IpAddr::from(FLOODER4), IpAddr::from(ENDPOINT4)),
            (IpAddr::from(FLOODER6), IpAddr::from(ENDPOINT6)),
        ];
        let mut streams = Vec::new();
        for (remote, own) in ends {
            if kind == FloodKind::Echoes {
                streams.push(Stream::new(
                    incoming(),
                    echo_frame(remote, own),
                    End::Source,
                    4,
                ));
                continue;
            }
            let is_udp = kind == FloodKind::Datagrams;
            let frame = |from, to| {
                if is_udp {
                    datagram(from, to)
                } else {
                    let flags = if kind == FloodKind::AcksIn { ACK } else { SYN };
                    Tcp::between((0, FLOOD_PORT), flags).frame(from, to)
                }
            };
            if is_udp || matches!(kind, FloodKind::SynsIn | FloodKind::AcksIn) {
                streams.push(Stream::new(incoming(), frame(remote, own), End::Source, 0));
            }
            if is_udp || kind == FloodKind::SynsOut {
                let frame = frame(own, remote);
                streams.push(Stream::new(outgoing(), frame, End::Destination, 0));
            }
        }
        streams
    }
}

/// The end of a packet that is the flooder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Source,
    Destination,
}

/// Packets that differ in a port or identifier and in the last two bytes of an address.
struct Stream {
    programs: Vec<SchedClassifier>,
    frame: Vec<u8>,
    /// Offsets of the low and the high half of the packet's number. The complement of each half is written at its
    /// second offset, if any, which leaves checksums unchanged.
    low_at: (usize, Option<usize>),
    high_at: (usize, Option<usize>),
}

impl Stream {
    /// Builds a stream whose packet number starts `port_at` bytes after the IP header.
    fn new(programs: Vec<SchedClassifier>, frame: Vec<u8>, flooder: End, port_at: usize) -> Self {
        let is_v4 = frame[12..14] == IPV4.to_be_bytes();
        let is_echo = port_at > 0;
        let (content_at, addresses_end) = if is_v4 {
            (PORT4_AT, [30, 34])
        } else {
            (PORT6_AT, [38, 54])
        };
        let low_at = content_at + port_at;
        let high_at = addresses_end[flooder as usize] - 2;
        // The identification field of IPv4, or the payload of an ICMPv6 echo.
        let balance = match (is_v4, is_echo) {
            (true, _) => Some(IP_ID_AT),
            (false, true) => Some(content_at + 8),
            (false, false) => None,
        };
        Self {
            programs,
            frame,
            low_at: (low_at, is_echo.then_some(low_at + 2)),
            high_at: (high_at, balance),
        }
    }

    fn send(&mut self, number: u32) -> anyhow::Result<()> {
        for ((at, balance_at), half) in [
            (self.low_at, number as u16),
            (self.high_at, (number >> 16) as u16),
        ] {
            self.frame[at..][..2].copy_from_slice(&half.to_be_bytes());
            if let Some(at) = balance_at {
                self.frame[at..][..2].copy_from_slice(&(!half).to_be_bytes());
            }
        }
        for program in &self.programs {
            pass(program, &self.frame)?;
        }
        Ok(())
    }
}

fn echo_frame(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let data = [0xff; 56];
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                id: 0xffff,
                ..Ipv4::icmp(source, destination)
            };
            let packet = ip.packet(&echo4(8, 0, 0, 0xffff, &data));
            ethernet(MAC, HOST_MAC, IPV4, &packet)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6::icmp(source, destination);
            let message = ip.with_checksum(echo(128, 0, 0, 0xffff, &data));
            ethernet(MAC, HOST_MAC, IPV6, &ip.packet(&message))
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// Builds a frame with a UDP datagram to [`FLOOD_PORT`], without a checksum.
fn datagram(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let [high, low] = FLOOD_PORT.to_be_bytes();
    let content = [0, 0, high, low, 0, 16, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                id: 0xffff,
                protocol: IP_PROTOCOL_UDP,
                ..Ipv4::icmp(source, destination)
            };
            ethernet(MAC, HOST_MAC, IPV4, &ip.packet(&content))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: IP_PROTOCOL_UDP,
                ..Ipv6::icmp(source, destination)
            };
            ethernet(MAC, HOST_MAC, IPV6, &ip.packet(&content))
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// Returns the address `number` after `first`.
fn nth(first: IpAddr, number: u32) -> IpAddr {
    match first {
        IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + number).into(),
        IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + u128::from(number)).into(),
    }
}

fn collect_until(tables: &KernelTables, is_done: &AtomicBool) -> anyhow::Result<()> {
    while !is_done.load(Ordering::Relaxed) {
        for family in Family::ALL {
            tables.collect(family)?;
        }
        let begun = Instant::now();
        while begun.elapsed() < COLLECTION && !is_done.load(Ordering::Relaxed) {
            thread::sleep(NAP);
        }
    }
    Ok(())
}

/// Runs a frame through a program and ignores the result.
fn pass(program: &SchedClassifier, frame: &[u8]) -> anyhow::Result<()> {
    let options = TestRunOptions {
        data_in: Some(frame),
        ..TestRunOptions::new()
    };
    program.test_run(options)?;
    Ok(())
}
