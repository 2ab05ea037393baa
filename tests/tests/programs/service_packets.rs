//! Packets to services from endpoints and from outside clients, with tables written the way the agent writes them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use health_common::config::{DatapathConfig, SERVICES};
use health_common::ct::tcp::TcpState;
use health_common::ct::{CtEntry, Timeouts};
use health_common::ipcache::IpcacheEntry;
use health_common::metrics::Reason;
use health_common::service::{ALGORITHM_RANDOM, KIND_CLUSTER_IP, KIND_NODE_PORT};
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::dump::{Flow, ServiceFlow};
use health_datapath::services::{
    BackendSpec, FillMaglev, FrontendSpec, MaglevBackend, PortSpec, ServiceTables, Target,
};
use health_net::clock::now_ns;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, ethernet};
use tests::testrun::{DROP, GO_ON, REDIRECT, TestRun};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{
    ACK, ENDPOINT4, ENDPOINT6, FIN, MORE_FRAGMENTS, RST, SYN, TCP, UDP, Way, frame, framed,
    segment, with_ports,
};
use crate::policy_packets::{BOTH, set_endpoint};

pub(crate) const NODE_PORT: u16 = 30_080;
pub(crate) const BACKEND_PORT: u16 = 8080;
const CLIENT_PORT: u16 = 4000;

/// Addresses of one IP version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hosts {
    pub(crate) node: IpAddr,
    pub(crate) gateway: IpAddr,
    pub(crate) endpoint: IpAddr,
    /// A host on another node.
    pub(crate) elsewhere: IpAddr,
    /// Outside the cluster.
    pub(crate) client: IpAddr,
    pub(crate) cluster_ip: IpAddr,
}

pub(crate) fn hosts() -> [Hosts; 2] {
    let of = |endpoint: IpAddr, texts: [&str; 5]| {
        let [node, gateway, elsewhere, client, cluster_ip] =
            texts.map(|text| text.parse().expect(text));
        Hosts {
            node,
            gateway,
            endpoint,
            elsewhere,
            client,
            cluster_ip,
        }
    };
    let v4 = [
        "172.30.0.1",
        "10.244.1.1",
        "10.244.2.77",
        "198.51.100.9",
        "10.96.0.1",
    ];
    let v6 = [
        "fd00:30::1",
        "fd00:10:244:1::1",
        "fd00:10:244:2::77",
        "2001:db8::9",
        "fd00:10:96::1",
    ];
    [of(ENDPOINT4.into(), v4), of(ENDPOINT6.into(), v6)]
}

/// Stands in for Maglev tables, which no service here needs.
struct NoTables;

impl FillMaglev for NoTables {
    fn size(&self) -> u32 {
        1
    }

    fn fill(&mut self, _: &[MaglevBackend], _: &mut [u32]) {}
}

/// A node with an endpoint and services.
pub(crate) struct Stand {
    pub(crate) run: TestRun,
    tables: ServiceTables,
}

impl Stand {
    pub(crate) fn new() -> Self {
        Self::of(TestRun::load())
    }

    pub(crate) fn of(mut run: TestRun) -> Self {
        set_endpoint(&mut run.datapath, 0, 0);
        let nodes = hosts().map(|hosts| {
            let entry = IpcacheEntry {
                identity: identity::HOST,
                ..IpcacheEntry::default()
            };
            (hosts.node.into(), entry)
        });
        let mut ipcache = run.datapath.ipcache().expect("the ipcache");
        ipcache
            .set_all(&BTreeMap::from(nodes))
            .expect("room for addresses");
        let tables = run.datapath.services().expect("the tables");
        let mut stand = Self { run, tables };
        stand.configure(Timeouts::default());
        stand
    }

    pub(crate) fn configure(&mut self, timeouts: Timeouts) {
        self.set_up(DatapathConfig {
            timeouts,
            ..DatapathConfig::default()
        });
    }

    /// Blocks new flows until this time (`CLOCK_MONOTONIC`, in nanoseconds).
    fn hold_flows(&mut self, until_ns: u64) {
        self.set_up(DatapathConfig {
            flows_held_until_ns: until_ns,
            ..DatapathConfig::default()
        });
    }

    fn set_up(&mut self, config: DatapathConfig) {
        let [v4, v6] = hosts();
        let config = DatapathConfig {
            layout_version: LAYOUT_VERSION,
            flags: SERVICES,
            gateway4: v4.gateway.into(),
            gateway6: v6.gateway.into(),
            ..config
        };
        self.run.datapath.configure(config).expect("the settings");
    }

    pub(crate) fn serve(&mut self, ports: &[PortSpec]) {
        let mut change = self.tables.change(1);
        for port in ports {
            change
                .set(None, port, &mut NoTables)
                .expect("room for a port");
        }
        change.commit().expect("the tables are written");
    }

    /// All flows through services.
    pub(crate) fn all_flows(&self) -> Vec<(Flow, ServiceFlow)> {
        let rows = self.run.maps().service_flow_rows().expect("the flows");
        let rows = rows.map(|rows| rows.collect().expect("the flows"));
        rows.into_iter().flatten().collect()
    }

    /// Flows of all protocols but TCP.
    fn flows(&self) -> Vec<(Flow, ServiceFlow)> {
        let mut flows = self.all_flows();
        flows.retain(|(flow, _)| flow.protocol != TCP);
        flows
    }
}

pub(crate) fn backend(ip: IpAddr) -> BackendSpec {
    BackendSpec {
        address: SocketAddr::new(ip, BACKEND_PORT),
        weight: 1,
    }
}

pub(crate) fn frontend(ip: IpAddr, kind: u8, target: Target) -> FrontendSpec {
    FrontendSpec {
        address: SocketAddr::new(ip, NODE_PORT),
        kind,
        flags: 0,
        inside: target,
        outside: target,
    }
}

/// A port with one backend, or none.
pub(crate) fn node_port(protocol: u8, ip: IpAddr, of: Option<IpAddr>) -> PortSpec {
    let target = match of {
        Some(_) => Target::Cluster,
        None => Target::Reject,
    };
    PortSpec {
        protocol,
        frontends: vec![frontend(ip, KIND_NODE_PORT, target)],
        cluster: of.map(backend).into_iter().collect(),
        algorithm: ALGORITHM_RANDOM,
        ..PortSpec::default()
    }
}

/// A packet arriving at the uplink that test runs use. For TCP, a SYN.
pub(crate) fn at_uplink(
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
    protocol: u8,
) -> Vec<u8> {
    match protocol {
        TCP => segment_at_uplink(source, destination, SYN),
        _ => frame_at_uplink(
            source.0,
            destination.0,
            protocol,
            &with_ports(source.1, destination.1),
        ),
    }
}

/// A TCP segment with these flags.
pub(crate) fn segment_at_uplink(
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
    flags: u8,
) -> Vec<u8> {
    let segment = Tcp::between((source.1, destination.1), flags).segment(source.0, destination.0);
    frame_at_uplink(source.0, destination.0, TCP, &segment)
}

pub(crate) fn frame_at_uplink(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    content: &[u8],
) -> Vec<u8> {
    let (ethertype, packet) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                protocol,
                ..Ipv4::icmp(source, destination)
            };
            (IPV4, ip.packet(content))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: protocol,
                ..Ipv6::icmp(source, destination)
            };
            (IPV6, ip.packet(content))
        }
        _ => unreachable!("both are of one IP version"),
    };
    ethernet([0; 6], [2, 0, 0, 0, 0, 2], ethertype, &packet)
}

#[test]
#[ignore = "needs root"]
fn no_packet_to_the_loopback_is_for_a_node_port() {
    let mut stand = Stand::new();
    let [v4, v6] = hosts();
    let places = [
        (v4, v4.node, true),
        (v4, Ipv4Addr::LOCALHOST.into(), false),
        (v6, v6.node, true),
        (v6, Ipv6Addr::LOCALHOST.into(), false),
    ];
    let ports = places.iter().flat_map(|(hosts, ip, _)| {
        [TCP, UDP].map(|protocol| node_port(protocol, *ip, Some(hosts.elsewhere)))
    });
    stand.serve(&ports.collect::<Vec<_>>());
    for (_, ip, is_served) in places {
        let packets = [
            segment(Out, ip, (CLIENT_PORT, NODE_PORT), SYN),
            frame(Out, ip, UDP, &with_ports(CLIENT_PORT, NODE_PORT)),
        ];
        for packet in packets {
            let outcome = stand.run.run(Out.program(), &packet);
            let is_sent_on = outcome.bytes != packet;
            assert_eq!(is_sent_on, is_served, "{ip}: {}", outcome.code);
            assert!(is_sent_on || outcome.code == GO_ON, "{ip}");
        }
    }
}

/// Ports of a flow: the client's, then the service's.
type Ports = (u16, u16);

/// Runs a client's packet, or its backend's reply, through the program that sees it.
type Exchange = fn(&Stand, &Hosts, Ports, is_answer: bool);

/// A case's name, its exchange, and its backend.
type Case = (&'static str, Exchange, fn(&Hosts) -> IpAddr);

fn of_endpoint(stand: &Stand, hosts: &Hosts, (client, port): Ports, is_answer: bool) {
    let (program, packet) = if is_answer {
        let content = with_ports(BACKEND_PORT, client);
        (In.program(), frame(In, hosts.elsewhere, UDP, &content))
    } else {
        let content = with_ports(client, port);
        (Out.program(), frame(Out, hosts.node, UDP, &content))
    };
    let outcome = stand.run.run(program, &packet);
    assert!(outcome.code == GO_ON && outcome.bytes != packet);
}

fn of_itself(stand: &Stand, hosts: &Hosts, (client, port): Ports, is_answer: bool) {
    let (to, content) = if is_answer {
        (hosts.gateway, with_ports(BACKEND_PORT, client))
    } else {
        (hosts.node, with_ports(client, port))
    };
    let packet = frame(Out, to, UDP, &content);
    let outcome = stand.run.run(Out.program(), &packet);
    assert!(outcome.code == REDIRECT && outcome.bytes != packet);
}

fn from_outside(stand: &Stand, hosts: &Hosts, (client, port): Ports, is_answer: bool) {
    let client = (hosts.client, client);
    let (program, packet) = if is_answer {
        let server = (hosts.endpoint, BACKEND_PORT);
        ("to_netdev", at_uplink(server, client, UDP))
    } else {
        let node = (hosts.node, port);
        ("from_netdev", at_uplink(client, node, UDP))
    };
    let outcome = stand.run.run(program, &packet);
    assert_ne!(outcome.bytes, packet);
}

#[test]
#[ignore = "needs root"]
fn datagrams_of_either_side_have_a_flow_last() {
    const SHORT: u32 = 100;
    const LONG: u32 = 10_000;
    let exchanges: [Case; 3] = [
        ("of an endpoint", of_endpoint, |hosts| hosts.elsewhere),
        ("of itself", of_itself, |hosts| hosts.endpoint),
        ("from outside", from_outside, |hosts| hosts.endpoint),
    ];
    let lasting = |udp: u32| Timeouts {
        udp,
        ..Timeouts::default()
    };
    let mut stand = Stand::new();
    let ports = exchanges.iter().zip(NODE_PORT..);
    let ports = ports.flat_map(|((_, _, backend), number)| {
        hosts().map(|hosts| {
            let mut port = node_port(UDP, hosts.node, Some(backend(&hosts)));
            port.frontends[0].address.set_port(number);
            port
        })
    });
    stand.serve(&ports.collect::<Vec<_>>());
    let mut client = CLIENT_PORT;
    for ((name, exchange, _), port) in exchanges.iter().zip(NODE_PORT..) {
        for hosts in hosts() {
            for is_answer in [false, true] {
                client += 1;
                stand.configure(lasting(SHORT));
                exchange(&stand, &hosts, (client, port), false);
                stand.configure(lasting(LONG));
                exchange(&stand, &hosts, (client, port), is_answer);
                let mut flows = stand.flows();
                flows.retain(|(flow, _)| {
                    [flow.source_port, flow.destination_port].contains(&client)
                });
                let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
                let least = now.tv_sec() as u32 + SHORT;
                let lasts = flows.iter().all(|(_, to)| to.expires > least);
                assert!(
                    flows.len() == 2 && lasts,
                    "{name}, {hosts:?}, answer: {is_answer}: {flows:?} at {least}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn flows_that_are_held_do_not_begin_and_known_ones_go_on() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let mut stand = Stand::new();
    let ports = hosts().into_iter().flat_map(|hosts| {
        [TCP, UDP].map(|protocol| node_port(protocol, hosts.node, Some(hosts.endpoint)))
    });
    stand.serve(&ports.collect::<Vec<_>>());
    let mut held = 0;
    for hosts in hosts() {
        for protocol in [TCP, UDP] {
            let inside = |port: u16| {
                let packet = match protocol {
                    TCP => segment(Out, hosts.node, (port, NODE_PORT), SYN),
                    _ => frame(Out, hosts.node, UDP, &with_ports(port, NODE_PORT)),
                };
                (Out.program(), packet)
            };
            let outside = |port: u16| {
                let client = (hosts.client, port);
                let packet = at_uplink(client, (hosts.node, NODE_PORT), protocol);
                ("from_netdev", packet)
            };
            let senders: [&dyn Fn(u16) -> (&'static str, Vec<u8>); 2] = [&inside, &outside];
            for packet_of in senders {
                let is_sent_on = |stand: &Stand, port: u16| {
                    let (program, packet) = packet_of(port);
                    let outcome = stand.run.run(program, &packet);
                    assert_eq!(outcome.code == DROP, outcome.bytes == packet);
                    outcome.bytes != packet
                };
                stand.hold_flows(0);
                assert!(is_sent_on(&stand, CLIENT_PORT));
                stand.hold_flows(now_ns() + HOUR_NS);
                assert!(is_sent_on(&stand, CLIENT_PORT));
                assert!(!is_sent_on(&stand, CLIENT_PORT + 1));
                held += 1;
                assert_eq!(stand.run.counted(Reason::FlowsHeld), held);
                // The process that blocked new flows is gone, and the time has passed.
                stand.hold_flows(now_ns() - HOUR_NS / 3600);
                assert!(is_sent_on(&stand, CLIENT_PORT + 1));
            }
        }
    }
}

/// One port number at two of the node's addresses, each a service with the same backend.
pub(crate) fn two_services(protocol: u8, hosts: &Hosts, backend: IpAddr) -> [PortSpec; 2] {
    [
        (hosts.cluster_ip, KIND_CLUSTER_IP),
        (hosts.node, KIND_NODE_PORT),
    ]
    .map(|(ip, kind)| PortSpec {
        frontends: vec![frontend(ip, kind, Target::Cluster)],
        ..node_port(protocol, ip, Some(backend))
    })
}

#[test]
#[ignore = "needs root"]
fn no_segment_of_another_in_a_clients_name_takes_the_answers_of_its_connection() {
    let mut stand = Stand::new();
    for hosts in hosts() {
        stand.serve(&two_services(TCP, &hosts, hosts.endpoint));
        let client = (hosts.client, CLIENT_PORT);
        let to = |ip: IpAddr, flags: u8| segment_at_uplink(client, (ip, NODE_PORT), flags);
        let open = to(hosts.cluster_ip, SYN);
        assert_ne!(stand.run.run("from_netdev", &open).bytes, open);
        let reached = segment(In, client.0, (client.1, BACKEND_PORT), SYN);
        assert_ne!(stand.run.run(In.program(), &reached).code, DROP);
        let answer = || {
            let sent = segment(Out, client.0, (BACKEND_PORT, client.1), ACK);
            stand.run.run(Out.program(), &sent);
            let leaving = segment_at_uplink((hosts.endpoint, BACKEND_PORT), client, ACK);
            stand.run.run("to_netdev", &leaving).bytes
        };
        let before = answer();
        for flags in [ACK, FIN | ACK, RST, SYN | ACK, 0] {
            let forged = to(hosts.node, flags);
            let outcome = stand.run.run("from_netdev", &forged);
            assert_eq!(outcome.code, DROP, "{hosts:?} {flags}");
            assert_eq!(answer(), before, "{hosts:?} {flags}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_client_that_stays_elsewhere_does_not_stay_there_where_the_policy_is_local() {
    let mut stand = Stand::new();
    for hosts in hosts() {
        stand.serve(&[PortSpec {
            protocol: UDP,
            frontends: vec![
                frontend(hosts.cluster_ip, KIND_CLUSTER_IP, Target::Local),
                frontend(hosts.node, KIND_NODE_PORT, Target::Cluster),
            ],
            // A backend from another list, which is the only list the first flow can use.
            cluster: vec![backend(hosts.elsewhere)],
            local: vec![backend(hosts.endpoint)],
            affinity_secs: 10_800,
            algorithm: ALGORITHM_RANDOM,
            ..PortSpec::default()
        }]);
        let mut port = CLIENT_PORT;
        let mut went_to = |ip: IpAddr| {
            port += 1;
            let packet = frame(Out, ip, UDP, &with_ports(port, NODE_PORT));
            stand.run.run(Out.program(), &packet);
            let flows = stand.flows();
            [hosts.elsewhere, hosts.endpoint].map(|ip| {
                let to = SocketAddr::new(ip, BACKEND_PORT);
                flows.iter().filter(|(_, flow)| flow.to == to).count()
            })
        };
        assert_eq!(went_to(hosts.node), [1, 0]);
        assert_eq!(went_to(hosts.cluster_ip), [1, 1]);
        // The client stays with that backend wherever the policy permits it.
        assert_eq!(went_to(hosts.node), [1, 2]);
        assert_eq!(went_to(hosts.cluster_ip), [1, 3]);
    }
}

#[test]
#[ignore = "needs root"]
fn clients_outside_are_sent_so_many_errors_a_second_and_no_more() {
    const A_SECOND: usize = 100;
    // The limit is per CPU.
    let mut one = CpuSet::new();
    one.set(0).expect("a processor");
    sched_setaffinity(Pid::from_raw(0), &one).expect("a processor of its own");
    let mut stand = Stand::new();
    stand.serve(&hosts().map(|hosts| node_port(UDP, hosts.node, None)));
    for hosts in hosts() {
        let packet = at_uplink((hosts.client, CLIENT_PORT), (hosts.node, NODE_PORT), UDP);
        let start = Instant::now();
        let (mut reported, mut silent) = (0, 0);
        while silent == 0 {
            let outcome = stand.run.run("from_netdev", &packet);
            if outcome.code == REDIRECT {
                reported += 1;
            } else {
                assert_eq!(outcome.bytes, packet);
                silent += 1;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{reported} errors"
            );
        }
        let seconds = start.elapsed().as_secs() as usize + 2;
        assert!(reported <= seconds * A_SECOND, "{reported} in {seconds} s");
        // The other IP version may have used up the limit of the first second, but not that of the next.
        let start = Instant::now();
        while stand.run.run("from_netdev", &packet).code != REDIRECT {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
    }
    assert!(stand.run.counted(Reason::ServiceRejected) > 0);
    // The endpoint gets an error for each of its own packets, without a limit.
    let [v4, _] = hosts();
    for _ in 0..2 * A_SECOND {
        let packet = frame(Out, v4.node, UDP, &with_ports(CLIENT_PORT, NODE_PORT));
        assert_eq!(stand.run.run(Out.program(), &packet).code, REDIRECT);
    }
}

#[test]
#[ignore = "needs root"]
fn a_rejected_packet_is_counted_once() {
    let mut stand = Stand::new();
    stand.serve(&hosts().map(|hosts| node_port(TCP, hosts.node, None)));
    let counts = || {
        let rows = stand.run.maps().metrics().expect("the counters");
        let rows = rows.into_iter().filter(|row| row.packets > 0);
        rows.map(|row| (row.reason, row.packets))
            .collect::<Vec<_>>()
    };
    assert_eq!(counts(), []);
    let ports = (CLIENT_PORT, NODE_PORT);
    let packets = hosts().into_iter().flat_map(|hosts| {
        let outside = Tcp::between(ports, SYN).frame(hosts.client, hosts.node);
        [
            (Out.program(), segment(Out, hosts.node, ports, SYN)),
            ("to_service", outside),
        ]
    });
    for (sent, (program, packet)) in (1..).zip(packets) {
        let outcome = stand.run.run(program, &packet);
        assert_eq!(outcome.code, REDIRECT, "{program}: {packet:x?}");
        let rejected = Reason::ServiceRejected as u8;
        assert_eq!(counts(), [(rejected, sent)], "{program}: {packet:x?}");
    }
}

/// Exchanges segments between the endpoint and its backend on another node, through a service. Returns the flow's entry
/// afterwards.
fn exchange(stand: &Stand, hosts: &Hosts, client: u16, segments: &[(Way, u8)]) -> CtEntry {
    for &(way, flags) in segments {
        let packet = match way {
            Out => segment(Out, hosts.node, (client, NODE_PORT), flags),
            In => segment(In, hosts.elsewhere, (BACKEND_PORT, client), flags),
        };
        let outcome = stand.run.run(way.program(), &packet);
        assert!(outcome.code == GO_ON && outcome.bytes != packet);
    }
    let flows = stand.run.maps().conntrack().expect("the flows");
    let mut of_client = flows.into_iter().filter(|(flow, _)| {
        flow.source == hosts.endpoint && flow.source_port == client && flow.protocol == TCP
    });
    of_client.next().expect("the flow").1
}

#[test]
#[ignore = "needs root"]
fn a_connection_outlives_a_forged_reset_if_the_side_it_names_goes_on_and_the_other_answers() {
    let timeouts = Timeouts::default();
    let mut stand = Stand::new();
    stand.serve(&hosts().map(|hosts| node_port(TCP, hosts.node, Some(hosts.elsewhere))));
    let open = [(Out, SYN), (In, SYN | ACK), (Out, ACK)];
    let mut client = CLIENT_PORT;
    for hosts in hosts() {
        for side in [Out, In] {
            let answer = (side.back(), ACK);
            for (then, name, lifetime) in [
                (
                    &[(side, ACK), answer][..],
                    "ESTABLISHED",
                    timeouts.tcp_established,
                ),
                (
                    &[(side, FIN | ACK), answer],
                    "CLOSE_WAIT",
                    timeouts.tcp_established,
                ),
                // The segment may have been sent before a RST that overtook it.
                (&[(side, ACK)], "CLOSE", timeouts.tcp_close),
                // Traffic from the other side proves nothing, because that side may not have received the RST yet.
                (&[answer], "CLOSE", timeouts.tcp_close),
                (
                    &[(side, ACK), (side, RST), answer],
                    "CLOSE",
                    timeouts.tcp_close,
                ),
            ] {
                client += 1;
                let reset = [&open[..], &[(side, RST)]].concat();
                let entry = exchange(&stand, &hosts, client, &reset);
                assert_eq!(TcpState::of(entry.state()).name(), "CLOSE");
                let entry = exchange(&stand, &hosts, client, then);
                let state = TcpState::of(entry.state()).name();
                assert_eq!(state, name, "{hosts:?} {then:?}");
                let last = entry.last_rx.max(entry.last_tx);
                assert_eq!(entry.expires, last + lifetime, "{hosts:?} {then:?}");
            }
        }
    }
}

/// The first fragment of a datagram with this identification, from the endpoint to a service.
fn first_fragment(hosts: &Hosts, id: u16) -> Vec<u8> {
    let content = with_ports(CLIENT_PORT, NODE_PORT);
    match (hosts.endpoint, hosts.node) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                id,
                fragment: MORE_FRAGMENTS,
                protocol: UDP,
                ..Ipv4::icmp(source, destination)
            };
            framed(Out, &ip.packet(&content))
        }
        _ => {
            let mut header = vec![UDP, 0, 0, 1];
            header.extend(u32::from(id).to_be_bytes());
            frame(Out, hosts.node, 44, &[header, content].concat())
        }
    }
}

#[test]
#[ignore = "needs root"]
fn of_fragments_to_a_service_that_policy_refuses_nothing_is_kept() {
    let mut stand = Stand::new();
    stand.serve(&hosts().map(|hosts| node_port(UDP, hosts.node, Some(hosts.elsewhere))));
    let kept = |stand: &Stand| {
        let maps = stand.run.maps();
        let rows4 = maps.fragments4_rows().expect("the ports").collect();
        let rows6 = maps.fragments6_rows().expect("the ports").collect();
        rows4.expect("the ports").len() + rows6.expect("the ports").len()
    };
    for hosts in hosts() {
        // For a new flow and, after a policy change, for a known one.
        for is_known in [false, true] {
            if is_known {
                set_endpoint(&mut stand.run.datapath, 0, 0);
                let packet = frame(Out, hosts.node, UDP, &with_ports(CLIENT_PORT, NODE_PORT));
                assert_eq!(stand.run.run(Out.program(), &packet).code, GO_ON);
            }
            // The endpoint has no policy table, so everything is refused.
            set_endpoint(&mut stand.run.datapath, BOTH, 1);
            for id in 1..=10 {
                let packet = first_fragment(&hosts, id);
                assert_eq!(stand.run.run(Out.program(), &packet).code, DROP);
            }
            assert_eq!(kept(&stand), 0, "{hosts:?}, known: {is_known}");
        }
        set_endpoint(&mut stand.run.datapath, 0, 0);
    }
    for (hosts, number) in hosts().into_iter().zip(1..) {
        let packet = first_fragment(&hosts, 11);
        assert_eq!(stand.run.run(Out.program(), &packet).code, GO_ON);
        // One under the service's address and one under the backend's.
        assert_eq!(kept(&stand), 2 * number);
    }
}
