//! Floods from clients outside beside connections of an endpoint through services: which flows they evict.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use health_datapath::MapSizes;
use health_datapath::services::{ServiceMapSizes, Target};
use tests::testrun::TestRun;

use crate::endpoint_packets::Way::Out;
use crate::endpoint_packets::{ACK, SYN, TCP, UDP, segment};
use crate::service_packets::{Hosts, NODE_PORT, Stand, at_uplink, backend, hosts, node_port};

/// Of the endpoint, by each IP version. Each has two entries.
const CONNECTIONS: u16 = 500;
/// There is room for those, and not many more.
const FLOWS: u32 = 2_048;
/// Packets of a flood, many times what there is room for.
const PACKETS: u32 = 8_000;
/// After so many, a connection that is not idle sends a segment.
const BETWEEN: u32 = 20;
/// From this port on, the endpoint opens connections. The first one is not idle.
const FIRST: u16 = 20_000;

fn sizes() -> MapSizes {
    MapSizes {
        services: Some(ServiceMapSizes {
            flows: FLOWS,
            flows_any: FLOWS,
            ..ServiceMapSizes::default()
        }),
        ..MapSizes::default()
    }
}

/// Whoever pretends to send the packet with this number.
fn pretended(number: u32, hosts: &Hosts) -> IpAddr {
    match hosts.node {
        IpAddr::V4(_) => Ipv4Addr::from_bits(0xc612_0000 + number).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits((0x2001_0db8 << 96) + u128::from(number)).into(),
    }
}

fn flood(stand: &Stand, hosts: &Hosts, protocol: u8) {
    let busy = segment(Out, hosts.node, (FIRST, NODE_PORT), ACK);
    for number in 0..PACKETS {
        let source = (pretended(number, hosts), 4000);
        let packet = at_uplink(source, (hosts.node, NODE_PORT), protocol);
        let outcome = stand.run.run("from_netdev", &packet);
        assert_ne!(outcome.bytes, packet);
        if number % BETWEEN == 0 {
            stand.run.run(Out.program(), &busy);
        }
    }
}

/// What is left of the endpoint's connections: the ports of those that still know where their segments go.
fn left(stand: &Stand, hosts: &Hosts) -> Vec<u16> {
    let to = SocketAddr::new(hosts.elsewhere, 8080);
    let of_endpoint = stand.all_flows().into_iter().filter(|(flow, value)| {
        flow.protocol == TCP && flow.source == hosts.endpoint && value.to == to
    });
    of_endpoint.map(|(flow, _)| flow.source_port).collect()
}

#[test]
#[ignore = "needs root"]
fn datagrams_evict_no_connection_and_unanswered_syns_only_idle_ones() {
    for hosts in hosts() {
        let mut stand = Stand::of(TestRun::load_sized(sizes()));
        let ports = [TCP, UDP].map(|protocol| {
            let mut port = node_port(protocol, hosts.node, Some(hosts.elsewhere));
            port.frontends[0].outside = Target::Local;
            port.local = vec![backend(hosts.endpoint)];
            port
        });
        stand.serve(&ports);
        for port in FIRST..FIRST + CONNECTIONS {
            let packet = segment(Out, hosts.node, (port, NODE_PORT), SYN);
            assert_ne!(stand.run.run(Out.program(), &packet).bytes, packet);
        }
        assert_eq!(left(&stand, &hosts).len(), usize::from(CONNECTIONS));
        flood(&stand, &hosts, UDP);
        assert_eq!(left(&stand, &hosts).len(), usize::from(CONNECTIONS));
        flood(&stand, &hosts, TCP);
        let left = left(&stand, &hosts);
        println!("{} of {CONNECTIONS} connections are left", left.len());
        assert!(left.len() < usize::from(CONNECTIONS), "{}", left.len());
        assert!(left.contains(&FIRST), "{left:?}");
    }
}
