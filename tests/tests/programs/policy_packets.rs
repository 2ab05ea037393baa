//! Policy of workload endpoints: the endpoint programs on crafted packets, with tables written the way the agent writes
//! them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::thread;

use health_common::config::DatapathConfig;
use health_common::endpoint::{
    ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, ENDPOINT_HEALTH, EndpointInfo,
};
use health_common::events::{EVENT_DROP, MonitorFilter, WANT_DROP};
use health_common::ipcache::IpcacheEntry;
use health_common::metrics::{Direction, Reason};
use health_common::policy::{
    ANY_IDENTITY, POLICY_EGRESS, POLICY_ENTRIES, POLICY_INGRESS, PREFIX_ALL, PREFIX_PORT,
    PREFIX_PROTOCOL, VERDICT_ALLOW, VERDICT_DENY, VERDICT_NONE,
};
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::Datapath;
use health_datapath::events::{Ring as _, Switch as _};
use health_datapath::ipcache::Ipcache;
use health_datapath::policy::{PolicyError, PolicyMatch, PolicyTables};
use ipnet::IpNet;
use tests::packet::{ARP, IPV4, IPV6, Ipv4, Ipv6, echo, echo4, ethernet, payload};
use tests::testrun::{
    DROP, GO_ON, IFINDEX, LONG_TIMEOUTS, Outcome, REDIRECT, TestRun, run_program,
};
use tests::{RaisedAtEnd, seed};

use crate::endpoint_packets::Way::{self, In, Out};
use crate::endpoint_packets::{
    ACK, ENDPOINT4, ENDPOINT6, FIN, GRE, HOST_MAC, ICMP, ICMPV6, MAC, MORE_FRAGMENTS, RST, SCTP,
    SYN, TCP, UDP, frame, framed, hosts, segment, with_ports,
};

const GATEWAY4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
pub(crate) const GATEWAY6: &str = "fd00:10:244:1::1";
/// The identity to which the tables belong.
const SUBJECT: u32 = 4242;
pub(crate) const APP: u32 = 1000;
const DATABASE: u32 = 1001;

pub(crate) const BOTH: u32 = ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;

/// The rule direction that applies to packets sent this way.
fn direction(way: Way) -> u8 {
    match way {
        In => POLICY_INGRESS,
        Out => POLICY_EGRESS,
    }
}

pub(crate) struct Bed {
    pub(crate) run: TestRun,
    tables: PolicyTables,
    pub(crate) ipcache: Ipcache,
}

impl Bed {
    /// An endpoint whose policy is table 1.
    pub(crate) fn new(rules: &[(PolicyMatch, u8)]) -> Self {
        let mut run = TestRun::load();
        let config = DatapathConfig {
            layout_version: LAYOUT_VERSION,
            gateway4: GATEWAY4.into(),
            gateway6: GATEWAY6.parse::<Ipv6Addr>().expect("an address").into(),
            timeouts: LONG_TIMEOUTS,
            ..DatapathConfig::default()
        };
        run.datapath.configure(config).expect("the settings");
        let mut ipcache = run.datapath.ipcache().expect("the ipcache");
        ipcache.set_all(&prefixes()).expect("room for prefixes");
        let mut tables = run.datapath.policy().expect("the tables");
        tables
            .install(1, SUBJECT, rules.iter().copied())
            .expect("room for a table");
        set_endpoint(&mut run.datapath, BOTH, 1);
        Self {
            run,
            tables,
            ipcache,
        }
    }

    /// The verdict on a packet: the drop reason, or `None` if the packet passes.
    pub(crate) fn verdict(&self, way: Way, packet: &[u8]) -> Option<Reason> {
        let before = self.drops();
        let outcome = self.run.run(way.program(), packet);
        assert_eq!(outcome.bytes, packet, "a packet was changed");
        let after = self.drops();
        let counted: Vec<Reason> = after
            .iter()
            .zip(before)
            .filter(|((_, after), (_, before))| after > before)
            .map(|((reason, _), _)| *reason)
            .collect();
        match (outcome.code, &counted[..]) {
            (GO_ON, []) => None,
            (DROP, [reason]) => Some(*reason),
            other => panic!("{way:?}: {other:?}"),
        }
    }

    /// Asserts that each packet is dropped for this reason. Calling [`verdict`](Self::verdict) for each would show the
    /// same, but would read all counters twice per packet.
    pub(crate) fn assert_dropped(&self, way: Way, packets: &[Vec<u8>], reason: Reason) {
        let mut expected = self.drops();
        for packet in packets {
            let outcome = self.run.run(way.program(), packet);
            let expected = Outcome {
                code: DROP,
                bytes: packet.clone(),
            };
            assert_eq!(outcome, expected, "{packet:x?}");
        }
        let dropped = expected.iter_mut().find(|(one, _)| *one == reason);
        dropped.expect("a reason to drop").1 += packets.len() as u64;
        if self.drops() == expected {
            return;
        }
        for packet in packets {
            assert_eq!(self.verdict(way, packet), Some(reason), "{packet:x?}");
        }
        panic!("the counters of all packets are not those of each");
    }

    fn drops(&self) -> Vec<(Reason, u64)> {
        let rows = self.run.maps().metrics().expect("the counters");
        let counted = |reason| {
            let rows = rows.iter().filter(|row| row.reason == reason as u8);
            rows.map(|row| row.packets).sum()
        };
        let drops = Reason::ALL.into_iter().filter(|reason| reason.is_drop());
        drops.map(|reason| (reason, counted(reason))).collect()
    }

    /// Switches the endpoint to a new table, and removes the old one.
    pub(crate) fn change(&mut self, former: u32, table: u32, rules: &[(PolicyMatch, u8)]) {
        self.tables
            .install(table, SUBJECT, rules.iter().copied())
            .expect("room for a table");
        set_endpoint(&mut self.run.datapath, BOTH, table);
        self.tables.remove(&[former]).expect("a table less");
    }
}

pub(crate) fn set_endpoint(datapath: &mut Datapath, flags: u32, policy: u32) {
    let addresses = [ENDPOINT4.into(), ENDPOINT6.into()];
    set_addresses(datapath, &addresses, flags, policy);
}

/// Sets up an endpoint with these addresses.
fn set_addresses(datapath: &mut Datapath, addresses: &[IpAddr], flags: u32, policy: u32) {
    let info = EndpointInfo {
        ifindex: IFINDEX,
        identity: SUBJECT,
        flags,
        policy,
        id: 99,
        mac: MAC,
        host_mac: HOST_MAC,
        pad: 0,
    };
    let endpoints: Vec<_> = addresses.iter().map(|address| (*address, info)).collect();
    datapath.set_endpoints(&endpoints).expect("the endpoint");
}

/// Prefixes of which some contain others.
fn prefixes() -> BTreeMap<IpNet, IpcacheEntry> {
    [
        ("10.1.0.0/16", APP),
        ("10.1.2.0/24", DATABASE),
        ("172.30.0.1/32", identity::HOST),
        ("2001:db8:1::/48", APP),
        ("2001:db8:1:2::/64", DATABASE),
        ("fd00:30::1/128", identity::HOST),
        ("fd00:10:244:1::1/128", identity::HOST),
    ]
    .into_iter()
    .map(|(net, identity)| {
        let entry = IpcacheEntry {
            identity,
            ..IpcacheEntry::default()
        };
        (net.parse().expect("a prefix"), entry)
    })
    .collect()
}

/// An address that belongs to this identity.
pub(crate) fn address(identity: u32, is_v4: bool) -> IpAddr {
    let (v4, v6) = match identity {
        APP => ("10.1.9.9", "2001:db8:1:9::9"),
        DATABASE => ("10.1.2.9", "2001:db8:1:2::9"),
        identity::HOST => ("172.30.0.1", "fd00:30::1"),
        identity::WORLD => ("192.0.2.9", "2001:db8:ffff::9"),
        other => panic!("nobody is {other}"),
    };
    if is_v4 { v4 } else { v6 }.parse().expect("an address")
}

/// A rule for a port or, with fewer prefix bits, for a range of ports.
fn port(way: Way, identity: u32, protocol: u8, port: u16, bits: u32) -> PolicyMatch {
    PolicyMatch {
        direction: direction(way),
        identity,
        protocol,
        port_be: port.to_be(),
        prefix_len: PREFIX_PROTOCOL + bits,
    }
}

/// A rule for one port.
pub(crate) fn exactly(way: Way, identity: u32, protocol: u8, number: u16) -> PolicyMatch {
    port(
        way,
        identity,
        protocol,
        number,
        PREFIX_PORT - PREFIX_PROTOCOL,
    )
}

/// A rule for all packets of one protocol.
pub(crate) fn protocol(way: Way, identity: u32, protocol: u8) -> PolicyMatch {
    port(way, identity, protocol, 0, 0)
}

/// A rule for everything.
pub(crate) fn everything(way: Way, identity: u32) -> PolicyMatch {
    PolicyMatch {
        direction: direction(way),
        identity,
        protocol: 0,
        port_be: 0,
        prefix_len: PREFIX_ALL,
    }
}

/// A port or identifier that no packet has used yet.
pub(crate) fn fresh() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A UDP packet between two addresses.
fn between(source: IpAddr, destination: IpAddr, content: &[u8]) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                protocol: UDP,
                ..Ipv4::icmp(source, destination)
            };
            ip.packet(content)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: UDP,
                ..Ipv6::icmp(source, destination)
            };
            ip.packet(content)
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// An ICMP message of the peer's IP version.
pub(crate) fn message(way: Way, peer: IpAddr, kind: u8, id: u16) -> Vec<u8> {
    match hosts(way, peer) {
        (IpAddr::V4(_), _) => frame(way, peer, ICMP, &echo4(kind, 0, id, 1, &payload(24))),
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6::icmp(source, destination);
            let message = ip.with_checksum(echo(kind, 0, id, 1, &payload(24)));
            frame(way, peer, ICMPV6, &message)
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// The first packet of a flow to this port. For ICMP, a message of this type.
pub(crate) fn opening(way: Way, peer: IpAddr, protocol: u8, number: u16) -> Vec<u8> {
    match protocol {
        TCP => segment(way, peer, (fresh(), number), SYN),
        UDP | SCTP => frame(way, peer, protocol, &with_ports(fresh(), number)),
        ICMP | ICMPV6 => message(way, peer, number as u8, fresh()),
        other => frame(way, peer, other, &payload(40)),
    }
}

/// The expected verdict from a linear search: the longest matching prefix among the peer's entries, or else among those
/// for any identity.
fn expected(
    rules: &[(PolicyMatch, u8)],
    way: Way,
    peer: u32,
    protocol: u8,
    number: u16,
) -> Option<Reason> {
    let of = |identity: u32| {
        rules
            .iter()
            .filter(|(rule, _)| rule.direction == direction(way) && rule.identity == identity)
            .filter(|(rule, _)| rule.prefix_len < PREFIX_PROTOCOL || rule.protocol == protocol)
            .filter(|(rule, _)| {
                let any = PREFIX_PORT - rule.prefix_len.max(PREFIX_PROTOCOL);
                u32::from(number) >> any == u32::from(u16::from_be(rule.port_be)) >> any
            })
            .max_by_key(|(rule, _)| rule.prefix_len)
            .map(|(_, verdict)| *verdict)
    };
    match of(peer).or_else(|| of(ANY_IDENTITY)) {
        Some(VERDICT_ALLOW) => None,
        Some(VERDICT_DENY) => Some(Reason::PolicyDeniedByRule),
        _ => Some(Reason::PolicyDenied),
    }
}

#[test]
#[ignore = "needs root"]
fn each_packet_has_the_verdict_of_its_identity_port_protocol_and_direction() {
    const ALLOWED: Option<Reason> = None;
    const NOT_ALLOWED: Option<Reason> = Some(Reason::PolicyDenied);
    const DENIED: Option<Reason> = Some(Reason::PolicyDeniedByRule);
    let bed = Bed::new(&[
        (exactly(In, APP, TCP, 80), VERDICT_ALLOW),
        // Ports 8080 to 8087, of which one is denied and one is not allowed.
        (port(In, APP, TCP, 8080, 13), VERDICT_ALLOW),
        (exactly(In, APP, TCP, 8083), VERDICT_DENY),
        (exactly(In, APP, TCP, 8084), VERDICT_NONE),
        (protocol(In, APP, UDP), VERDICT_ALLOW),
        (exactly(In, APP, SCTP, 7), VERDICT_ALLOW),
        (everything(In, identity::HOST), VERDICT_ALLOW),
        (exactly(In, identity::HOST, TCP, 22), VERDICT_DENY),
        (exactly(In, ANY_IDENTITY, TCP, 443), VERDICT_ALLOW),
        (exactly(In, ANY_IDENTITY, ICMP, 8), VERDICT_ALLOW),
        (exactly(In, ANY_IDENTITY, ICMPV6, 128), VERDICT_ALLOW),
        (everything(In, DATABASE), VERDICT_DENY),
        (protocol(Out, DATABASE, TCP), VERDICT_ALLOW),
        (exactly(Out, identity::WORLD, UDP, 53), VERDICT_ALLOW),
        (protocol(Out, APP, GRE), VERDICT_ALLOW),
    ]);
    let world = identity::WORLD;
    let host = identity::HOST;
    for (way, peer, protocol, number, verdict) in [
        (In, APP, TCP, 80, ALLOWED),
        (In, APP, TCP, 81, NOT_ALLOWED),
        (In, APP, TCP, 8079, NOT_ALLOWED),
        (In, APP, TCP, 8080, ALLOWED),
        (In, APP, TCP, 8082, ALLOWED),
        (In, APP, TCP, 8083, DENIED),
        (In, APP, TCP, 8084, NOT_ALLOWED),
        (In, APP, TCP, 8087, ALLOWED),
        (In, APP, TCP, 8088, NOT_ALLOWED),
        (In, APP, UDP, 0, ALLOWED),
        (In, APP, UDP, 65_535, ALLOWED),
        (In, APP, SCTP, 7, ALLOWED),
        (In, APP, SCTP, 8, NOT_ALLOWED),
        (In, APP, GRE, 0, NOT_ALLOWED),
        // Ports without an entry for this identity: the entry for any identity applies.
        (In, APP, TCP, 443, ALLOWED),
        (In, world, TCP, 443, ALLOWED),
        (In, world, TCP, 80, NOT_ALLOWED),
        (In, world, UDP, 443, NOT_ALLOWED),
        (In, host, TCP, 1, ALLOWED),
        (In, host, GRE, 0, ALLOWED),
        (In, host, TCP, 22, DENIED),
        (In, DATABASE, TCP, 443, DENIED),
        (In, DATABASE, GRE, 0, DENIED),
        // The same rules in the other direction.
        (Out, APP, TCP, 80, NOT_ALLOWED),
        (Out, world, TCP, 443, NOT_ALLOWED),
        (Out, DATABASE, TCP, 5432, ALLOWED),
        (Out, DATABASE, UDP, 5432, NOT_ALLOWED),
        (Out, world, UDP, 53, ALLOWED),
        (Out, world, TCP, 53, NOT_ALLOWED),
        (Out, APP, GRE, 0, ALLOWED),
    ] {
        for is_v4 in [true, false] {
            let packet = opening(way, address(peer, is_v4), protocol, number);
            let what = format!("{way:?} {peer} {protocol} {number} v4 {is_v4}");
            assert_eq!(bed.verdict(way, &packet), verdict, "{what}");
        }
    }
    // For ICMP, the type stands in for the port.
    for (is_v4, request, other) in [(true, 8, 13), (false, 128, 139)] {
        let icmp = if is_v4 { ICMP } else { ICMPV6 };
        let of = |peer, kind| opening(In, address(peer, is_v4), icmp, kind);
        assert_eq!(bed.verdict(In, &of(APP, request)), ALLOWED);
        assert_eq!(bed.verdict(In, &of(APP, other)), NOT_ALLOWED);
        assert_eq!(bed.verdict(In, &of(host, other)), ALLOWED);
        assert_eq!(bed.verdict(In, &of(DATABASE, request)), DENIED);
    }
}

#[test]
#[ignore = "needs root"]
fn random_tables_are_what_a_plain_reading_of_them_says() {
    let mut random = fastrand::Rng::with_seed(seed());
    let peers = [APP, DATABASE, identity::HOST, identity::WORLD];
    let protocols = [TCP, UDP, SCTP, GRE];
    let mut verdicts = [0; 3];
    for _ in 0..4 {
        let mut rules = BTreeMap::new();
        while rules.len() < 48 {
            let way = if random.bool() { In } else { Out };
            let identity = random
                .choice([&peers[..], &[ANY_IDENTITY]].concat())
                .expect("one");
            let rule = match random.u32(0..8) {
                0 => everything(way, identity),
                1 => protocol(way, identity, random.choice(protocols).expect("one")),
                _ => {
                    let bits = random.u32(1..=16);
                    let number = random.u16(..64) >> (16 - bits) << (16 - bits);
                    port(
                        way,
                        identity,
                        random.choice(protocols).expect("one"),
                        number,
                        bits,
                    )
                }
            };
            let verdict = [VERDICT_NONE, VERDICT_ALLOW, VERDICT_ALLOW, VERDICT_DENY];
            rules.insert(rule, random.choice(verdict).expect("one"));
        }
        let rules: Vec<(PolicyMatch, u8)> = rules.into_iter().collect();
        let bed = Bed::new(&rules);
        for _ in 0..500 {
            let way = if random.bool() { In } else { Out };
            let peer = random.choice(peers).expect("one");
            // Without ports, a packet in one direction would count as the reply to one in the other direction.
            let known = if way == In {
                &protocols[..]
            } else {
                &[TCP, UDP, SCTP]
            };
            let protocol = *random.choice(known).expect("one");
            let number = if protocol == GRE { 0 } else { random.u16(..64) };
            let packet = opening(way, address(peer, random.bool()), protocol, number);
            let expected = expected(&rules, way, peer, protocol, number);
            let what = format!("{way:?} {peer} {protocol} {number}: {rules:?}");
            assert_eq!(bed.verdict(way, &packet), expected, "{what}");
            verdicts[match expected {
                None => 0,
                Some(Reason::PolicyDenied) => 1,
                Some(_) => 2,
            }] += 1;
        }
    }
    assert!(verdicts.iter().all(|&count| count > 100), "{verdicts:?}");
}

#[test]
#[ignore = "needs root"]
fn what_an_endpoint_asked_for_is_answered_and_nothing_else_is() {
    let bed = Bed::new(&[
        (everything(Out, ANY_IDENTITY), VERDICT_ALLOW),
        (exactly(In, APP, TCP, 80), VERDICT_ALLOW),
        (exactly(In, APP, UDP, 53), VERDICT_ALLOW),
    ]);
    for is_v4 in [true, false] {
        let peer = address(identity::WORLD, is_v4);
        let client = fresh();
        assert_eq!(
            bed.verdict(Out, &segment(Out, peer, (client, 443), SYN)),
            None
        );
        for flags in [SYN | ACK, ACK, FIN | ACK, RST] {
            let reply = segment(In, peer, (443, client), flags);
            assert_eq!(bed.verdict(In, &reply), None, "{flags}");
        }
        // A packet from or to another port is not a reply, nor is a new connection from the same ports.
        let denied = Some(Reason::PolicyDenied);
        assert_eq!(
            bed.verdict(In, &segment(In, peer, (444, client), ACK)),
            denied
        );
        let client = fresh();
        assert_eq!(
            bed.verdict(Out, &segment(Out, peer, (client, 443), SYN)),
            None
        );
        assert_eq!(
            bed.verdict(In, &segment(In, peer, (443, client), SYN | ACK)),
            None
        );
        assert_eq!(
            bed.verdict(Out, &segment(Out, peer, (client, 443), ACK)),
            None
        );
        assert_eq!(
            bed.verdict(In, &segment(In, peer, (443, client), SYN)),
            denied
        );

        let (request, reply) = if is_v4 { (8, 0) } else { (128, 129) };
        let id = fresh();
        assert_eq!(bed.verdict(Out, &message(Out, peer, request, id)), None);
        assert_eq!(bed.verdict(In, &message(In, peer, reply, id)), None);
        assert_eq!(bed.verdict(In, &message(In, peer, reply, id + 1)), denied);
        fresh();

        let client = fresh();
        let query = frame(In, address(APP, is_v4), UDP, &with_ports(client, 53));
        assert_eq!(bed.verdict(In, &query), None);
    }
    // The reverse case: the endpoint may answer what it receives although it may not open flows.
    let mut bed = bed;
    bed.change(1, 2, &[(exactly(In, APP, UDP, 53), VERDICT_ALLOW)]);
    for is_v4 in [true, false] {
        let peer = address(APP, is_v4);
        let client = fresh();
        assert_eq!(
            bed.verdict(In, &frame(In, peer, UDP, &with_ports(client, 53))),
            None
        );
        assert_eq!(
            bed.verdict(Out, &frame(Out, peer, UDP, &with_ports(53, client))),
            None
        );
        let other = frame(Out, peer, UDP, &with_ports(54, client));
        assert_eq!(bed.verdict(Out, &other), Some(Reason::PolicyDenied));
    }
}

#[test]
#[ignore = "needs root"]
fn what_is_refused_leaves_no_flow_and_what_is_allowed_reports_who_opened_it() {
    let bed = Bed::new(&[
        (exactly(In, APP, TCP, 80), VERDICT_ALLOW),
        (exactly(Out, APP, TCP, 80), VERDICT_ALLOW),
    ]);
    for way in [In, Out] {
        bed.verdict(way, &opening(way, address(APP, true), TCP, 81));
        bed.verdict(way, &opening(way, address(identity::WORLD, false), UDP, 80));
    }
    assert_eq!(bed.run.maps().conntrack().expect("the flows"), []);
    for (way, is_v4, opener) in [
        (In, true, APP),
        (In, false, APP),
        (Out, true, SUBJECT),
        (Out, false, SUBJECT),
    ] {
        let packet = opening(way, address(APP, is_v4), TCP, 80);
        assert_eq!(bed.verdict(way, &packet), None);
        let flows = bed.run.maps().conntrack().expect("the flows");
        let (_, entry) = flows
            .iter()
            .find(|(flow, _)| flow.inbound == (way == In) && flow.source.is_ipv4() == is_v4)
            .expect("the flow");
        assert_eq!(entry.source_identity, opener);
    }
}

#[test]
#[ignore = "needs root"]
fn a_change_of_policy_ends_the_flows_that_it_no_longer_allows() {
    for way in [In, Out] {
        for is_v4 in [true, false] {
            let peer = address(APP, is_v4);
            let mut bed = Bed::new(&[(protocol(way, APP, TCP), VERDICT_ALLOW)]);
            let ports = (fresh(), 80);
            let kept = (fresh(), 443);
            for (client, server) in [ports, kept] {
                for (way, ports, flags) in [
                    (way, (client, server), SYN),
                    (way.back(), (server, client), SYN | ACK),
                    (way, (client, server), ACK),
                ] {
                    assert_eq!(bed.verdict(way, &segment(way, peer, ports, flags)), None);
                }
            }
            bed.change(1, 2, &[(exactly(way, APP, TCP, 443), VERDICT_ALLOW)]);
            let data = |ports| segment(way, peer, ports, ACK);
            assert_eq!(bed.verdict(way, &data(ports)), Some(Reason::PolicyDenied));
            assert_eq!(bed.verdict(way, &data(kept)), None);
            bed.change(2, 3, &[(protocol(way, APP, TCP), VERDICT_DENY)]);
            assert_eq!(
                bed.verdict(way, &data(kept)),
                Some(Reason::PolicyDeniedByRule)
            );
            bed.change(3, 4, &[(protocol(way, APP, TCP), VERDICT_ALLOW)]);
            assert_eq!(bed.verdict(way, &data(ports)), None);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn errors_about_a_flow_pass_and_others_are_judged_by_their_type() {
    let mut bed = Bed::new(&[(exactly(Out, APP, UDP, 53), VERDICT_ALLOW)]);
    let about = |is_v4: bool, client: u16| {
        let peer = address(APP, is_v4);
        let sent = frame(Out, peer, UDP, &with_ports(client, 53));
        let unreachable = if is_v4 { 3 } else { 1 };
        let mut error = vec![unreachable, 1, 0, 0, 0, 0, 0, 0];
        error.extend(&sent[14..]);
        // A router on the path sends the error.
        let router = address(identity::WORLD, is_v4);
        (
            sent,
            frame(In, router, if is_v4 { ICMP } else { ICMPV6 }, &error),
        )
    };
    for is_v4 in [true, false] {
        let (sent, error) = about(is_v4, fresh());
        assert_eq!(bed.verdict(In, &error), Some(Reason::PolicyDenied));
        assert_eq!(bed.verdict(Out, &sent), None);
        assert_eq!(bed.verdict(In, &error), None);
    }
    bed.change(
        1,
        2,
        &[
            (exactly(In, identity::WORLD, ICMP, 3), VERDICT_ALLOW),
            (exactly(In, identity::WORLD, ICMPV6, 1), VERDICT_ALLOW),
        ],
    );
    for is_v4 in [true, false] {
        assert_eq!(bed.verdict(In, &about(is_v4, fresh()).1), None);
    }
}

/// An error about a known flow must not carry data to anyone except the two ends of that flow.
#[test]
#[ignore = "needs root"]
fn errors_pass_between_the_ends_of_the_flow_that_they_are_about() {
    let mut bed = Bed::new(&[(exactly(Out, APP, UDP, 53), VERDICT_ALLOW)]);
    let denied = Some(Reason::PolicyDenied);
    for is_v4 in [true, false] {
        let (icmp, unreachable, header_len) = if is_v4 {
            (ICMP, 3, 20)
        } else {
            (ICMPV6, 1, 40)
        };
        let app = address(APP, is_v4);
        let others = [DATABASE, identity::WORLD, identity::HOST].map(|of| address(of, is_v4));
        let (own, _) = hosts(Out, app);
        let error = |way: Way, peer: IpAddr, quoted: &[u8]| {
            let start = [unreachable, 1, 0, 0, 0, 0, 0, 0];
            frame(way, peer, icmp, &[&start[..], quoted].concat())
        };
        set_endpoint(&mut bed.run.datapath, BOTH, 1);
        let client = fresh();
        let sent = frame(Out, app, UDP, &with_ports(client, 53));
        let reply = frame(In, app, UDP, &with_ports(53, client));
        assert_eq!(bed.verdict(Out, &sent), None);
        assert_eq!(bed.verdict(In, &reply), None);
        let (sent, reply) = (&sent[14..], &reply[14..]);
        // A flow that belongs to another endpoint of this node.
        let other: IpAddr = if is_v4 {
            "10.244.1.8"
        } else {
            "fd00:10:244:1::8"
        }
        .parse()
        .expect("an address");
        let of_other = between(other, app, &with_ports(client, 53));
        let to_other = between(app, other, &with_ports(53, client));
        set_addresses(&mut bed.run.datapath, &[other, own], BOTH, 1);
        let ethertype = if is_v4 { IPV4 } else { IPV6 };
        let opened = ethernet(HOST_MAC, MAC, ethertype, &of_other);
        assert_eq!(bed.verdict(Out, &opened), None);
        for held in 0..=reply.len() {
            let verdict = if held < header_len + 8 { denied } else { None };
            assert_eq!(
                bed.verdict(Out, &error(Out, app, &reply[..held])),
                verdict,
                "{held}"
            );
            assert_eq!(
                bed.verdict(In, &error(In, app, &sent[..held])),
                verdict,
                "{held}"
            );
            for peer in others {
                let verdict_in = bed.verdict(In, &error(In, peer, &sent[..held]));
                assert_eq!(verdict_in, verdict, "a router: {peer} {held}");
                for quoted in [reply, sent, &of_other, &to_other] {
                    let error = error(Out, peer, &quoted[..held]);
                    assert_eq!(bed.verdict(Out, &error), denied, "{peer} {held}");
                }
            }
            for quoted in [sent, &of_other, &to_other] {
                let error = error(Out, app, &quoted[..held]);
                assert_eq!(bed.verdict(Out, &error), denied, "{held}");
            }
            for quoted in [reply, &of_other, &to_other] {
                let error = error(In, app, &quoted[..held]);
                assert_eq!(bed.verdict(In, &error), denied, "{held}");
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn fragments_have_the_verdict_of_their_packet() {
    let mut bed = Bed::new(&[(exactly(Out, APP, UDP, 53), VERDICT_ALLOW)]);
    let fragment4 = |id: u16, field: u16, content: &[u8]| {
        let IpAddr::V4(peer) = address(APP, true) else {
            unreachable!("IPv4");
        };
        let ip = Ipv4 {
            id,
            fragment: field,
            protocol: UDP,
            ..Ipv4::icmp(ENDPOINT4, peer)
        };
        framed(Out, &ip.packet(content))
    };
    let fragment6 = |id: u16, offset_and_more: u16, content: &[u8]| {
        let mut bytes = vec![UDP, 0];
        bytes.extend(offset_and_more.to_be_bytes());
        bytes.extend(u32::from(id).to_be_bytes());
        bytes.extend(content);
        frame(Out, address(APP, false), 44, &bytes)
    };
    type Fragments = (Vec<u8>, Vec<u8>);
    let of = |is_v4: bool, id: u16, number: u16| -> Fragments {
        let start = with_ports(fresh(), number);
        if is_v4 {
            (
                fragment4(id, MORE_FRAGMENTS, &start),
                fragment4(id, 5, &payload(24)),
            )
        } else {
            (fragment6(id, 1, &start), fragment6(id, 40, &payload(24)))
        }
    };
    let denied = Some(Reason::PolicyDenied);
    for is_v4 in [true, false] {
        let (first, later) = of(is_v4, 1, 53);
        let unknown = Some(Reason::FragmentUnknown);
        assert_eq!(bed.verdict(Out, &later), unknown);
        assert_eq!(bed.verdict(Out, &first), None);
        assert_eq!(bed.verdict(Out, &later), None);
        let (first, later) = of(is_v4, 2, 54);
        assert_eq!(bed.verdict(Out, &first), denied);
        // Nothing is stored about the dropped packet: an entry for it would take space from other flows.
        assert_eq!(bed.verdict(Out, &later), unknown);
    }
    // The same holds for a flow that a policy change ended.
    bed.change(1, 2, &[(exactly(Out, APP, UDP, 54), VERDICT_ALLOW)]);
    for is_v4 in [true, false] {
        let (_, later) = of(is_v4, 1, 53);
        assert_eq!(bed.verdict(Out, &later), denied);
    }
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_judged_is_dropped_where_policy_is_enforced() {
    let mut bed = Bed::new(&[
        (everything(In, ANY_IDENTITY), VERDICT_ALLOW),
        (everything(Out, ANY_IDENTITY), VERDICT_ALLOW),
    ]);
    let cut = |way, is_v4| frame(way, address(APP, is_v4), TCP, &payload(12));
    let many = |way| {
        let mut headers = [60, 0, 1, 4, 0, 0, 0, 0].repeat(7);
        headers.extend(with_ports(5353, 53));
        frame(way, address(APP, false), 60, &headers)
    };
    for way in [In, Out] {
        for packet in [cut(way, true), cut(way, false), many(way)] {
            assert_eq!(bed.verdict(way, &packet), Some(Reason::InvalidPacket));
        }
    }
    set_endpoint(&mut bed.run.datapath, 0, 1);
    for way in [In, Out] {
        for packet in [cut(way, true), cut(way, false), many(way)] {
            assert_eq!(bed.verdict(way, &packet), None);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn each_direction_is_enforced_by_itself_and_without_a_table_nothing_is_allowed() {
    let mut bed = Bed::new(&[]);
    let denied = Some(Reason::PolicyDenied);
    for (flags, table, into, out) in [
        (BOTH, 1, denied, denied),
        (BOTH, 0, denied, denied),
        (BOTH, 77, denied, denied),
        (ENDPOINT_ENFORCE_INGRESS, 1, denied, None),
        (ENDPOINT_ENFORCE_EGRESS, 1, None, denied),
        (0, 1, None, None),
        // Mesh probes pass regardless of the other flags.
        (BOTH | ENDPOINT_HEALTH, 1, None, None),
    ] {
        set_endpoint(&mut bed.run.datapath, flags, table);
        for is_v4 in [true, false] {
            let peer = address(APP, is_v4);
            let what = format!("{flags} {table}");
            assert_eq!(bed.verdict(In, &opening(In, peer, TCP, 80)), into, "{what}");
            assert_eq!(
                bed.verdict(Out, &opening(Out, peer, TCP, 80)),
                out,
                "{what}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn the_health_endpoint_answers_whatever_the_tables_say() {
    let mut bed = Bed::new(&[(everything(In, ANY_IDENTITY), VERDICT_DENY)]);
    let settings = DatapathConfig::default();
    let addresses = (ENDPOINT4, ENDPOINT6);
    bed.run
        .set_health_endpoint(addresses, MAC, HOST_MAC, settings);
    for is_v4 in [true, false] {
        let request = if is_v4 { 8 } else { 128 };
        let echo = message(In, address(APP, is_v4), request, fresh());
        assert_eq!(bed.run.run("to_endpoint", &echo).code, REDIRECT);
        let http = opening(In, address(APP, is_v4), TCP, 4240);
        assert_eq!(bed.verdict(In, &http), None);
    }
}

#[test]
#[ignore = "needs root"]
fn questions_about_neighbours_are_answered_whatever_the_policy() {
    let bed = Bed::new(&[]);
    let arp = |way, target: Ipv4Addr, sender: Ipv4Addr| {
        let from = if way == Out { MAC } else { HOST_MAC };
        let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
        packet.extend(from);
        packet.extend(sender.octets());
        packet.extend([0; 6]);
        packet.extend(target.octets());
        ethernet([0xff; 6], from, ARP, &packet)
    };
    for (way, target, sender) in [
        (Out, GATEWAY4, ENDPOINT4),
        (In, ENDPOINT4, Ipv4Addr::new(172, 30, 0, 1)),
    ] {
        let answer = bed.run.run(way.program(), &arp(way, target, sender));
        assert_eq!(answer.code, REDIRECT, "{way:?}");
        let expected = if way == Out { HOST_MAC } else { MAC };
        assert_eq!(answer.bytes[6..12], expected, "{way:?}");
        assert_eq!(answer.bytes[22..28], expected, "{way:?}");
    }
    // A solicitation from the host, and its neighbour unreachability check.
    let IpAddr::V6(host) = address(identity::HOST, false) else {
        unreachable!("IPv6");
    };
    let solicited: Ipv6Addr = "ff02::1:ff00:9".parse().expect("an address");
    for destination in [solicited, ENDPOINT6] {
        let ip = Ipv6 {
            hop_limit: 255,
            ..Ipv6::icmp(host, destination)
        };
        let mut message = vec![135, 0, 0, 0, 0, 0, 0, 0];
        message.extend(ENDPOINT6.octets());
        message.extend([1, 1]);
        message.extend(HOST_MAC);
        let packet = ip.packet(&ip.with_checksum(message));
        let answer = bed.run.run("to_endpoint", &framed(In, &packet));
        assert_eq!(answer.code, REDIRECT);
        assert_eq!(answer.bytes[6..12], MAC);
    }
}

#[test]
#[ignore = "needs root"]
fn counters_add_up_through_changes_and_restarts() {
    let allow = exactly(In, APP, TCP, 80);
    let deny = exactly(In, APP, TCP, 81);
    let mut bed = Bed::new(&[(allow, VERDICT_ALLOW), (deny, VERDICT_DENY)]);
    let packets = |bed: &Bed, number, count| {
        for _ in 0..count {
            bed.verdict(In, &opening(In, address(APP, true), TCP, number));
        }
    };
    let length = opening(In, address(APP, true), TCP, 80).len() as u64;
    let counted = |tables: &PolicyTables, what: &PolicyMatch| {
        let counter = tables.counted(SUBJECT, what).expect("a counter");
        counter.map(|counter| (counter.packets, counter.bytes))
    };
    packets(&bed, 80, 5);
    packets(&bed, 81, 3);
    assert_eq!(counted(&bed.tables, &allow), Some((5, 5 * length)));
    assert_eq!(counted(&bed.tables, &deny), Some((3, 3 * length)));
    assert_eq!(counted(&bed.tables, &exactly(In, APP, TCP, 82)), None);

    bed.change(1, 2, &[(allow, VERDICT_ALLOW)]);
    packets(&bed, 80, 2);
    packets(&bed, 81, 4);
    assert_eq!(counted(&bed.tables, &allow), Some((7, 7 * length)));
    assert_eq!(counted(&bed.tables, &deny), None);
    assert_eq!(bed.run.counted(Reason::PolicyDenied), 4);
    assert_eq!(bed.run.counted(Reason::PolicyDeniedByRule), 3);

    // A second agent on the same maps. A counter starts at zero after its release.
    bed.tables = bed.run.datapath.policy().expect("the tables");
    assert_eq!(bed.tables.tables().collect::<Vec<_>>(), [2]);
    assert_eq!(counted(&bed.tables, &allow), Some((7, 7 * length)));
    bed.change(2, 3, &[(allow, VERDICT_ALLOW), (deny, VERDICT_DENY)]);
    packets(&bed, 80, 1);
    assert_eq!(counted(&bed.tables, &allow), Some((8, 8 * length)));
    assert_eq!(counted(&bed.tables, &deny), Some((0, 0)));
    // An entry of another subject has its own counter.
    bed.tables
        .install(4, SUBJECT + 1, [(allow, VERDICT_ALLOW)])
        .expect("room for a table");
    let other = bed.tables.counted(SUBJECT + 1, &allow).expect("a counter");
    assert_eq!(other.map(|counter| counter.packets), Some(0));
}

#[test]
#[ignore = "needs root"]
fn while_tables_are_swapped_each_packet_meets_the_whole_of_one() {
    // Each table allows the packet with an entry that the other table lacks: a lookup that mixes the two finds neither
    // entry.
    let own = [
        (exactly(In, APP, UDP, 53), VERDICT_ALLOW),
        (everything(In, ANY_IDENTITY), VERDICT_DENY),
    ];
    let any = [(exactly(In, ANY_IDENTITY, UDP, 53), VERDICT_ALLOW)];
    let mut bed = Bed::new(&own);
    let program = bed.run.program("to_endpoint");
    let packet = opening(In, address(APP, true), UDP, 53);
    let (done, passed) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let outcome = run_program(&program, &packet, None).expect("a test run");
                assert_eq!(
                    outcome.code,
                    GO_ON,
                    "after {}",
                    passed.load(Ordering::Relaxed)
                );
                passed.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ends_runs = RaisedAtEnd(&done);
        let mut table = 1;
        while table < 200 || passed.load(Ordering::Relaxed) < 2_000 {
            let next: &[_] = if table % 2 == 0 { &own } else { &any };
            bed.change(table, table + 1, next);
            table += 1;
        }
    });
    assert_eq!(bed.run.counted(Reason::PolicyDenied), 0);
    assert_eq!(bed.run.counted(Reason::PolicyDeniedByRule), 0);
}

#[test]
#[ignore = "needs root"]
fn a_table_that_has_no_room_or_makes_no_sense_leaves_nothing_behind() {
    let mut bed = Bed::new(&[(exactly(In, APP, TCP, 80), VERDICT_ALLOW)]);
    let many = (1..=POLICY_ENTRIES).map(|identity| (everything(In, identity), VERDICT_ALLOW));
    match bed.tables.install(2, SUBJECT, many) {
        Err(PolicyError::Full {
            table: 2, used: 1, ..
        }) => {}
        other => panic!("{other:?}"),
    }
    let allow = (exactly(In, APP, TCP, 80), VERDICT_ALLOW);
    let wrong = |change: fn(&mut PolicyMatch)| {
        let (mut entry, verdict) = allow;
        change(&mut entry);
        vec![(entry, verdict)]
    };
    for entries in [
        vec![allow, allow],
        vec![(allow.0, 7)],
        wrong(|entry| entry.direction = 2),
        wrong(|entry| entry.prefix_len = 100),
        wrong(|entry| entry.prefix_len = PREFIX_PROTOCOL),
    ] {
        match bed.tables.install(2, SUBJECT, entries) {
            Err(PolicyError::Entry { table: 2, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(
        bed.tables.install(1, SUBJECT, []),
        Err(PolicyError::Exists(1))
    ));
    assert_eq!(bed.tables.len(), 1);
    let read_again = bed.run.datapath.policy().expect("the tables");
    assert_eq!(
        (read_again.len(), read_again.tables().collect()),
        (1, vec![1])
    );
}

#[test]
#[ignore = "needs root"]
fn prefixes_change_without_the_others_being_missing() {
    let mut bed = Bed::new(&[]);
    let mut ipcache = bed.run.datapath.ipcache().expect("the ipcache");
    let mut wanted = prefixes();
    // The IPv4 default entry does not apply to IPv6.
    assert_eq!(ipcache.entries().count(), wanted.len() + 1);
    assert_eq!(ipcache.set_all(&wanted).expect("room"), 0);
    let net: IpNet = "10.1.2.0/24".parse().expect("a prefix");
    wanted.remove(&net);
    let node = IpcacheEntry {
        identity: identity::REMOTE_NODE,
        node: IpAddr::from([172, 30, 0, 2]).into(),
        pad: 0,
    };
    wanted.insert("::/0".parse().expect("a prefix"), node);
    assert_eq!(ipcache.set_all(&wanted).expect("room"), 2);
    let expected: BTreeMap<IpNet, IpcacheEntry> = ipcache.entries().collect();
    let read_again = bed.run.datapath.ipcache().expect("the ipcache");
    assert_eq!(read_again.entries().collect::<BTreeMap<_, _>>(), expected);

    bed.change(
        1,
        2,
        &[
            (exactly(In, APP, TCP, 1), VERDICT_ALLOW),
            (exactly(In, identity::WORLD, TCP, 2), VERDICT_ALLOW),
            (exactly(In, identity::REMOTE_NODE, TCP, 3), VERDICT_ALLOW),
        ],
    );
    for (peer, is_v4, number) in [
        (DATABASE, true, 1),
        (identity::WORLD, true, 2),
        (identity::WORLD, false, 3),
    ] {
        let packet = opening(In, address(peer, is_v4), TCP, number);
        assert_eq!(bed.verdict(In, &packet), None, "{peer} {is_v4}");
    }
}

#[test]
#[ignore = "needs root"]
fn a_refused_packet_is_reported_with_its_reason() -> anyhow::Result<()> {
    let bed = Bed::new(&[(exactly(In, APP, TCP, 81), VERDICT_DENY)]);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let _inside = runtime.enter();
    let filter = MonitorFilter {
        wanted: WANT_DROP,
        ..MonitorFilter::default()
    };
    bed.run.datapath.event_switch()?.set(&filter)?;
    let mut ring = bed.run.datapath.ring()?;
    for (way, number, reason, direction) in [
        (In, 80, Reason::PolicyDenied, Direction::Egress),
        (In, 81, Reason::PolicyDeniedByRule, Direction::Egress),
        (Out, 80, Reason::PolicyDenied, Direction::Ingress),
    ] {
        bed.verdict(way, &opening(way, address(APP, true), TCP, number));
        let mut events = Vec::new();
        while ring.take(|event| events.push(*event)) {}
        let [event] = &events[..] else {
            panic!("one event, not {events:?}");
        };
        assert_eq!((event.kind, event.reason), (EVENT_DROP, reason as u8));
        assert_eq!((event.direction, event.endpoint), (direction as u8, 99));
        assert_eq!((event.protocol, event.dport_be), (TCP, number.to_be()));
    }
    Ok(())
}
