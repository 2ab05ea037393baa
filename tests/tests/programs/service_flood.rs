//! Floods from outside clients beside an endpoint's connections through services: which flows they evict.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Context as _;
use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use health_common::ct::{CtEntry, Timeouts, Tuple4, Tuple6};
use health_datapath::MapSizes;
use health_datapath::conntrack::{Family, Tables as _};
use health_datapath::dump::Flow;
use health_datapath::layout;
use health_datapath::services::{ServiceMapSizes, Target};
use health_net::clock;
use tests::testrun::{DROP, TestRun};
use tests::{PATIENCE, wait_for};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{ACK, RST, SYN, TCP, UDP, segment};
use crate::policy_packets::{BOTH, set_endpoint};
use crate::service_packets::{Hosts, NODE_PORT, Stand, at_uplink, backend, hosts, node_port};

/// Number of the endpoint's connections per IP version. Each has two entries.
const CONNECTIONS: u16 = 500;
/// Enough entries for those connections, and few more.
const FLOWS: u32 = 2_048;
/// Packets in a flood, many times the capacity.
const PACKETS: u32 = 8_000;
/// Number of connections that never get beyond the SYN.
const UNANSWERED: u16 = 50;
/// The endpoint's first port. Its connections use consecutive ports from here on; the last ones stay unanswered.
const FIRST: u16 = 20_000;

fn sizes(flows: u32) -> MapSizes {
    MapSizes {
        services: Some(ServiceMapSizes {
            flows,
            flows_any: FLOWS,
            ..ServiceMapSizes::default()
        }),
        ..MapSizes::default()
    }
}

/// The spoofed source of the packet with this index.
fn pretended(number: u32, hosts: &Hosts) -> IpAddr {
    match hosts.node {
        IpAddr::V4(_) => Ipv4Addr::from_bits(0xc612_0000 + number).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits((0x2001_0db8 << 96) + u128::from(number)).into(),
    }
}

/// Sends a flood. Returns how many packets were dropped.
fn flood(stand: &Stand, hosts: &Hosts, protocol: u8) -> u32 {
    let mut dropped = 0;
    for number in 0..PACKETS {
        let source = (pretended(number, hosts), 4000);
        let packet = at_uplink(source, (hosts.node, NODE_PORT), protocol);
        let outcome = stand.run.run("from_netdev", &packet);
        dropped += u32::from(outcome.bytes == packet);
    }
    dropped
}

/// Sends a SYN from the endpoint to the service. Returns whether there was space to track the connection.
fn begin(stand: &Stand, hosts: &Hosts, port: u16) -> bool {
    let packet = segment(Out, hosts.node, (port, NODE_PORT), SYN);
    stand.run.run(Out.program(), &packet).bytes != packet
}

/// Completes the handshake.
fn complete(stand: &Stand, hosts: &Hosts, port: u16) {
    let answer = segment(In, hosts.elsewhere, (8080, port), SYN | ACK);
    assert_ne!(stand.run.run(In.program(), &answer).bytes, answer);
    let last = segment(Out, hosts.node, (port, NODE_PORT), ACK);
    assert_ne!(stand.run.run(Out.program(), &last).bytes, last);
}

/// Ports of the endpoint's connections whose backend is still in the map.
fn left(stand: &Stand, hosts: &Hosts) -> Vec<u16> {
    let to = SocketAddr::new(hosts.elsewhere, 8080);
    let of_endpoint = stand.all_flows().into_iter().filter(|(flow, value)| {
        flow.protocol == TCP && flow.source == hosts.endpoint && value.to == to
    });
    of_endpoint.map(|(flow, _)| flow.source_port).collect()
}

/// The keys in the ring of service flows.
fn ring(stand: &Stand, hosts: &Hosts) -> anyhow::Result<BTreeSet<Flow>> {
    let ring = match hosts.node {
        IpAddr::V4(_) => layout::REVNAT4_RING,
        IpAddr::V6(_) => layout::REVNAT6_RING,
    };
    let maps = stand.run.maps();
    let mut keys = BTreeSet::new();
    let rows = maps.ring_rows(ring.name)?.context("no such ring")?;
    rows.each(|(_, flow)| {
        if flow.protocol == TCP {
            keys.insert(flow);
        }
    })?;
    Ok(keys)
}

#[test]
#[ignore = "needs root"]
fn a_connection_that_has_room_for_half_of_itself_takes_no_others_place() -> anyhow::Result<()> {
    for hosts in hosts() {
        // There is space for one more entry.
        let room = 2 * u32::from(CONNECTIONS) + 1;
        let mut stand = Stand::of(TestRun::load_sized(sizes(room)));
        stand.serve(&[node_port(TCP, hosts.node, Some(hosts.elsewhere))]);
        for port in FIRST..FIRST + CONNECTIONS {
            assert!(begin(&stand, &hosts, port));
            complete(&stand, &hosts, port);
        }
        let next = FIRST + CONNECTIONS;
        let begun = (next..next + 100).filter(|port| begin(&stand, &hosts, *port));
        println!("{} of 100 connections found room", begun.count());
        let noted = ring(&stand, &hosts)?;
        let flows = stand.all_flows();
        let is_noted = flows.iter().filter(|(flow, _)| noted.contains(flow));
        assert_eq!((is_noted.count(), flows.len() % 2), (flows.len(), 0));
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_conntrack_has_evicted_is_collected_from_a_full_map() -> anyhow::Result<()> {
    for hosts in hosts() {
        let mut stand = Stand::of(TestRun::load_sized(sizes(2 * u32::from(CONNECTIONS))));
        stand.configure(Timeouts {
            tcp_syn: 1,
            ..Timeouts::default()
        });
        stand.serve(&[node_port(TCP, hosts.node, Some(hosts.elsewhere))]);
        for port in FIRST..FIRST + CONNECTIONS {
            assert!(begin(&stand, &hosts, port));
            complete(&stand, &hosts, port);
        }
        let (family, conntrack) = match hosts.node {
            IpAddr::V4(_) => (Family::Ipv4, layout::CT4),
            IpAddr::V6(_) => (Family::Ipv6, layout::CT6),
        };
        evict_all(&stand, conntrack.name)?;
        // One of the connections sends a segment.
        let segment = segment(Out, hosts.node, (FIRST, NODE_PORT), ACK);
        assert_ne!(stand.run.run(Out.program(), &segment).bytes, segment);
        // All flows must be old enough that none has a packet on its way to conntrack.
        let newest = stand
            .all_flows()
            .iter()
            .map(|(_, value)| value.expires)
            .max();
        wait_for("the flows to be old enough", PATIENCE, || {
            Ok((newest <= Some(clock::coarse_now_secs())).then_some(()))
        })?;
        stand.run.datapath.tables()?.collect(family)?;
        assert_eq!(left(&stand, &hosts), [FIRST]);
        assert_eq!(stand.all_flows().len(), 2);
    }
    Ok(())
}

/// Removes all entries of the conntrack map with this name.
fn evict_all(stand: &Stand, name: &str) -> anyhow::Result<()> {
    let map = MapData::from_pin(stand.run.location.pins().join(name))?;
    match name == layout::CT4.name {
        true => remove_all::<Tuple4>(map),
        false => remove_all::<Tuple6>(map),
    }
}

fn remove_all<K: Pod>(map: MapData) -> anyhow::Result<()> {
    let mut map: HashMap<_, K, CtEntry> = HashMap::try_from(Map::from_map_data(map)?)?;
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    keys.iter().try_for_each(|key| Ok(map.remove(key)?))
}

#[test]
#[ignore = "needs root"]
fn no_flood_evicts_a_connection_and_unanswered_syns_evict_each_other() {
    for hosts in hosts() {
        let mut stand = Stand::of(TestRun::load_sized(sizes(FLOWS)));
        let ports = [TCP, UDP].map(|protocol| {
            let mut port = node_port(protocol, hosts.node, Some(hosts.elsewhere));
            port.frontends[0].outside = Target::Local;
            port.local = vec![backend(hosts.endpoint)];
            port
        });
        stand.serve(&ports);
        for port in FIRST..FIRST + CONNECTIONS {
            assert!(begin(&stand, &hosts, port));
        }
        // Completes all handshakes except the last few.
        for port in FIRST..FIRST + CONNECTIONS - UNANSWERED {
            complete(&stand, &hosts, port);
        }
        assert_eq!(left(&stand, &hosts).len(), usize::from(CONNECTIONS));
        assert_eq!(flood(&stand, &hosts, UDP), 0);
        assert_eq!(left(&stand, &hosts).len(), usize::from(CONNECTIONS));
        // Finding a victim is slow while the clock hand passes connections.
        let dropped = flood(&stand, &hosts, TCP);
        println!("{dropped} of {PACKETS} SYNs were dropped");
        assert!(dropped < PACKETS / 4, "{dropped}");
        let left = left(&stand, &hosts);
        println!("{} of {CONNECTIONS} connections are left", left.len());
        let (answered, others): (Vec<_>, Vec<_>) = left
            .into_iter()
            .partition(|&port| port < FIRST + CONNECTIONS - UNANSWERED);
        assert_eq!(answered.len(), usize::from(CONNECTIONS - UNANSWERED));
        assert_eq!(others, Vec::<u16>::new());
    }
}

#[test]
#[ignore = "needs root"]
fn syns_that_policy_refuses_take_the_room_of_one_flow() -> anyhow::Result<()> {
    for hosts in hosts() {
        let mut stand = Stand::of(TestRun::load_sized(sizes(FLOWS)));
        let mut port = node_port(TCP, hosts.node, Some(hosts.elsewhere));
        port.frontends[0].outside = Target::Local;
        port.local = vec![backend(hosts.endpoint)];
        stand.serve(&[port]);
        let connections = FLOWS as u16 / 2;
        for port in FIRST..FIRST + connections {
            assert!(begin(&stand, &hosts, port));
            complete(&stand, &hosts, port);
        }
        let mut next = FIRST + connections;
        wait_for("a new connection to find room", PATIENCE, || {
            next += 1;
            Ok(begin(&stand, &hosts, next).then_some(()))
        })?;
        complete(&stand, &hosts, next);
        let before = left(&stand, &hosts).len();

        // No rule in this table admits anyone.
        set_endpoint(&mut stand.run.datapath, BOTH, 77);
        let mut refused = 0;
        for number in 0..PACKETS {
            let source = (pretended(number, &hosts), 4000);
            let packet = at_uplink(source, (hosts.node, NODE_PORT), TCP);
            let sent_on = stand.run.run("from_netdev", &packet).bytes;
            if sent_on != packet {
                refused += u32::from(stand.run.run(In.program(), &sent_on).code == DROP);
            }
        }
        assert!(refused > PACKETS / 2, "{refused}");
        let after = left(&stand, &hosts).len();
        assert!(
            after + 2 >= before,
            "{after} of {before} connections are left"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_connection_that_is_opened_again_and_again_stands_in_the_ring_once() -> anyhow::Result<()> {
    for hosts in hosts() {
        let mut stand = Stand::of(TestRun::load_sized(sizes(FLOWS)));
        stand.serve(&[node_port(TCP, hosts.node, Some(hosts.elsewhere))]);
        for port in FIRST..FIRST + CONNECTIONS {
            assert!(begin(&stand, &hosts, port));
        }
        for _ in 0..FLOWS {
            assert!(begin(&stand, &hosts, FIRST - 1));
            let reset = segment(Out, hosts.node, (FIRST - 1, NODE_PORT), RST);
            stand.run.run(Out.program(), &reset);
        }
        let keys = ring(&stand, &hosts)?;
        assert_eq!(keys.len(), 2 * (usize::from(CONNECTIONS) + 1));
    }
    Ok(())
}
