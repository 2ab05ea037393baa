//! Direct server return: the option in which a node tells another node a packet's frontend, byte by byte.

use std::net::{IpAddr, SocketAddr};
use std::panic::resume_unwind;
use std::thread;

use aya::Pod;
use health_common::addr::Addr;
use health_common::ct::tcp::TcpState;
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Timeouts, Tuple4, Tuple6};
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::service::direct::DirectConfig;
use health_common::service::{
    FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MOVED, FLOW_PLAIN, FLOW_RELAYED,
};
use health_common::tuple::{ServiceFlowParts, Tuple};
use nix::sched::{CloneFlags, unshare};
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, checksum, ethernet, siphash};
use tests::testrun::{DROP, GO_ON};
use tests::xdp::{ip, set_forwarding};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{ACK, FIN, RST, SYN, TCP, UDP, frame, segment, with_ports};
use crate::service_packets::{BACKEND_PORT, Hosts, NODE_PORT, Stand, hosts, node_port};

const KEYS: [[u64; 2]; 2] = [[0x1122, 0x3344], [0x5566, 0x7788]];
const CLIENT_PORT: u16 = 4000;
const SEQUENCE: u32 = 0x0102_0304;
const ETHERNET_LEN: usize = 14;

/// An address in the form in which the tag covers it.
fn covered(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// A packet from one address to another, with these options if there are any.
fn packet(ends: [IpAddr; 2], options: &[u8], protocol: u8, content: &[u8]) -> Vec<u8> {
    let (ethertype, packet) = match ends {
        [IpAddr::V4(source), IpAddr::V4(destination)] => {
            let ip = Ipv4 {
                protocol,
                options: options.to_vec(),
                ..Ipv4::icmp(source, destination)
            };
            (IPV4, ip.packet(content))
        }
        [IpAddr::V6(source), IpAddr::V6(destination)] => {
            let next_header = if options.is_empty() { protocol } else { 60 };
            let ip = Ipv6 {
                next_header,
                ..Ipv6::icmp(source, destination)
            };
            (IPV6, ip.packet(&[options, content].concat()))
        }
        _ => unreachable!("both are of one IP version"),
    };
    ethernet([0; 6], [2, 0, 0, 0, 0, 2], ethertype, &packet)
}

/// A packet between two sockets, without options: for TCP, a SYN-ACK; for UDP, a datagram without a checksum.
fn between(source: SocketAddr, destination: SocketAddr, protocol: u8) -> Vec<u8> {
    let ports = (source.port(), destination.port());
    let content = match protocol {
        TCP => Tcp::between(ports, SYN | ACK).segment(source.ip(), destination.ip()),
        _ => [
            &ports.0.to_be_bytes()[..],
            &ports.1.to_be_bytes(),
            &[0, 8, 0, 0],
        ]
        .concat(),
    };
    packet([source.ip(), destination.ip()], &[], protocol, &content)
}

/// The ends of a flow: the client, the frontend that it contacted, and the backend.
#[derive(Clone, Copy, Debug)]
struct Ends {
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
}

impl Ends {
    fn of(hosts: &Hosts, backend: IpAddr) -> Self {
        Self {
            client: (hosts.client, CLIENT_PORT).into(),
            frontend: (hosts.node, NODE_PORT).into(),
            backend: (backend, BACKEND_PORT).into(),
        }
    }

    fn tag(&self, key: [u64; 2], protocol: u8, sequence: u32) -> [u8; 8] {
        let mut bytes = Vec::new();
        for end in [self.client, self.frontend, self.backend] {
            bytes.extend(covered(end.ip()));
        }
        for end in [self.client, self.frontend, self.backend] {
            bytes.extend(end.port().to_be_bytes());
        }
        bytes.extend([protocol, 0]);
        bytes.extend(sequence.to_be_bytes());
        bytes.extend([0; 4]);
        siphash(key, &bytes).to_le_bytes()
    }

    /// The IPv4 option, or the IPv6 destination options header.
    fn option(&self, tag: [u8; 8], protocol: u8) -> Vec<u8> {
        let port = self.frontend.port().to_be_bytes();
        match self.frontend.ip() {
            IpAddr::V4(v4) => [&[0x9e, 16], &port[..], &v4.octets(), &tag].concat(),
            IpAddr::V6(v6) => {
                let start = [protocol, 3, 0x5e, 28];
                [&start, &port[..], &[0, 0], &v6.octets(), &tag].concat()
            }
        }
    }

    /// A packet from the client to `to`, with these options if there are any.
    fn packet(&self, to: SocketAddr, options: &[u8], protocol: u8, content: &[u8]) -> Vec<u8> {
        packet([self.client.ip(), to.ip()], options, protocol, content)
    }

    fn segment(&self, to: SocketAddr, flags: u8) -> Vec<u8> {
        let tcp = Tcp {
            sequence: SEQUENCE,
            ..Tcp::between((self.client.port(), to.port()), flags)
        };
        tcp.segment(self.client.ip(), to.ip())
    }

    /// The transport payload of a packet to `to`: for TCP, a SYN.
    fn content(&self, to: SocketAddr, protocol: u8) -> Vec<u8> {
        match protocol {
            TCP => self.segment(to, SYN),
            _ => with_ports(self.client.port(), to.port()),
        }
    }

    /// The packet as another node forwards it to this one.
    fn reported(&self, key: [u64; 2], protocol: u8) -> Vec<u8> {
        let sequence = if protocol == TCP { SEQUENCE } else { 0 };
        let option = self.option(self.tag(key, protocol, sequence), protocol);
        self.packet(
            self.backend,
            &option,
            protocol,
            &self.content(self.backend, protocol),
        )
    }
}

fn keyed(keys: &[[u64; 2]]) -> Stand {
    let mut stand = Stand::of(tests::testrun::TestRun::load());
    set_keys(&mut stand, keys);
    stand
}

fn set_keys(stand: &mut Stand, keys: &[[u64; 2]]) {
    let mut config = DirectConfig::default();
    for (place, key) in config.keys.iter_mut().zip(keys) {
        *place = *key;
        config.count += 1;
    }
    stand.run.datapath.set_direct(config).expect("the keys");
}

/// All service flows: source, destination, whether they are inbound, and the target with its flags.
fn entered(stand: &Stand) -> Vec<(SocketAddr, SocketAddr, bool, SocketAddr, u16)> {
    let flows = stand.all_flows().into_iter().map(|(flow, to)| {
        let source = SocketAddr::new(flow.source, flow.source_port);
        let destination = SocketAddr::new(flow.destination, flow.destination_port);
        (source, destination, flow.inbound, to.to, to.flags)
    });
    let mut flows: Vec<_> = flows.collect();
    flows.sort_unstable();
    flows
}

/// The packet without the fields that a router changes: MAC addresses, TTL and header checksum.
fn essence(frame: &[u8]) -> Vec<u8> {
    let mut packet = frame[ETHERNET_LEN..].to_vec();
    if packet[0] >> 4 == 4 {
        let len = usize::from(packet[0] & 0xf) * 4;
        assert_eq!(
            checksum(&[&packet[..len]]),
            0,
            "a wrong checksum: {frame:x?}"
        );
        packet[8] = 0;
        packet[10..12].fill(0);
    } else {
        packet[7] = 0;
    }
    packet
}

#[test]
#[ignore = "needs root"]
fn what_another_node_reports_is_taken_off_and_entered() {
    for key in KEYS {
        let stand = keyed(&KEYS);
        let mut expected = Vec::new();
        for hosts in hosts() {
            let ends = Ends::of(&hosts, hosts.endpoint);
            for protocol in [TCP, UDP] {
                let plain = ends.packet(
                    ends.backend,
                    &[],
                    protocol,
                    &ends.content(ends.backend, protocol),
                );
                // A retransmission must have the same outcome.
                for _ in 0..2 {
                    let outcome = stand.run.run("from_netdev", &ends.reported(key, protocol));
                    assert_ne!(outcome.code, DROP, "{ends:?} {protocol}");
                    assert_eq!(
                        essence(&outcome.bytes),
                        essence(&plain),
                        "{ends:?} {protocol}"
                    );
                }
                let flags = FLOW_FROM_OUTSIDE | FLOW_RELAYED;
                expected.push((ends.client, ends.frontend, false, ends.backend, flags));
                expected.push((ends.backend, ends.client, true, ends.frontend, flags));
            }
        }
        expected.sort_unstable();
        assert_eq!(entered(&stand), expected);
        // The backends' replies leave with the frontend's source address.
        for hosts in hosts() {
            let ends = Ends::of(&hosts, hosts.endpoint);
            for protocol in [TCP, UDP] {
                let answer = between(ends.backend, ends.client, protocol);
                let outcome = stand.run.run("to_netdev", &answer);
                let named = between(ends.frontend, ends.client, protocol);
                assert_eq!(
                    essence(&outcome.bytes),
                    essence(&named),
                    "{ends:?} {protocol}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn nothing_is_entered_without_the_tag_of_a_node() {
    let stand = keyed(&KEYS);
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.endpoint);
        let with = |tag, content: &[u8]| {
            let option = ends.option(tag, TCP);
            ends.packet(ends.backend, &option, TCP, content)
        };
        let right = ends.tag(KEYS[0], TCP, SEQUENCE);
        let syn = ends.segment(ends.backend, SYN);
        let other = |change: fn(&mut Ends)| {
            let mut other = ends;
            change(&mut other);
            with(other.tag(KEYS[0], TCP, SEQUENCE), &syn)
        };
        let mut flipped = right;
        flipped[7] ^= 0x80;
        let own = Ends {
            client: (hosts.node, CLIENT_PORT).into(),
            ..ends
        };
        let refused = [
            with([0; 8], &syn),
            with(flipped, &syn),
            with(ends.tag([1, 2], TCP, SEQUENCE), &syn),
            with(ends.tag(KEYS[0], TCP, SEQUENCE + 1), &syn),
            with(ends.tag(KEYS[0], UDP, SEQUENCE), &syn),
            other(|ends| ends.client.set_port(CLIENT_PORT + 1)),
            other(|ends| ends.frontend.set_port(NODE_PORT + 1)),
            other(|ends| ends.backend.set_port(BACKEND_PORT + 1)),
            // Packets of an open connection never carry the option.
            with(right, &ends.segment(ends.backend, ACK)),
            with(right, &ends.segment(ends.backend, SYN | ACK)),
            // A packet from one of this node's own addresses.
            own.reported(KEYS[0], TCP),
        ];
        let before = stand.run.counted(Reason::DirectInvalid);
        for (place, packet) in refused.iter().enumerate() {
            let outcome = stand.run.run("from_netdev", packet);
            assert_eq!(outcome.code, DROP, "{ends:?}: packet {place}");
        }
        let counted = stand.run.counted(Reason::DirectInvalid) - before;
        assert_eq!(counted, refused.len() as u64);
    }
    assert_eq!(entered(&stand), []);
}

#[test]
#[ignore = "needs root"]
fn other_options_and_those_for_others_are_left_alone() {
    let [keyed, keyless] = [keyed(&KEYS), keyed(&[])];
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.endpoint);
        let away = Ends::of(&hosts, hosts.elsewhere);
        let padding = match ends.frontend.ip() {
            IpAddr::V4(_) => vec![1; 16],
            IpAddr::V6(_) => [vec![TCP, 3, 1, 28], vec![0; 28]].concat(),
        };
        let syn = ends.segment(ends.backend, SYN);
        let other = ends.packet(ends.backend, &padding, TCP, &syn);
        for (stand, packet) in [
            (&keyed, other),
            (&keyed, away.reported(KEYS[0], TCP)),
            (&keyless, ends.reported(KEYS[0], TCP)),
        ] {
            let outcome = stand.run.run("from_netdev", &packet);
            assert_eq!((outcome.code, &outcome.bytes), (GO_ON, &packet), "{ends:?}");
        }
    }
    assert_eq!(entered(&keyed), []);
    assert_eq!(entered(&keyless), []);
}

#[test]
#[ignore = "needs root"]
fn an_open_connection_between_the_same_ports_is_not_taken() {
    let stand = keyed(&KEYS);
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.endpoint);
        let by_another = Ends {
            frontend: (hosts.cluster_ip, NODE_PORT).into(),
            ..ends
        };
        assert_ne!(
            stand
                .run
                .run("from_netdev", &ends.reported(KEYS[0], TCP))
                .code,
            DROP
        );
        let before = entered(&stand);
        // Sends a segment to the backend, whose policy admits it.
        let reach = |flags| {
            let packet = segment(In, hosts.client, (CLIENT_PORT, BACKEND_PORT), flags);
            assert_ne!(stand.run.run(In.program(), &packet).code, DROP);
        };
        reach(SYN);
        let reported = by_another.reported(KEYS[0], TCP);
        assert_eq!(
            stand.run.run("from_netdev", &reported).code,
            DROP,
            "{ends:?}"
        );
        assert_eq!(entered(&stand), before);
        // When the connection is over, its ports are free for any flow.
        reach(RST);
        assert_ne!(
            stand.run.run("from_netdev", &reported).code,
            DROP,
            "{ends:?}"
        );
        assert_ne!(entered(&stand), before);
    }
}

/// Expiry times of the service flows (`CLOCK_MONOTONIC`, in seconds).
fn ends_of_flows(stand: &Stand) -> Vec<u32> {
    let flows = stand.all_flows().into_iter();
    flows.map(|(_, flow)| flow.expires).collect()
}

#[test]
#[ignore = "needs root"]
fn datagrams_without_room_for_the_option_have_the_flow_last_on_the_backends_node() {
    for hosts in hosts() {
        let mut stand = keyed(&KEYS);
        let ends = Ends::of(&hosts, hosts.endpoint);
        let reported = ends.reported(KEYS[0], UDP);
        assert_ne!(stand.run.run("from_netdev", &reported).code, DROP);
        let before = ends_of_flows(&stand);
        stand.configure(Timeouts {
            udp: 10_000,
            ..Timeouts::default()
        });
        let plain = between(ends.client, ends.backend, UDP);
        assert_eq!(stand.run.run("from_netdev", &plain).code, GO_ON);
        let after = ends_of_flows(&stand);
        assert_eq!((before.len(), after.len()), (2, 2), "{ends:?}");
        let latest = before.iter().max().expect("flows");
        assert!(
            after.iter().all(|end| *end > latest + 5_000),
            "{before:?} {after:?}"
        );
    }
}

/// Removes all service flows from this UDP map.
fn end_flows<T: Version>(stand: &Stand, name: &str) {
    let mut flows = stand.run.hash_map::<T, T::ServiceFlow>(name);
    let keys: Vec<T> = flows.keys().map(|key| key.expect("a key")).collect();
    for key in keys {
        flows.remove(&key).expect("an entry");
    }
}

#[test]
#[ignore = "needs root"]
fn a_late_datagram_of_the_backend_does_not_cut_its_client_off() {
    for hosts in hosts() {
        let stand = keyed(&KEYS);
        let ends = Ends::of(&hosts, hosts.endpoint);
        let reported = || {
            stand
                .run
                .run("from_netdev", &ends.reported(KEYS[0], UDP))
                .code
        };
        assert_ne!(reported(), DROP);
        // Ends the flow.
        end_flows::<Tuple4>(&stand, "HEALTH_REVNAT_ANY4");
        end_flows::<Tuple6>(&stand, "HEALTH_REVNAT_ANY6");
        let ports = with_ports(BACKEND_PORT, CLIENT_PORT);
        let late = frame(Out, hosts.client, UDP, &ports);
        assert_eq!(stand.run.run(Out.program(), &late).code, GO_ON);
        assert_ne!(reported(), DROP, "{ends:?}");
        let answer = between(ends.backend, ends.client, UDP);
        let named = between(ends.frontend, ends.client, UDP);
        let outcome = stand.run.run("to_netdev", &answer);
        assert_eq!(essence(&outcome.bytes), essence(&named), "{ends:?}");
        // Here the client's answer belongs to a flow that the backend opened.
        end_flows::<Tuple4>(&stand, "HEALTH_REVNAT_ANY4");
        end_flows::<Tuple6>(&stand, "HEALTH_REVNAT_ANY6");
        assert_eq!(stand.run.run(Out.program(), &late).code, GO_ON);
        let ports = with_ports(CLIENT_PORT, BACKEND_PORT);
        let answer = frame(In, hosts.client, UDP, &ports);
        assert_eq!(stand.run.run(In.program(), &answer).code, GO_ON);
        assert_eq!(reported(), DROP, "{ends:?}");
    }
}

/// Inserts a flow from the client to the backend itself through another port, as after a collision with a flow through
/// a service.
fn enter_moved<T: Version>(stand: &Stand, ends: &Ends, other_port: u16) {
    let end = |end: SocketAddr| (T::Address::of_addr(&Addr::from(end.ip())), end.port());
    let [client, to] = [ends.client, ends.backend].map(end);
    let parts = ServiceFlowParts {
        to: (to.0, to.1.to_be()),
        backend: 0,
        service: 0,
        expires: u32::MAX,
        flags: FLOW_FROM_OUTSIDE | FLOW_PLAIN | FLOW_MOVED,
        client_port_be: other_port.to_be(),
    };
    stand
        .run
        .hash_map::<T, T::ServiceFlow>(T::FLOWS[0])
        .insert(T::of([client, to], TUPLE_OUT), T::service_flow(&parts), 0)
        .expect("room for a flow");
}

#[test]
#[ignore = "needs root"]
fn what_is_left_of_a_flow_by_another_port_takes_no_segments_of_a_new_connection() {
    const OTHER_PORT: u16 = 4321;
    let stand = keyed(&KEYS);
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.endpoint);
        let enter = || match hosts.node {
            IpAddr::V4(_) => enter_moved::<Tuple4>(&stand, &ends, OTHER_PORT),
            IpAddr::V6(_) => enter_moved::<Tuple6>(&stand, &ends, OTHER_PORT),
        };
        let reported = || {
            stand
                .run
                .run("from_netdev", &ends.reported(KEYS[0], TCP))
                .code
        };
        let reach = |port, flags| {
            let packet = segment(In, hosts.client, (port, BACKEND_PORT), flags);
            assert_ne!(stand.run.run(In.program(), &packet).code, DROP);
        };
        enter();
        // While that flow is open, another flow on its ports would look the same.
        reach(OTHER_PORT, SYN);
        assert_eq!(reported(), DROP, "{ends:?}");
        reach(OTHER_PORT, RST);
        assert_ne!(reported(), DROP, "{ends:?}");
        let content = ends.segment(ends.backend, ACK);
        let plain = ends.packet(ends.backend, &[], TCP, &content);
        let outcome = stand.run.run("from_netdev", &plain);
        assert_eq!(essence(&outcome.bytes), essence(&plain), "{ends:?}");
    }
}

/// An IP version, and its maps of TCP flows.
trait Version: Tuple<Translation: Default, ServiceFlow: Pod> + Pod {
    const FLOWS: [&str; 2];
    fn of(ends: [(Self::Address, u16); 2], direction: u8) -> Self;
}

macro_rules! version {
    ($tuple:ident, $flows:expr) => {
        impl Version for $tuple {
            const FLOWS: [&str; 2] = $flows;

            fn of([source, destination]: [(Self::Address, u16); 2], direction: u8) -> Self {
                Self {
                    saddr_be: source.0,
                    daddr_be: destination.0,
                    sport_be: source.1.to_be(),
                    dport_be: destination.1.to_be(),
                    protocol: TCP,
                    direction,
                    pad: 0,
                }
            }
        }
    };
}

version!(Tuple4, ["HEALTH_REVNAT4", "HEALTH_CT4"]);
version!(Tuple6, ["HEALTH_REVNAT6", "HEALTH_CT6"]);

/// Inserts a connection to a backend on another node that answers the client directly, as the first node does.
fn enter_direct<T: Version>(stand: &Stand, ends: &Ends) {
    let listed = stand.run.maps().services().expect("the maps").list();
    let listed = listed.expect("the frontends").into_iter();
    let mut listed = listed.filter(|one| one.address == ends.frontend);
    let served = listed.next().expect("the frontend");
    let backend = served.pool(health_common::service::Origin::Outside)[0].index;
    let end = |end: SocketAddr| (T::Address::of_addr(&Addr::from(end.ip())), end.port());
    let [client, frontend, to] = [ends.client, ends.frontend, ends.backend].map(end);
    let mut flows = stand.run.hash_map::<T, T::ServiceFlow>(T::FLOWS[0]);
    for (key, to) in [
        (T::of([client, frontend], TUPLE_OUT), to),
        (T::of([to, client], TUPLE_IN), frontend),
    ] {
        let parts = ServiceFlowParts {
            to: (to.0, to.1.to_be()),
            backend,
            service: served.entry.service,
            expires: u32::MAX,
            flags: FLOW_FROM_OUTSIDE | FLOW_DIRECT,
            client_port_be: 0,
        };
        flows
            .insert(key, T::service_flow(&parts), 0)
            .expect("room for a flow");
    }
}

/// The first node's conntrack entry for such a connection after each segment: state, lifetime, and the forwarded
/// packet.
fn follow<T: Version>(
    stand: &Stand,
    ends: &Ends,
    segments: &[u8],
) -> Vec<(&'static str, u32, Vec<u8>)> {
    enter_direct::<T>(stand, ends);
    let end = |end: SocketAddr| (T::Address::of_addr(&Addr::from(end.ip())), end.port());
    let [client, to] = [ends.client, ends.backend].map(end);
    let tracked = stand.run.hash_map::<T, CtEntry>(T::FLOWS[1]);
    let key = T::of([client, to], TUPLE_IN);
    let followed = segments.iter().map(|flags| {
        let asked = ends.segment(ends.frontend, *flags);
        let packet = ends.packet(ends.frontend, &[], TCP, &asked);
        let outcome = stand.run.run("from_netdev", &packet);
        assert_ne!(outcome.code, DROP, "{ends:?} {flags}");
        let entry = tracked.get(&key, 0).expect("the connection");
        assert_eq!(entry.tx_packets, 0);
        let name = TcpState::of(entry.state()).name();
        (name, entry.expires - entry.last_rx, outcome.bytes)
    });
    followed.collect()
}

/// Runs a test in a namespace that forwards packets to every destination.
fn with_ways(test: fn()) -> anyhow::Result<()> {
    let thread = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET)?;
        for words in [
            "link set lo up",
            "link add out up type veth peer name there",
            "link set there up",
            "route add default dev out",
            "-6 route add default dev out",
        ] {
            ip(words)?;
        }
        set_forwarding(true)?;
        test();
        anyhow::Ok(())
    });
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

#[test]
#[ignore = "needs root"]
fn the_first_node_notifies_with_each_syn_and_follows_the_client_alone() -> anyhow::Result<()> {
    with_ways(notifies_and_follows)
}

fn notifies_and_follows() {
    let mut stand = keyed(&KEYS);
    stand.serve(&hosts().map(|hosts| node_port(TCP, hosts.node, Some(hosts.elsewhere))));
    let Timeouts {
        tcp_syn,
        tcp_established,
        tcp_close,
        ..
    } = Timeouts::default();
    let steps = [
        (SYN, "SYN_SENT", tcp_syn),
        // A retransmission.
        (SYN, "SYN_SENT", tcp_syn),
        (ACK, "ESTABLISHED", tcp_established),
        (ACK, "ESTABLISHED", tcp_established),
        // Either the backend reset the connection, or another host sent this SYN.
        (SYN, "ESTABLISHED", tcp_close),
        (ACK, "ESTABLISHED", tcp_established),
        (FIN | ACK, "FIN_WAIT", tcp_syn),
        (ACK, "FIN_WAIT", tcp_syn),
        // A new connection between the same ports.
        (SYN, "SYN_SENT", tcp_syn),
        (ACK, "ESTABLISHED", tcp_established),
        (RST, "CLOSE", tcp_close),
    ];
    let segments = steps.map(|(flags, ..)| flags);
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.elsewhere);
        let followed = match hosts.node {
            IpAddr::V4(_) => follow::<Tuple4>(&stand, &ends, &segments),
            IpAddr::V6(_) => follow::<Tuple6>(&stand, &ends, &segments),
        };
        for (step, (state, lasts, bytes)) in steps.into_iter().zip(followed) {
            let (flags, ..) = step;
            assert_eq!((flags, state, lasts), step, "{ends:?}");
            let option = match flags {
                SYN => ends.option(ends.tag(KEYS[0], TCP, SEQUENCE), TCP),
                _ => Vec::new(),
            };
            let content = ends.segment(ends.backend, flags);
            let expected = ends.packet(ends.backend, &option, TCP, &content);
            assert_eq!(essence(&bytes), essence(&expected), "{ends:?} {flags}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_node_without_a_key_notifies_nobody() {
    let mut stand = keyed(&KEYS);
    stand.serve(&hosts().map(|hosts| node_port(TCP, hosts.node, Some(hosts.elsewhere))));
    for hosts in hosts() {
        let ends = Ends::of(&hosts, hosts.elsewhere);
        match hosts.node {
            IpAddr::V4(_) => enter_direct::<Tuple4>(&stand, &ends),
            IpAddr::V6(_) => enter_direct::<Tuple6>(&stand, &ends),
        }
        let open = ends.packet(ends.frontend, &[], TCP, &ends.segment(ends.frontend, SYN));
        for (keys, is_reported) in [(&KEYS[..], true), (&[], false)] {
            set_keys(&mut stand, keys);
            // The packet would have to be masqueraded, which is off here.
            let outcome = stand.run.run("from_netdev", &open);
            assert_eq!(outcome.code != DROP, is_reported, "{ends:?}");
        }
    }
}
