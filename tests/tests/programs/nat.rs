//! Masquerading: the uplinks' programs on crafted packets. Results are compared byte by byte, including checksums.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

use aya::maps::{HashMap, MapData};
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{CT_MASQUERADED, CT_SEEN_NON_SYN, CtEntry, CtState, Tuple4};
use health_common::endpoint::EndpointInfo;
use health_common::metrics::Reason;
use health_common::nat::NatEntry4;
use health_common::tcp::Peer;
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::dump::{Flow, Translation};
use health_net::clock::now_ns;
use health_settings::MasqueradeSettings;
use nix::time::{ClockId, clock_gettime};
use tests::packet::{
    IPV4, IPV6, Ipv4, Ipv6, Tcp, checksum, echo, echo4, ethernet, payload, tagged,
    transport_checksum,
};
use tests::testrun::{DROP, GO_ON, IFINDEX, LONG_TIMEOUTS, Outcome, TestRun, forwarded};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
/// The ifindex of an endpoint's device. Must differ from [`IFINDEX`], the device that test runs use.
const ENDPOINT_IFINDEX: u32 = 77;
const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const GRE: u8 = 47;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const MORE_FRAGMENTS: u16 = 0x2000;
/// The mark that `to_service` sets on packets to a backend on another node: `MARK_SERVED` in the programs.
const MARK_SERVED: u32 = 0x6865_2376;

/// Senders and receivers in one IP version.
#[derive(Clone, Copy, Debug)]
struct Hosts {
    endpoint: IpAddr,
    other_endpoint: IpAddr,
    node: IpAddr,
    routed: IpAddr,
    far: IpAddr,
    native: IpAddr,
    excluded: IpAddr,
    peer: IpAddr,
    /// A router on the path to `far`.
    router: IpAddr,
}

fn v4() -> Hosts {
    let ip = |text: &str| text.parse().expect(text);
    Hosts {
        endpoint: ENDPOINT4.into(),
        other_endpoint: ip("10.244.1.8"),
        node: ip("172.30.0.1"),
        routed: ip("192.168.7.9"),
        far: ip("198.51.100.9"),
        native: ip("10.9.9.9"),
        excluded: ip("203.0.113.5"),
        peer: ip("172.31.0.2"),
        router: ip("198.51.100.1"),
    }
}

fn v6() -> Hosts {
    let ip = |text: &str| text.parse().expect(text);
    Hosts {
        endpoint: ENDPOINT6.into(),
        other_endpoint: ip("fd00:10:244:1::8"),
        node: ip("fd00:30::1"),
        routed: ip("fd77::9"),
        far: ip("2001:db8::9"),
        native: ip("fd00:10:9::9"),
        excluded: ip("2001:db8:5::5"),
        peer: ip("fd00:31::2"),
        router: ip("2001:db8::1"),
    }
}

fn both() -> [Hosts; 2] {
    [v4(), v6()]
}

/// An address and a port. For echoes, the requester's port is the identifier and the other side's is 0.
type End = (IpAddr, u16);

fn settings() -> DatapathConfig {
    DatapathConfig {
        timeouts: LONG_TIMEOUTS,
        ..DatapathConfig::default()
    }
}

struct Bed(TestRun);

impl Bed {
    /// Masquerades with source ports from this range.
    fn new(ports: &str) -> Self {
        let mut bed = TestRun::load();
        bed.set_health_endpoint((ENDPOINT4, ENDPOINT6), MAC, MAC, settings());
        let endpoint = EndpointInfo {
            ifindex: IFINDEX,
            identity: identity::HEALTH,
            id: 78,
            ..EndpointInfo::default()
        };
        let addresses: Vec<IpAddr> = both()
            .iter()
            .flat_map(|hosts| [hosts.endpoint, hosts.other_endpoint])
            .collect();
        let endpoints: Vec<_> = addresses.iter().map(|addr| (*addr, endpoint)).collect();
        bed.datapath
            .set_endpoints(&endpoints)
            .expect("the endpoints");
        let cidrs = |texts: [&str; 2]| {
            let cidrs = texts.iter().map(|text| text.parse().expect(text));
            cidrs.collect()
        };
        let masquerade = MasqueradeSettings {
            native_routing_cidrs: cidrs(["10.0.0.0/8", "fd00:10::/32"]),
            masquerade_excludes: cidrs(["203.0.113.0/24", "2001:db8:5::/48"]),
            masquerade_ports: ports.parse().expect(ports),
            gateway_cidrs: cidrs(["192.168.0.0/16", "fd77::/16"]),
        };
        let nodes = both().map(|hosts| hosts.node);
        let masquerade = masquerade.of_node(&nodes, &[]).expect("addresses of both");
        bed.datapath
            .set_masquerade(masquerade)
            .expect("the settings");
        let bed = Self(bed);
        let mut peers: HashMap<MapData, Addr, Peer> = bed.map("HEALTH_PEERS");
        for hosts in both() {
            peers
                .insert(Addr::from(hosts.peer), Peer::default(), 0)
                .expect("a peer");
        }
        bed
    }

    fn add_endpoint(&self, address: IpAddr) {
        let endpoint = EndpointInfo {
            ifindex: ENDPOINT_IFINDEX,
            ..EndpointInfo::default()
        };
        self.map("HEALTH_ENDPOINTS")
            .insert(Addr::from(address), endpoint, 0)
            .expect("an endpoint");
    }

    /// Blocks new flows until this time (`CLOCK_MONOTONIC`, in nanoseconds).
    fn hold_flows(&mut self, until_ns: u64) {
        let settings = DatapathConfig {
            layout_version: LAYOUT_VERSION,
            flows_held_until_ns: until_ns,
            ..settings()
        };
        self.0.datapath.configure(settings).expect("the settings");
    }

    fn map<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        self.0.hash_map(name)
    }

    /// Sends an endpoint's packet through both programs.
    fn send(&self, packet: &[u8]) -> Outcome {
        assert_eq!(self.0.run("from_endpoint", packet), passed(packet));
        self.leave(packet)
    }

    fn leave(&self, packet: &[u8]) -> Outcome {
        self.0.run("to_netdev", packet)
    }

    fn arrive(&self, packet: &[u8]) -> Outcome {
        self.0.run("from_netdev", packet)
    }

    /// Opens a flow from an endpoint. Returns its source port after NAT.
    fn open(&self, protocol: u8, from: End, to: End) -> u16 {
        let node = both()
            .into_iter()
            .find(|hosts| hosts.far.is_ipv4() == to.0.is_ipv4())
            .expect("an IP version")
            .node;
        let outcome = self.send(&packet(protocol, from, to));
        let port = source_port(protocol, &outcome.bytes);
        assert_eq!(outcome, passed(&packet(protocol, (node, port), to)));
        port
    }

    /// Opens a connection from a host behind the gateway. Returns its source port after NAT.
    fn establish(&self, from: End, to: End) -> u16 {
        let given = source_port(TCP, &self.leave(&of_flags(from, to, SYN)).bytes);
        let node = both().map(|hosts| hosts.node);
        let node = node
            .into_iter()
            .find(|node| node.is_ipv4() == to.0.is_ipv4());
        let node = (node.expect("an IP version"), given);
        let answer = of_flags(to, node, SYN | ACK);
        let expected = of_flags(to, from, SYN | ACK);
        assert_eq!(self.arrive(&answer), passed(&expected));
        let third = self.leave(&of_flags(from, to, ACK));
        assert_eq!(third, passed(&of_flags(node, to, ACK)));
        given
    }

    fn nat(&self) -> Vec<(Flow, Translation)> {
        let mut entries = self.0.maps().nat().expect("the translations");
        entries.sort_by_key(|(flow, _)| (flow.source, flow.source_port, flow.inbound));
        entries
    }

    /// Expires all IPv4 flows.
    fn expire_flows4(&self) {
        for name in ["HEALTH_CT4", "HEALTH_CT_ANY4"] {
            self.0
                .change_flows::<Tuple4>(name, |entry| entry.expires = 0);
        }
    }

    fn flows(&self) -> Vec<(Flow, CtEntry)> {
        self.0.maps().conntrack().expect("the flows")
    }

    fn flow(&self, from: End) -> CtEntry {
        let flows = self.flows();
        let of = |flow: &Flow| (flow.source, flow.source_port) == from && !flow.inbound;
        let found = flows.iter().find(|(flow, _)| of(flow));
        found.unwrap_or_else(|| panic!("{from:?} in {flows:?}")).1
    }
}

fn passed(packet: &[u8]) -> Outcome {
    Outcome {
        code: GO_ON,
        bytes: packet.to_vec(),
    }
}

fn dropped(packet: &[u8]) -> Outcome {
    Outcome {
        code: DROP,
        bytes: packet.to_vec(),
    }
}

fn icmp(address: IpAddr) -> u8 {
    if address.is_ipv4() { ICMP } else { ICMPV6 }
}

/// The payload of an IP packet.
fn content(protocol: u8, from: End, to: End) -> Vec<u8> {
    let with_ports = |rest: &[u8]| [&from.1.to_be_bytes(), &to.1.to_be_bytes(), rest].concat();
    match protocol {
        TCP => segment(from, to, SYN),
        UDP => {
            let mut bytes = with_ports(&[0, 29, 0, 0]);
            bytes.extend(payload(21));
            let check = transport_checksum(from.0, to.0, UDP, &bytes);
            bytes[6..8].copy_from_slice(&check.to_be_bytes());
            bytes
        }
        ICMP => match (from.1, to.1) {
            (id, 0) => echo4(8, 0, id, 7, b"data"),
            (_, id) => echo4(0, 0, id, 7, b"data"),
        },
        ICMPV6 => {
            let (kind, id) = if to.1 == 0 {
                (128, from.1)
            } else {
                (129, to.1)
            };
            ip6(from.0, to.0, ICMPV6).with_checksum(echo(kind, 0, id, 7, b"data"))
        }
        SCTP => with_ports(&payload(24)),
        _ => payload(30),
    }
}

fn segment(from: End, to: End, flags: u8) -> Vec<u8> {
    let tcp = Tcp {
        source: from.1,
        destination: to.1,
        flags,
        data: payload(9),
        ..Tcp::default()
    };
    tcp.segment(from.0, to.0)
}

fn ip6(from: IpAddr, to: IpAddr, next_header: u8) -> Ipv6 {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (from, to) else {
        panic!("{from} and {to} are not IPv6");
    };
    Ipv6 {
        next_header,
        ..Ipv6::icmp(source, destination)
    }
}

fn ip4(from: IpAddr, to: IpAddr, protocol: u8) -> Ipv4 {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from, to) else {
        panic!("{from} and {to} are not IPv4");
    };
    Ipv4 {
        protocol,
        ..Ipv4::icmp(source, destination)
    }
}

/// An IP packet with this payload.
fn around(from: IpAddr, to: IpAddr, protocol: u8, content: &[u8]) -> Vec<u8> {
    if from.is_ipv4() {
        ip4(from, to, protocol).packet(content)
    } else {
        ip6(from, to, protocol).packet(content)
    }
}

fn framed(is_v4: bool, packet: &[u8]) -> Vec<u8> {
    ethernet(MAC, MAC, if is_v4 { IPV4 } else { IPV6 }, packet)
}

fn packet(protocol: u8, from: End, to: End) -> Vec<u8> {
    let content = content(protocol, from, to);
    framed(from.0.is_ipv4(), &around(from.0, to.0, protocol, &content))
}

/// A TCP segment with these flags.
fn of_flags(from: End, to: End, flags: u8) -> Vec<u8> {
    framed(
        from.0.is_ipv4(),
        &around(from.0, to.0, TCP, &segment(from, to, flags)),
    )
}

/// The source port with which a packet left; for an echo request, its identifier.
fn source_port(protocol: u8, packet: &[u8]) -> u16 {
    let l4_at = if packet[12..14] == IPV4.to_be_bytes() {
        34
    } else {
        54
    };
    let at = match protocol {
        ICMP | ICMPV6 => l4_at + 4,
        TCP | UDP | SCTP => l4_at,
        _ => return 0,
    };
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

#[test]
#[ignore = "needs root"]
fn flows_leave_with_the_nodes_address_and_their_replies_find_back() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for (protocol, far_port) in [(TCP, 443), (UDP, 53), (icmp(hosts.far), 0)] {
            for port in [40_000, 1000] {
                let (from, to) = ((hosts.endpoint, port), (hosts.far, far_port));
                let given = bed.open(protocol, from, to);
                if port == 40_000 {
                    assert_eq!(given, port, "a port that is free is kept");
                } else {
                    assert!(given >= 32_768, "{given} is of the range");
                }
                // Again, with the same result.
                assert_eq!(bed.open(protocol, from, to), given);
                let back = packet(protocol, (hosts.far, far_port), (hosts.node, given));
                let expected = packet(protocol, (hosts.far, far_port), from);
                assert_eq!(bed.arrive(&back), passed(&expected));
                assert!(bed.flow(from).flags & CT_MASQUERADED != 0);
            }
        }
        assert_eq!(bed.nat().len(), if hosts.far.is_ipv4() { 12 } else { 24 });
    }
    assert_eq!(bed.0.counted(Reason::NatNoMapping), 0);
}

#[test]
#[ignore = "needs root"]
fn flows_that_are_held_are_not_masqueraded_anew() {
    let mut bed = Bed::new("32768-65535");
    for hosts in both() {
        let (known, new, to) = (
            (hosts.endpoint, 40_000),
            (hosts.endpoint, 40_001),
            (hosts.far, 443),
        );
        let given = bed.open(TCP, known, to);
        bed.hold_flows(now_ns() + 3_600_000_000_000);
        assert_eq!(bed.open(TCP, known, to), given);
        let packet = packet(TCP, new, to);
        assert_eq!(bed.send(&packet), dropped(&packet));
        bed.hold_flows(0);
        bed.open(TCP, new, to);
    }
    assert_eq!(bed.0.counted(Reason::FlowsHeld), 2);
}

#[test]
#[ignore = "needs root"]
fn a_port_that_is_taken_is_given_to_no_other_flow_to_the_same_place() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for (protocol, far_port) in [(TCP, 443), (UDP, 53), (icmp(hosts.far), 0)] {
            let to = (hosts.far, far_port);
            let first = bed.open(protocol, (hosts.endpoint, 40_000), to);
            let second = bed.open(protocol, (hosts.other_endpoint, 40_000), to);
            assert_eq!(first, 40_000);
            assert!(second != first && second >= 32_768);
            for (endpoint, port) in [(hosts.endpoint, first), (hosts.other_endpoint, second)] {
                let back = packet(protocol, to, (hosts.node, port));
                let expected = packet(protocol, to, (endpoint, 40_000));
                assert_eq!(bed.arrive(&back), passed(&expected));
            }
            // The port is free for another destination.
            let elsewhere = (hosts.router, far_port);
            assert_eq!(
                bed.open(protocol, (hosts.other_endpoint, 40_000), elsewhere),
                40_000
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn ports_of_this_hosts_processes_are_never_handed_out() {
    let (tcp, udp) = (
        TcpListener::bind("[::]:0").expect("a listener"),
        UdpSocket::bind("[::]:0").expect("a socket"),
    );
    for (protocol, address) in [(TCP, tcp.local_addr()), (UDP, udp.local_addr())] {
        let used = address.as_ref().map(SocketAddr::port).expect("a port");
        let bed = Bed::new(&format!("{used}-{used}"));
        for hosts in both() {
            let (from, to) = ((hosts.endpoint, used), (hosts.far, 443));
            let syn = packet(protocol, from, to);
            assert_eq!(bed.send(&syn), dropped(&syn));
            // Echo identifiers do not conflict with ports.
            assert_eq!(bed.open(icmp(hosts.far), from, (hosts.far, 0)), used);
        }
        assert_eq!(bed.0.counted(Reason::NatNoMapping), 2);
        let only_echoes = |(flow, _): &(Flow, _)| flow.protocol != protocol;
        assert!(bed.nat().iter().all(only_echoes), "both entries or none");
    }
    let (a, b) = (tcp.local_addr().expect("a port").port(), 2);
    let range = format!("{a}-{}", a.saturating_add(b));
    let bed = Bed::new(&range);
    let given = bed.open(TCP, (v4().endpoint, a), (v4().far, 443));
    assert!(given > a, "{given} of {range}");
}

#[test]
#[ignore = "needs root"]
fn destinations_of_the_cluster_see_who_sends() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let multicast: IpAddr = if hosts.far.is_ipv4() {
            Ipv4Addr::new(239, 1, 2, 3).into()
        } else {
            Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 3).into()
        };
        for to in [hosts.native, hosts.excluded, hosts.peer, multicast] {
            for protocol in [TCP, UDP, icmp(to), GRE] {
                let port = if protocol == icmp(to) { 0 } else { 80 };
                let sent = packet(protocol, (hosts.endpoint, 40_000), (to, port));
                assert_eq!(bed.send(&sent), passed(&sent), "{protocol} to {to}");
            }
        }
        // Packets from other sources are not masqueraded either.
        for from in [hosts.native, hosts.far] {
            let sent = packet(UDP, (from, 40_000), (hosts.router, 80));
            assert_eq!(bed.leave(&sent), passed(&sent));
        }
    }
    assert_eq!(bed.nat(), []);
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_that_answers_keeps_its_address() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for (protocol, asks, answers) in [
            (TCP, 50_000, 8080),
            (UDP, 50_000, 8080),
            (icmp(hosts.far), 77, 0),
        ] {
            let request = packet(protocol, (hosts.far, asks), (hosts.other_endpoint, answers));
            assert_eq!(bed.arrive(&request), passed(&request));
            // The program itself answers echoes to the health endpoint.
            let (from, to) = ((hosts.endpoint, answers), (hosts.far, asks));
            let request = packet(protocol, to, from);
            let _ = bed.0.run("to_endpoint", &request);
            let reply = packet(protocol, from, to);
            let reply = match protocol {
                TCP => framed(
                    hosts.far.is_ipv4(),
                    &around(from.0, to.0, TCP, &segment(from, to, SYN | ACK)),
                ),
                _ => reply,
            };
            assert_eq!(bed.leave(&reply), passed(&reply));
        }
    }
    assert_eq!(bed.nat(), []);
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_masqueraded_is_dropped_and_counted() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let is_v4 = hosts.far.is_ipv4();
        let (from, to) = ((hosts.endpoint, 40_000), (hosts.far, 443));
        let reset = framed(is_v4, &around(from.0, to.0, TCP, &segment(from, to, RST)));
        let cut = framed(is_v4, &around(from.0, to.0, UDP, &[1, 2, 3]));
        let timestamp = framed(
            is_v4,
            &around(
                from.0,
                to.0,
                icmp(to.0),
                &[if is_v4 { 13 } else { 200 }; 20],
            ),
        );
        let echo_reply = packet(icmp(to.0), (from.0, 0), (to.0, 9));
        for sent in [reset, cut, timestamp, echo_reply] {
            assert_eq!(bed.leave(&sent), dropped(&sent));
        }
    }
    assert_eq!(bed.0.counted(Reason::NatUnsupported), 8);
    assert_eq!(bed.nat(), []);
}

#[test]
#[ignore = "needs root"]
fn protocols_whose_ports_stay_are_masqueraded_while_nobody_else_has_them() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for (protocol, ports) in [(SCTP, (7, 9)), (GRE, (0, 0))] {
            let to = (hosts.far, ports.1);
            assert_eq!(bed.open(protocol, (hosts.endpoint, ports.0), to), ports.0);
            let back = packet(protocol, to, (hosts.node, ports.0));
            let expected = packet(protocol, to, (hosts.endpoint, ports.0));
            assert_eq!(bed.arrive(&back), passed(&expected));
            let second = packet(protocol, (hosts.other_endpoint, ports.0), to);
            assert_eq!(bed.send(&second), dropped(&second));
        }
    }
    assert_eq!(bed.0.counted(Reason::NatNoMapping), 4);
}

#[test]
#[ignore = "needs root"]
fn when_all_ports_are_in_use_new_flows_are_dropped_until_one_is_free() {
    let bed = Bed::new("40000-40003");
    for hosts in both() {
        let to = (hosts.far, 443);
        let mut given: Vec<u16> = (0..4)
            .map(|i| bed.establish((hosts.routed, 5000 + i), to))
            .collect();
        given.sort_unstable();
        assert_eq!(given, [40_000, 40_001, 40_002, 40_003]);
        let entries = bed.nat();
        let fifth = packet(TCP, (hosts.endpoint, 6000), to);
        assert_eq!(bed.send(&fifth), dropped(&fifth));
        assert_eq!(bed.nat(), entries);
        // These flows do not block those of another protocol, and a flow that has a port keeps it.
        bed.open(UDP, (hosts.endpoint, 6000), to);
        bed.establish((hosts.routed, 5002), to);
        let freed = bed
            .0
            .maps()
            .flush_nat(|flow, _| flow.source_port == 5001)
            .expect("a flush");
        assert_eq!(freed.iter().map(|of| of.entries).sum::<u64>(), 2);
        bed.open(TCP, (hosts.endpoint, 6000), to);
    }
    assert_eq!(bed.0.counted(Reason::NatNoMapping), 2);
}

/// Waits until the programs' clock has advanced.
fn await_tick() {
    let now = || clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).expect("a clock");
    let before = now();
    while now() == before {
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs root"]
fn when_all_ports_are_taken_the_oldest_flow_that_nobody_answered_loses_its_own() {
    let bed = Bed::new("40000-40003");
    for hosts in both() {
        // A SYN-ACK alone does not make a TCP connection: the owner of a forged source address never acknowledges it.
        let tcp_answer: &[u8] = &[SYN | ACK];
        for (protocol, far_port, answers) in [(TCP, 443, tcp_answer), (UDP, 53, &[])] {
            let to = (hosts.far, far_port);
            let begin = |port: u16| {
                await_tick();
                let given = bed.leave(&packet(protocol, (hosts.routed, port), to));
                let given = source_port(protocol, &given.bytes);
                for flags in answers {
                    let packet = of_flags(to, (hosts.node, given), *flags);
                    assert_ne!(bed.arrive(&packet), passed(&packet));
                }
                given
            };
            let oldest = begin(5000);
            if protocol == TCP {
                assert_eq!(bed.establish((hosts.routed, 5000), to), oldest);
            } else {
                bed.arrive(&packet(UDP, to, (hosts.node, oldest)));
            }
            let others = [begin(5001), begin(5002), begin(5003)];
            // The newest of the later flows stay too.
            let given = (6000..6006).map(begin).collect::<Vec<_>>();
            assert_eq!(given, [others, others].concat());
            let back = packet(protocol, to, (hosts.node, oldest));
            let expected = packet(protocol, to, (hosts.routed, 5000));
            assert_eq!(bed.arrive(&back), passed(&expected));
            // A flow that lost its port gets another one with its next packet.
            let again = begin(5001);
            assert!(others.contains(&again));
            let back = packet(protocol, to, (hosts.node, again));
            let expected = packet(protocol, to, (hosts.routed, 5001));
            assert_eq!(bed.arrive(&back), passed(&expected));
        }
    }
    assert_eq!(bed.0.counted(Reason::NatNoMapping), 0);
}

#[test]
#[ignore = "needs root"]
fn the_port_of_a_flow_that_is_over_is_free_before_it_is_collected() {
    let bed = Bed::new("40000-40000");
    let hosts = v4();
    let to = (hosts.far, 443);
    bed.open(TCP, (hosts.endpoint, 5000), to);
    bed.expire_flows4();
    assert_eq!(bed.open(TCP, (hosts.other_endpoint, 6000), to), 40_000);
    let ports: Vec<_> = bed
        .nat()
        .iter()
        .map(|(flow, to)| (flow.source_port, to.port))
        .collect();
    assert_eq!(
        ports,
        [(6000, 40_000), (443, 6000)],
        "nothing of the first is left"
    );
    // The first flow's next packet reopens it, but finds no free port once the other flow is established.
    bed.0.change_flows::<Tuple4>("HEALTH_CT4", |entry| {
        entry.set_state(CtState::new(CT_SEEN_NON_SYN, ACK, ACK));
    });
    let again = packet(TCP, (hosts.endpoint, 5000), to);
    assert_eq!(bed.send(&again), dropped(&again));
    // A translation without a flow entry loses its port only after some time.
    let mut flows: HashMap<MapData, Tuple4, CtEntry> = bed.map("HEALTH_CT4");
    flows
        .remove(
            &flows
                .keys()
                .flatten()
                .find(|key| key.sport_be == 6000_u16.to_be())
                .expect("the flow"),
        )
        .expect("an entry");
    assert_eq!(bed.send(&again), dropped(&again));
}

#[test]
#[ignore = "needs root"]
fn what_comes_after_the_time_of_its_flow_is_not_the_endpoints() {
    let bed = Bed::new("32768-65535");
    let hosts = v4();
    let (from, to) = ((hosts.endpoint, 1000), (hosts.far, 53));
    let port = bed.open(UDP, from, to);
    let back = packet(UDP, to, (hosts.node, port));
    assert_eq!(bed.arrive(&back), passed(&packet(UDP, to, from)));
    assert_eq!(bed.open(UDP, from, to), port);
    assert_eq!(bed.flow(from).tx_packets, 2);
    bed.expire_flows4();
    assert_eq!(bed.arrive(&back), passed(&back));
    // The endpoint's next packet opens a new flow, whose counters start at zero.
    assert_eq!(bed.open(UDP, from, to), port);
    assert_eq!(bed.flow(from).tx_packets, 1);
}

#[test]
#[ignore = "needs root"]
fn what_is_lost_of_a_translation_is_made_good() {
    let bed = Bed::new("32768-65535");
    let hosts = v4();
    let (from, to) = ((hosts.endpoint, 1000), (hosts.far, 443));
    let port = bed.open(TCP, from, to);
    let whole = bed.nat();
    let mut nat: HashMap<MapData, Tuple4, NatEntry4> = bed.map("HEALTH_NAT4");
    let keys: Vec<Tuple4> = nat.keys().map(|key| key.expect("a key")).collect();
    assert_eq!(keys.len(), 2);
    for key in keys {
        nat.remove(&key).expect("an entry");
        if key.direction == 0 {
            let back = packet(TCP, to, (hosts.node, port));
            assert_eq!(bed.arrive(&back), passed(&packet(TCP, to, from)));
        } else {
            assert_eq!(bed.open(TCP, from, to), port);
        }
        assert_eq!(bed.nat(), whole);
    }
}

#[test]
#[ignore = "needs root"]
fn errors_about_what_was_translated_find_who_sent_it() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let is_v4 = hosts.far.is_ipv4();
        for (protocol, far_port) in [(TCP, 443), (UDP, 53), (icmp(hosts.far), 0), (SCTP, 443)] {
            let (from, to) = ((hosts.endpoint, 1000), (hosts.far, far_port));
            let port = bed.open(protocol, from, to);
            let outside = around(
                hosts.node,
                to.0,
                protocol,
                &content(protocol, (hosts.node, port), to),
            );
            let inside = around(from.0, to.0, protocol, &content(protocol, from, to));
            let header = if is_v4 { 20 } else { 40 };
            for held in [header + 8, outside.len()] {
                let arrived = error(hosts.router, hosts.node, &outside[..held]);
                let expected = error(hosts.router, from.0, &inside[..held]);
                assert_eq!(bed.arrive(&arrived), passed(&expected), "{protocol} {held}");
            }
        }
        // An error about a packet that this host sent itself.
        let own = around(
            hosts.node,
            hosts.far,
            UDP,
            &content(UDP, (hosts.node, 50_000), (hosts.far, 53)),
        );
        let arrived = error(hosts.router, hosts.node, &own);
        assert_eq!(bed.arrive(&arrived), passed(&arrived));
    }
}

#[test]
#[ignore = "needs root"]
fn errors_about_what_came_back_leave_as_if_this_node_had_got_it() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for (protocol, far_port) in [(TCP, 443), (UDP, 53)] {
            let (from, to) = ((hosts.endpoint, 1000), (hosts.far, far_port));
            let port = bed.open(protocol, from, to);
            let outside = around(
                to.0,
                hosts.node,
                protocol,
                &content(protocol, to, (hosts.node, port)),
            );
            let inside = around(to.0, from.0, protocol, &content(protocol, to, from));
            let expected = passed(&error(hosts.node, hosts.far, &outside));
            // Sent by the endpoint itself, and by this host on the endpoint's behalf.
            for sender in [hosts.endpoint, hosts.node] {
                let sent = error(sender, hosts.far, &inside);
                assert_eq!(bed.leave(&sent), expected, "{protocol}");
            }
        }
        // An error about a packet to the endpoint's own address.
        let request = packet(UDP, (hosts.far, 50_000), (hosts.endpoint, 99));
        let _ = bed.0.run("to_endpoint", &request);
        let sent = error(hosts.endpoint, hosts.far, &request[14..]);
        assert_eq!(bed.leave(&sent), passed(&sent));
        // An error about an unknown packet.
        let request = packet(UDP, (hosts.far, 50_001), (hosts.endpoint, 99));
        let sent = error(hosts.endpoint, hosts.far, &request[14..]);
        assert_eq!(bed.leave(&sent), dropped(&sent));
    }
}

#[test]
#[ignore = "needs root"]
fn an_error_about_a_flow_whose_translation_is_lost_reports_no_address_of_an_endpoint() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let (from, to) = ((hosts.endpoint, 1000), (hosts.far, 53));
        bed.open(UDP, from, to);
        bed.0.maps().flush_nat(|_, _| true).expect("a flush");
        let came = packet(UDP, to, from);
        let sent = error(hosts.endpoint, hosts.far, &came[14..]);
        assert_eq!(bed.leave(&sent), dropped(&sent));
    }
}

/// Permission to send to one host must not let an endpoint send data to other hosts disguised as ICMP errors.
#[test]
#[ignore = "needs root"]
fn errors_leave_only_for_who_sent_the_packet_that_they_are_about() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let header = if hosts.far.is_ipv4() { 20 } else { 40 };
        for (protocol, far_port) in [(TCP, 443), (UDP, 53), (icmp(hosts.far), 0), (SCTP, 443)] {
            let (from, to) = ((hosts.endpoint, 1000), (hosts.far, far_port));
            bed.open(protocol, from, to);
            let (came, sent) = (packet(protocol, to, from), packet(protocol, from, to));
            for held in [header + 8, came.len() - 14] {
                for quoted in [&came, &sent] {
                    let about = &quoted[14..][..held];
                    for (sender, target) in [
                        (hosts.endpoint, hosts.router),
                        (hosts.other_endpoint, hosts.far),
                        (hosts.other_endpoint, hosts.router),
                        (hosts.routed, hosts.router),
                    ] {
                        let error = error(sender, target, about);
                        assert_eq!(
                            bed.leave(&error),
                            dropped(&error),
                            "{protocol} {sender} {target}"
                        );
                    }
                    // The host's own errors pass without masquerading.
                    let error = error(hosts.node, hosts.router, about);
                    assert_eq!(bed.leave(&error), passed(&error), "{protocol}");
                }
            }
        }
        // A flow without a translation: an error about a packet to the endpoint's own address.
        let request = packet(UDP, (hosts.far, 50_000), (hosts.endpoint, 99));
        let _ = bed.0.run("to_endpoint", &request);
        for (sender, target) in [
            (hosts.endpoint, hosts.router),
            (hosts.other_endpoint, hosts.far),
        ] {
            let error = error(sender, target, &request[14..]);
            assert_eq!(bed.leave(&error), dropped(&error), "{sender} {target}");
        }
    }
}

/// A frame with a destination unreachable error about a packet.
fn error(from: IpAddr, to: IpAddr, about: &[u8]) -> Vec<u8> {
    let message = |kind| {
        let mut message = vec![kind, 1, 0, 0, 0, 0, 0, 0];
        message.extend(about);
        message
    };
    if from.is_ipv4() {
        let mut message = message(3);
        let check = checksum(&[&message]);
        message[2..4].copy_from_slice(&check.to_be_bytes());
        framed(true, &around(from, to, ICMP, &message))
    } else {
        let message = ip6(from, to, ICMPV6).with_checksum(message(1));
        framed(false, &around(from, to, ICMPV6, &message))
    }
}

/// The fragment of a UDP packet that starts at `offset`, in units of eight bytes.
fn fragment(from: IpAddr, to: IpAddr, id: u16, offset: u16, more: bool, part: &[u8]) -> Vec<u8> {
    if from.is_ipv4() {
        let ip = Ipv4 {
            id,
            fragment: offset | if more { MORE_FRAGMENTS } else { 0 },
            ..ip4(from, to, UDP)
        };
        return framed(true, &ip.packet(part));
    }
    let mut bytes = vec![UDP, 0];
    bytes.extend((offset << 3 | u16::from(more)).to_be_bytes());
    bytes.extend(u32::from(id).to_be_bytes());
    bytes.extend(part);
    framed(false, &ip6(from, to, 44).packet(&bytes))
}

#[test]
#[ignore = "needs root"]
fn fragments_are_translated_like_their_first() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let (from, to) = ((hosts.endpoint, 1000), (hosts.far, 53));
        let parts = |from: End, to: End, id| {
            let whole = content(UDP, from, to);
            [
                fragment(from.0, to.0, id, 0, true, &whole[..16]),
                fragment(from.0, to.0, id, 2, false, &whole[16..]),
            ]
        };
        let [first, later] = parts(from, to, 7);
        // Until the first fragment arrives, nothing shows which flow a later one belongs to.
        assert_eq!(bed.leave(&later), dropped(&later));
        let outcome = bed.send(&first);
        // In IPv6, the first fragment also has a fragment header of eight bytes.
        let unfragmented = match hosts.far {
            IpAddr::V4(_) => outcome.bytes.clone(),
            IpAddr::V6(_) => [&outcome.bytes[..54], &outcome.bytes[62..]].concat(),
        };
        let port = source_port(UDP, &unfragmented);
        let expected = parts((hosts.node, port), to, 7);
        assert_eq!(outcome, passed(&expected[0]));
        assert_eq!(bed.send(&later), passed(&expected[1]));

        let back = parts(to, (hosts.node, port), 9);
        let expected = parts(to, from, 9);
        assert_eq!(bed.arrive(&back[1]), passed(&back[1]), "too early");
        assert_eq!(bed.arrive(&back[0]), passed(&expected[0]));
        assert_eq!(bed.arrive(&back[1]), passed(&expected[1]));
    }
    assert_eq!(bed.0.counted(Reason::FragmentUnknown), 2);
}

#[test]
#[ignore = "needs root"]
fn hosts_behind_a_gateway_are_masqueraded_and_tracked_by_the_uplinks() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let (from, to) = ((hosts.routed, 1000), (hosts.far, 53));
        let sent = packet(UDP, from, to);
        let outcome = bed.leave(&sent);
        let port = source_port(UDP, &outcome.bytes);
        assert_eq!(outcome, passed(&packet(UDP, (hosts.node, port), to)));
        let back = packet(UDP, to, (hosts.node, port));
        assert_eq!(bed.arrive(&back), passed(&packet(UDP, to, from)));
        let entry = bed.flow(from);
        assert_eq!((entry.tx_packets, entry.rx_packets), (1, 1));
        assert!(entry.flags & CT_MASQUERADED != 0);
        // Replies in a flow that was opened from outside leave unchanged.
        let (asks, answers) = ((hosts.far, 50_000), (hosts.routed, 8080));
        let request = packet(UDP, asks, answers);
        assert_eq!(bed.arrive(&request), passed(&request));
        let reply = packet(UDP, answers, asks);
        assert_eq!(bed.leave(&reply), passed(&reply));
    }
}

/// Otherwise the endpoint's next packet would count as a reply before its policy was checked.
#[test]
#[ignore = "needs root"]
fn a_packet_to_an_endpoint_in_a_gateways_network_is_not_entered_on_its_arrival() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        bed.add_endpoint(hosts.routed);
        for protocol in [TCP, UDP] {
            let request = packet(protocol, (hosts.far, 50_000), (hosts.routed, 8080));
            assert_eq!(bed.arrive(&request), passed(&request));
            assert_eq!(bed.flows(), [], "of protocol {protocol}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn what_an_uplink_enters_for_an_endpoint_names_the_endpoints_device() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        bed.add_endpoint(hosts.routed);
        let _ = bed.leave(&packet(UDP, (hosts.routed, 1000), (hosts.far, 53)));
        assert_eq!(bed.flow((hosts.routed, 1000)).ifindex, ENDPOINT_IFINDEX);
    }
}

/// Otherwise, arriving packets would prolong a flow that the endpoint's policy refuses.
#[test]
#[ignore = "needs root"]
fn what_arrives_for_an_endpoint_is_entered_by_its_own_programs_alone() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let (from, to) = ((hosts.routed, 1000), (hosts.far, 53));
        let outcome = bed.leave(&packet(UDP, from, to));
        let port = source_port(UDP, &outcome.bytes);
        bed.add_endpoint(hosts.routed);
        let back = packet(UDP, to, (hosts.node, port));
        assert_eq!(bed.arrive(&back), passed(&packet(UDP, to, from)));
        let entry = bed.flow(from);
        assert_eq!((entry.tx_packets, entry.rx_packets), (1, 0));
    }
}

#[test]
#[ignore = "needs root"]
fn the_hosts_own_flows_keep_their_ports_unless_another_has_them() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        let to = (hosts.far, 443);
        let own = packet(TCP, (hosts.node, 40_000), to);
        assert_eq!(bed.leave(&own), passed(&own));
        assert!(bed.nat().iter().all(|(_, to)| to.host_local));
        assert_eq!(
            bed.flow((hosts.node, 40_000)).source_identity,
            identity::HOST
        );
        // An endpoint with the same source port gets another one.
        assert_ne!(bed.open(TCP, (hosts.endpoint, 40_000), to), 40_000);
        let back = packet(TCP, to, (hosts.node, 40_000));
        assert_eq!(bed.arrive(&back), passed(&back));
        assert_eq!(bed.flow((hosts.node, 40_000)).rx_packets, 1);
        // If an endpoint has the port already, the host's flow is translated.
        assert_eq!(bed.open(TCP, (hosts.endpoint, 41_000), to), 41_000);
        let own = packet(TCP, (hosts.node, 41_000), to);
        let outcome = bed.leave(&own);
        let port = source_port(TCP, &outcome.bytes);
        assert_ne!(port, 41_000);
        assert_eq!(outcome, passed(&packet(TCP, (hosts.node, port), to)));
        let back = packet(TCP, to, (hosts.node, port));
        let expected = packet(TCP, to, (hosts.node, 41_000));
        assert_eq!(bed.arrive(&back), passed(&expected));
        // Ports outside the masquerading range need no entry.
        let entries = bed.nat().len();
        let own = packet(TCP, (hosts.node, 999), to);
        assert_eq!(bed.leave(&own), passed(&own));
        assert_eq!(bed.nat().len(), entries);
        bed.0.maps().flush_nat(|_, _| true).expect("a flush");
    }
}

#[test]
#[ignore = "needs root"]
fn the_hosts_own_flow_to_a_backend_gets_another_port_where_a_services_client_has_its_own() {
    let bed = Bed::new("32768-65535");
    for hosts in both() {
        for protocol in [TCP, UDP] {
            let (client, backend) = ((hosts.far, 40_000), (hosts.native, 8080));
            let asked = packet(protocol, client, backend);
            let sent = bed.0.run_with("to_netdev", &asked, &forwarded(MARK_SERVED));
            let own = packet(protocol, (hosts.node, 40_000), backend);
            assert_eq!(sent, passed(&own));
            // A process on the host uses the same port.
            let outcome = bed.leave(&own);
            let port = source_port(protocol, &outcome.bytes);
            assert_ne!(port, 40_000);
            let translated = packet(protocol, (hosts.node, port), backend);
            assert_eq!(outcome, passed(&translated));
            for (port, asked_by) in [(40_000, client), (port, (hosts.node, 40_000))] {
                let back = packet(protocol, backend, (hosts.node, port));
                let expected = packet(protocol, backend, asked_by);
                assert_eq!(bed.arrive(&back), passed(&expected));
            }
            // The host's flow keeps its new port, and its other flows are not affected.
            assert_eq!(bed.leave(&own), passed(&translated));
            let entries = bed.nat();
            for (port, to) in [(40_001, backend), (40_000, (hosts.native, 8081))] {
                let other = packet(protocol, (hosts.node, port), to);
                assert_eq!(bed.leave(&other), passed(&other));
            }
            assert_eq!(bed.nat(), entries);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn the_hosts_own_flow_to_a_backend_keeps_its_port_once_the_flow_of_a_services_client_is_over() {
    let bed = Bed::new("32768-65535");
    let hosts = v4();
    for protocol in [TCP, UDP] {
        let asked = packet(protocol, (hosts.far, 40_000), (hosts.native, 8080));
        bed.0.run_with("to_netdev", &asked, &forwarded(MARK_SERVED));
        bed.expire_flows4();
        let own = packet(protocol, (hosts.node, 40_000), (hosts.native, 8080));
        assert_eq!(bed.leave(&own), passed(&own));
    }
    assert_eq!(bed.nat(), []);
}

#[test]
#[ignore = "needs root"]
fn packets_behind_vlan_tags_are_translated_in_their_place() {
    let bed = Bed::new("32768-65535");
    let tags = [(0x88a8, 5), (0x8100, 6)];
    for hosts in both() {
        let (from, to) = ((hosts.endpoint, 40_000), (hosts.far, 443));
        let port = bed.open(TCP, from, to);
        let sent = tagged(&packet(TCP, from, to), &tags);
        let expected = tagged(&packet(TCP, (hosts.node, port), to), &tags);
        assert_eq!(bed.leave(&sent), passed(&expected));
        let back = tagged(&packet(TCP, to, (hosts.node, port)), &tags);
        assert_eq!(
            bed.arrive(&back),
            passed(&tagged(&packet(TCP, to, from), &tags))
        );
    }
}

#[test]
#[ignore = "needs root"]
fn a_udp_checksum_that_was_left_out_stays_left_out() {
    let bed = Bed::new("32768-65535");
    let hosts = v4();
    let unsummed = |from: End, to: End| {
        let mut bytes = content(UDP, from, to);
        bytes[6..8].fill(0);
        framed(true, &around(from.0, to.0, UDP, &bytes))
    };
    let (from, to) = ((hosts.endpoint, 40_000), (hosts.far, 53));
    let expected = unsummed((hosts.node, 40_000), to);
    assert_eq!(bed.send(&unsummed(from, to)), passed(&expected));
}

#[test]
#[ignore = "needs root"]
fn nothing_is_masqueraded_that_was_not_asked_for() {
    let mut bed = Bed::new("32768-65535");
    bed.0
        .datapath
        .set_masquerade(Default::default())
        .expect("the settings");
    for hosts in both() {
        for from in [hosts.endpoint, hosts.routed, hosts.node] {
            let sent = packet(TCP, (from, 40_000), (hosts.far, 443));
            assert_eq!(bed.leave(&sent), passed(&sent));
        }
    }
    assert_eq!((bed.nat(), bed.flows()), (vec![], vec![]));
}
