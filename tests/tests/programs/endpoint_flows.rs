//! Conntrack of an endpoint's traffic: the endpoint programs on crafted packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use health_common::config::DatapathConfig;
use health_common::ct::tcp::TcpState;
use health_common::ct::{CT_SEEN_NON_SYN, CtEntry, Timeouts};
use health_common::identity;
use health_common::metrics::Reason;
use health_datapath::dump::Flow;
use tests::packet::{Ipv4, payload};
use tests::testrun::{GO_ON, Outcome, TestRun};

use crate::endpoint_packets::Way::{self, In, Out};
use crate::endpoint_packets::{
    ACK, ENDPOINT4, ENDPOINT6, FIN, GRE, HOST_MAC, MAC, MORE_FRAGMENTS, RST, SCTP, SYN, UDP, frame,
    framed, hosts, packet, segment, with_ports,
};

const FAR4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
const FAR6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);

/// A remote host.
fn far(is_v4: bool) -> IpAddr {
    if is_v4 { FAR4.into() } else { FAR6.into() }
}

struct Endpoint(TestRun);

impl Endpoint {
    fn new() -> Self {
        let mut bed = TestRun::load();
        let settings = DatapathConfig::default();
        bed.set_health_endpoint((ENDPOINT4, ENDPOINT6), MAC, HOST_MAC, settings);
        Self(bed)
    }

    /// Checks that a packet passes the programs unchanged.
    fn pass(&self, way: Way, packet: &[u8]) {
        let unchanged = Outcome {
            code: GO_ON,
            bytes: packet.to_vec(),
        };
        assert_eq!(self.0.run(way.program(), packet), unchanged, "{way:?}");
    }

    fn flows(&self) -> Vec<(Flow, CtEntry)> {
        self.0.maps().conntrack().expect("the flows")
    }

    fn only_flow(&self) -> (Flow, CtEntry) {
        let flows = self.flows();
        let [flow] = &flows[..] else {
            panic!("one flow, not {flows:?}");
        };
        flow.clone()
    }
}

#[test]
#[ignore = "needs root"]
fn a_connection_goes_through_its_states_whoever_opens_it() {
    let bed = Endpoint::new();
    for (number, opener, is_v4) in [
        (0, Out, true),
        (1, In, true),
        (2, Out, false),
        (3, In, false),
    ] {
        let client = 40_000 + number;
        let answerer = opener.back();
        let steps = [
            (opener, SYN, "SYN_SENT", 60),
            (opener, SYN, "SYN_SENT", 60),
            (answerer, SYN | ACK, "SYN_RECV", 60),
            (opener, ACK, "ESTABLISHED", 8000),
            (answerer, ACK, "ESTABLISHED", 8000),
            (opener, FIN | ACK, "FIN_WAIT", 8000),
            (answerer, ACK, "CLOSE_WAIT", 8000),
            (answerer, FIN | ACK, "LAST_ACK", 10),
            (opener, ACK, "TIME_WAIT", 10),
            // A new connection between the same ports, which is refused.
            (opener, SYN, "SYN_SENT", 60),
            (answerer, RST | ACK, "CLOSE", 10),
        ];
        let (mut received, mut sent) = (0, 0);
        for (way, flags, state, lifetime) in steps {
            let ports = if way == opener {
                (client, 80)
            } else {
                (80, client)
            };
            bed.pass(way, &segment(way, far(is_v4), ports, flags));
            match way {
                In => received += 1,
                Out => sent += 1,
            }
            let flows = bed.flows();
            let (flow, entry) = flows
                .iter()
                .find(|(flow, _)| flow.source_port == client)
                .expect("the flow");
            assert_eq!(flows.len(), usize::from(number) + 1, "{flows:?}");
            assert_eq!(flow.inbound, opener == In);
            assert_eq!((flow.source, flow.destination), hosts(opener, far(is_v4)));
            assert_eq!((flow.protocol, flow.destination_port), (6, 80));
            assert_eq!(TcpState::of(entry.state()).name(), state, "{entry:?}");
            assert_eq!((entry.rx_packets, entry.tx_packets), (received, sent));
            let last = if way == In {
                entry.last_rx
            } else {
                entry.last_tx
            };
            assert_eq!(entry.expires, last + lifetime, "{state}");
            let opened_by = match opener {
                Out => identity::HEALTH,
                In => identity::WORLD,
            };
            assert_eq!(entry.source_identity, opened_by);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_connection_is_picked_up_in_its_midst_and_nothing_else_begins_one() {
    let bed = Endpoint::new();
    for flags in [RST, RST | ACK, FIN | ACK, SYN | ACK, SYN | FIN, 0] {
        bed.pass(Out, &segment(Out, FAR4.into(), (40_000, 80), flags));
    }
    let mut cut = segment(Out, FAR4.into(), (40_000, 80), SYN);
    cut.truncate(14 + 20 + 12);
    bed.pass(Out, &cut);
    assert_eq!(bed.flows(), []);
    assert_eq!(bed.0.counted(Reason::CtInvalid), 7);

    bed.pass(In, &segment(In, FAR4.into(), (80, 40_000), ACK));
    let (flow, entry) = bed.only_flow();
    assert!(flow.inbound && entry.flags & CT_SEEN_NON_SYN != 0);
    assert_eq!(TcpState::of(entry.state()).name(), "ESTABLISHED");
    // The endpoint's answers belong to the same flow.
    bed.pass(Out, &segment(Out, FAR4.into(), (40_000, 80), ACK));
    let (_, entry) = bed.only_flow();
    assert_eq!((entry.rx_packets, entry.tx_packets), (1, 1));
}

#[test]
#[ignore = "needs root"]
fn protocols_without_a_state_are_tracked_by_ports_or_by_their_number() {
    for is_v4 in [true, false] {
        for (protocol, ports, lifetime) in [
            (UDP, (5353, 53), 60),
            (SCTP, (7, 9), 210),
            (GRE, (0, 0), 60),
        ] {
            for opener in [Out, In] {
                let bed = Endpoint::new();
                let there = frame(opener, far(is_v4), protocol, &with_ports(ports.0, ports.1));
                let back = frame(
                    opener.back(),
                    far(is_v4),
                    protocol,
                    &with_ports(ports.1, ports.0),
                );
                bed.pass(opener, &there);
                bed.pass(opener.back(), &back);
                bed.pass(opener, &there);
                let (flow, entry) = bed.only_flow();
                assert_eq!((flow.source_port, flow.destination_port), ports);
                assert_eq!((flow.protocol, flow.inbound), (protocol, opener == In));
                let bytes = (there.len() - 14) as u64;
                let counted = [
                    (entry.tx_packets, entry.tx_bytes),
                    (entry.rx_packets, entry.rx_bytes),
                ];
                let expected = match opener {
                    Out => [(2, 2 * bytes), (1, bytes)],
                    In => [(1, bytes), (2, 2 * bytes)],
                };
                assert_eq!(counted, expected, "{protocol}");
                let last = entry.last_tx.max(entry.last_rx);
                assert_eq!(entry.expires, last + lifetime);
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn padding_behind_a_short_packet_is_not_taken_for_its_ports() {
    for is_v4 in [true, false] {
        let bed = Endpoint::new();
        let mut padded = frame(Out, far(is_v4), UDP, &[0; 4]);
        padded.extend(with_ports(5353, 53));
        bed.pass(Out, &padded);
        assert_eq!(bed.flows(), []);
        assert_eq!(bed.0.counted(Reason::CtInvalid), 1);
    }
}

/// An ICMP error about a packet, as sent by the remote host or by a router on the path.
fn error(is_v4: bool, about: &[u8]) -> Vec<u8> {
    let (protocol, kind) = if is_v4 { (1, 3) } else { (58, 1) };
    let mut message = vec![kind, 1, 0, 0, 0, 0, 0, 0];
    message.extend(about);
    frame(In, far(is_v4), protocol, &message)
}

#[test]
#[ignore = "needs root"]
fn an_error_belongs_to_the_flow_that_it_is_about_and_makes_none() {
    for is_v4 in [true, false] {
        let bed = Endpoint::new();
        let sent = packet(Out, far(is_v4), UDP, &with_ports(5353, 53));
        bed.pass(Out, &framed(Out, &sent));
        let before = bed.only_flow();
        // The shortest quote that an error must contain, and the whole packet.
        for held in [if is_v4 { 28 } else { 48 }, sent.len()] {
            bed.pass(In, &error(is_v4, &sent[..held]));
        }
        assert_eq!(bed.0.counted(Reason::CtRelated), 2);
        assert_eq!(bed.0.counted(Reason::CtInvalid), 0);
        // An error about a packet that was never sent, then truncated quotes and an empty one.
        let other = packet(Out, far(is_v4), UDP, &with_ports(5354, 53));
        for about in [
            &other[..],
            &sent[..if is_v4 { 27 } else { 47 }],
            &sent[..10],
            &[],
        ] {
            bed.pass(In, &error(is_v4, about));
        }
        assert_eq!(bed.0.counted(Reason::CtRelated), 2);
        assert_eq!(bed.0.counted(Reason::CtInvalid), 4);
        assert_eq!(bed.only_flow(), before);
    }
}

/// A fragment of a UDP packet to the endpoint.
fn fragment(id: u16, offset_and_more: u16, content: &[u8]) -> Vec<u8> {
    let ip = Ipv4 {
        protocol: UDP,
        id,
        fragment: offset_and_more,
        ..Ipv4::icmp(FAR4, ENDPOINT4)
    };
    framed(In, &ip.packet(content))
}

#[test]
#[ignore = "needs root"]
fn fragments_belong_to_the_flow_of_their_first() {
    let bed = Endpoint::new();
    let first = fragment(7, MORE_FRAGMENTS, &with_ports(53, 5353));
    let later = fragment(7, 5, &payload(24));
    // A later fragment that arrives before the first one belongs to no known flow.
    bed.pass(In, &later);
    assert_eq!(bed.flows(), []);
    assert_eq!(bed.0.counted(Reason::CtInvalid), 1);
    bed.pass(In, &first);
    bed.pass(In, &later);
    bed.pass(In, &fragment(8, 5, &payload(24)));
    assert_eq!(bed.0.counted(Reason::CtInvalid), 2);
    let (flow, entry) = bed.only_flow();
    assert_eq!((flow.source_port, flow.destination_port), (53, 5353));
    let bytes = (first.len() + later.len() - 2 * 14) as u64;
    assert_eq!((entry.rx_packets, entry.rx_bytes), (2, bytes));
}

#[test]
#[ignore = "needs root"]
fn a_late_fragment_does_not_belong_to_a_flow_of_before() {
    let mut bed = Endpoint::new();
    let settings = DatapathConfig {
        timeouts: Timeouts {
            fragment: 0,
            ..Timeouts::default()
        },
        ..DatapathConfig::default()
    };
    bed.0
        .set_health_endpoint((ENDPOINT4, ENDPOINT6), MAC, HOST_MAC, settings);
    bed.pass(In, &fragment(7, MORE_FRAGMENTS, &with_ports(53, 5353)));
    bed.pass(In, &fragment(7, 5, &payload(24)));
    assert_eq!(bed.0.counted(Reason::CtInvalid), 1);
    assert_eq!(bed.only_flow().1.rx_packets, 1);
}

#[test]
#[ignore = "needs root"]
fn extension_headers_are_walked_over_and_fragments_found_behind_them() {
    let bed = Endpoint::new();
    // Hop-by-hop options, followed by a fragment header.
    let fragment = |offset_and_more: u16, id: u32, content: &[u8]| {
        let mut bytes = vec![44, 0, 1, 4, 0, 0, 0, 0];
        bytes.extend([UDP, 0]);
        bytes.extend(offset_and_more.to_be_bytes());
        bytes.extend(id.to_be_bytes());
        bytes.extend(content);
        frame(Out, FAR6.into(), 0, &bytes)
    };
    bed.pass(Out, &fragment(1, 77, &with_ports(5353, 53)));
    bed.pass(Out, &fragment(40, 77, &payload(24)));
    bed.pass(Out, &fragment(40, 78, &payload(24)));
    let (flow, entry) = bed.only_flow();
    assert_eq!((flow.source_port, flow.destination_port), (5353, 53));
    assert_eq!(entry.tx_packets, 2);
    assert_eq!(bed.0.counted(Reason::CtInvalid), 1);
    // More headers than the program parses, and a header that extends past the end of the packet.
    let mut many = [60, 0, 1, 4, 0, 0, 0, 0].repeat(7);
    many.extend(with_ports(5353, 53));
    bed.pass(Out, &frame(Out, FAR6.into(), 60, &many));
    bed.pass(
        Out,
        &frame(Out, FAR6.into(), 60, &[UDP, 200, 1, 4, 0, 0, 0, 0]),
    );
    assert_eq!(bed.0.counted(Reason::CtInvalid), 3);
    assert_eq!(bed.flows().len(), 1);
}
