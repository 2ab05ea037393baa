//! Packets of endpoints to services, with tables written as the agent does.

use std::net::{IpAddr, SocketAddr};

use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::metrics::Reason;
use health_common::service::{ALGORITHM_RANDOM, KIND_NODE_PORT};
use health_datapath::services::{
    BackendSpec, FillMaglev, FrontendSpec, MaglevBackend, PortSpec, Target,
};
use tests::packet::Tcp;
use tests::testrun::{GO_ON, REDIRECT, TestRun};

use crate::endpoint_packets::Way::Out;
use crate::endpoint_packets::{SYN, UDP, frame, segment, with_ports};
use crate::policy_packets::set_endpoint;

const TCP: u8 = 6;
const NODE_PORT: u16 = 30_080;

/// No service here wants a table.
struct NoTables;

impl FillMaglev for NoTables {
    fn size(&self) -> u32 {
        1
    }

    fn fill(&mut self, _: &[MaglevBackend], _: &mut [u32]) {}
}

fn node_port(protocol: u8, ip: IpAddr) -> PortSpec {
    let backend = if ip.is_ipv4() {
        "10.244.1.77"
    } else {
        "fd00:10:244:1::77"
    };
    PortSpec {
        protocol,
        frontends: vec![FrontendSpec {
            address: SocketAddr::new(ip, NODE_PORT),
            kind: KIND_NODE_PORT,
            flags: 0,
            inside: Target::Cluster,
            outside: Target::Cluster,
        }],
        cluster: vec![BackendSpec {
            address: SocketAddr::new(backend.parse().expect("an address"), 8080),
            weight: 1,
        }],
        algorithm: ALGORITHM_RANDOM,
        ..PortSpec::default()
    }
}

/// With services, and an endpoint.
fn served() -> TestRun {
    let mut run = TestRun::load();
    let config = DatapathConfig {
        layout_version: LAYOUT_VERSION,
        flags: SERVICES,
        ..DatapathConfig::default()
    };
    run.datapath.configure(config).expect("the settings");
    set_endpoint(&mut run.datapath, 0, 0);
    run
}

#[test]
#[ignore = "needs root"]
fn no_packet_to_the_loopback_is_for_a_node_port() {
    let run = served();
    let mut tables = run.datapath.services().expect("the tables");
    let places = [
        ("172.30.0.1", true),
        ("127.0.0.1", false),
        ("fd00:30::1", true),
        ("::1", false),
    ];
    let places =
        places.map(|(ip, is_served)| (ip.parse::<IpAddr>().expect("an address"), is_served));
    let mut change = tables.change(1);
    for (ip, _) in places {
        for protocol in [TCP, UDP] {
            let spec = node_port(protocol, ip);
            change
                .set(None, &spec, &mut NoTables)
                .expect("room for a port");
        }
    }
    change.commit().expect("the tables are written");
    for (ip, is_served) in places {
        let packets = [
            segment(Out, ip, (4000, NODE_PORT), SYN),
            frame(Out, ip, UDP, &with_ports(4000, NODE_PORT)),
        ];
        for packet in packets {
            let outcome = run.run(Out.program(), &packet);
            let is_sent_on = outcome.bytes != packet;
            assert_eq!(is_sent_on, is_served, "{ip}: {}", outcome.code);
            assert!(is_sent_on || outcome.code == GO_ON, "{ip}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_rejected_packet_is_counted_once() {
    let run = served();
    let mut tables = run.datapath.services().expect("the tables");
    let mut change = tables.change(1);
    let clients = [("172.30.0.1", "192.0.2.9"), ("fd00:30::1", "2001:db8::9")];
    let clients = clients.map(|(ip, client)| {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        (address(ip), address(client))
    });
    for (ip, _) in clients {
        let mut spec = node_port(TCP, ip);
        spec.cluster.clear();
        for frontend in &mut spec.frontends {
            (frontend.inside, frontend.outside) = (Target::Reject, Target::Reject);
        }
        change
            .set(None, &spec, &mut NoTables)
            .expect("room for a port");
    }
    change.commit().expect("the tables are written");
    let counts = || {
        let rows = run.maps().metrics().expect("the counters");
        let rows = rows.into_iter().filter(|row| row.packets > 0);
        rows.map(|row| (row.reason, row.packets))
            .collect::<Vec<_>>()
    };
    assert_eq!(counts(), []);
    let ports = (4000, NODE_PORT);
    let packets = clients.iter().flat_map(|&(ip, client)| {
        [
            (Out.program(), segment(Out, ip, ports, SYN)),
            ("to_service", Tcp::between(ports, SYN).frame(client, ip)),
        ]
    });
    for (sent, (program, packet)) in (1..).zip(packets) {
        let outcome = run.run(program, &packet);
        assert_eq!(outcome.code, REDIRECT, "{program}: {packet:x?}");
        let rejected = Reason::ServiceRejected as u8;
        assert_eq!(counts(), [(rejected, sent)], "{program}: {packet:x?}");
    }
}
