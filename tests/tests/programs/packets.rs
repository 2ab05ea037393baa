//! Each program on crafted packets: the resulting packets and the maps are compared byte by byte.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use health_common::addr::Addr;
use health_common::arrivals::{Prober, WAYS, WayCounts, way};
use health_common::config::DatapathConfig;
use health_common::metrics::Reason;
use health_common::probe::{Path, ProbeId};
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL, SOURCE_SOCKET, bucket};
use health_datapath::arrival_store::ArrivalStore as _;
use health_datapath::kernel_rtt::KernelRtt;
use health_datapath::rtt_store::{LossOutcome, Measurement, RttStore as _};
use tests::packet::{
    ARP, IPV4, IPV6, Ipv4, Ipv6, Probe, Tcp, arp, echo, echo4, ethernet, payload, tagged,
};
use tests::testrun::{DROP, GO_ON, Outcome, REDIRECT, TestRun, stamped, utc_ns};

const PEER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);
const HEALTH: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
const PEER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 2);
const HEALTH6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1);
const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const KEY: [u64; 2] = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
const SESSION: u32 = 0x0102_0304;
const PROBE_ID: u16 = 0x4240;

fn bed() -> TestRun {
    let mut bed = TestRun::load();
    bed.set_health_endpoint(
        (HEALTH, HEALTH6),
        MAC,
        HOST_MAC,
        DatapathConfig {
            icmp_id_be: PROBE_ID.to_be(),
            probe_key: KEY,
            session: SESSION,
            gateway4: GATEWAY.into(),
            gateway6: GATEWAY6.into(),
            ..DatapathConfig::default()
        },
    );
    bed
}

fn to_health(ip: &Ipv4, message: &[u8]) -> Vec<u8> {
    ethernet(MAC, HOST_MAC, IPV4, &ip.packet(message))
}

fn from_health(ip: &Ipv4, message: &[u8]) -> Vec<u8> {
    ethernet(HOST_MAC, MAC, IPV4, &ip.packet(message))
}

fn request() -> Ipv4 {
    Ipv4::icmp(PEER, HEALTH)
}

/// The reply's header as Linux builds it: TTL 64, the don't-fragment bit clear, and the request's type of service.
fn reply(id: u16) -> Ipv4 {
    Ipv4 {
        id,
        fragment: 0,
        ..Ipv4::icmp(HEALTH, PEER)
    }
}

fn untouched(packet: &[u8]) -> Outcome {
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

fn sent_back(packet: Vec<u8>) -> Outcome {
    Outcome {
        code: REDIRECT,
        bytes: packet,
    }
}

#[test]
#[ignore = "needs root"]
fn an_echo_request_of_any_size_becomes_its_reply() {
    let bed = bed();
    for len in [0, 1, 2, 3, 56, 57, 255, 1471, 1472] {
        let data = payload(len);
        let packet = to_health(
            &Ipv4 {
                id: 99,
                ttl: 61,
                ..request()
            },
            &echo4(8, 0, 5, 6, &data),
        );
        let expected = from_health(&reply(99), &echo4(0, 0, 5, 6, &data));
        assert_eq!(
            bed.run("to_endpoint", &packet),
            sent_back(expected),
            "payload of {len}"
        );
    }
    assert_eq!(bed.counted(Reason::EchoAnswered), 9);
}

#[test]
#[ignore = "needs root"]
fn the_type_of_service_is_copied_and_the_dont_fragment_bit_is_not() {
    let bed = bed();
    for tos in [0x00, 0x10, 0xb8, 0xff] {
        for fragment in [0, 0x4000] {
            let packet = to_health(
                &Ipv4 {
                    tos,
                    fragment,
                    id: 7,
                    ..request()
                },
                &echo4(8, 0, 1, 2, &payload(56)),
            );
            let expected = from_health(&Ipv4 { tos, ..reply(7) }, &echo4(0, 0, 1, 2, &payload(56)));
            assert_eq!(
                bed.run("to_endpoint", &packet),
                sent_back(expected),
                "tos {tos:#x}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_request_without_identification_gets_one_that_changes_with_its_sequence() {
    let bed = bed();
    for sequence in [0, 1, 2, 0xffff] {
        let packet = to_health(&request(), &echo4(8, 0, 0x1234, sequence, b"x"));
        let expected = from_health(
            &reply(0x1234 ^ sequence),
            &echo4(0, 0, 0x1234, sequence, b"x"),
        );
        assert_eq!(bed.run("to_endpoint", &packet), sent_back(expected));
    }
}

#[test]
#[ignore = "needs root"]
fn options_that_a_host_does_not_echo_are_cut_off() {
    let bed = bed();
    for options in [
        vec![1, 1, 1, 0],
        vec![148, 4, 0, 0],
        vec![1; 40],
        vec![148, 4, 0, 0, 1, 1, 0, 0],
        vec![0, 0, 0, 0],
    ] {
        for len in [0, 1, 56, 1400] {
            let data = payload(len);
            let ip = Ipv4 {
                id: 3,
                options: options.clone(),
                ..request()
            };
            let expected = from_health(&reply(3), &echo4(0, 0, 5, 6, &data));
            let packet = to_health(&ip, &echo4(8, 0, 5, 6, &data));
            assert_eq!(
                bed.run("to_endpoint", &packet),
                sent_back(expected),
                "{options:?} payload {len}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn options_that_a_host_echoes_are_left_to_the_stack() {
    let bed = bed();
    for options in [
        vec![7, 7, 4, 0, 0, 0, 0, 0],
        vec![68, 8, 5, 0, 0, 0, 0, 0],
        vec![131, 7, 4, 10, 0, 0, 1, 0],
        vec![148, 4, 0, 0, 7, 3, 4, 0],
        vec![148, 5, 0, 0, 0, 0, 0, 0],
        vec![1, 1, 148, 4],
    ] {
        let packet = to_health(
            &Ipv4 {
                options: options.clone(),
                ..request()
            },
            &echo4(8, 0, 5, 6, b"data"),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "{options:?}"
        );
    }
    assert_eq!(bed.counted(Reason::EchoAnswered), 0);
    assert_eq!(bed.counted(Reason::LeftToStack), 6);
}

#[test]
#[ignore = "needs root"]
fn what_was_damaged_is_not_made_whole() {
    let bed = bed();
    // A wrong header checksum: a host silently discards such a packet.
    let mut packet = to_health(&request(), &echo4(8, 0, 5, 6, b"data"));
    packet[14 + 10] ^= 1;
    assert_eq!(bed.run("to_endpoint", &packet), dropped(&packet));
    let mut packet = to_health(
        &Ipv4 {
            options: vec![1; 4],
            ..request()
        },
        &echo4(8, 0, 5, 6, b"data"),
    );
    packet[14 + 10] ^= 1;
    assert_eq!(bed.run("to_endpoint", &packet), dropped(&packet));
    assert_eq!(bed.counted(Reason::InvalidHeaderChecksum), 2);

    // A wrong ICMP checksum stays wrong by the same amount, so the sender discards the reply.
    let mut message = echo4(8, 0, 5, 6, b"data");
    let mut expected = echo4(0, 0, 5, 6, b"data");
    message[9] ^= 0x10;
    expected[9] ^= 0x10;
    let packet = to_health(&Ipv4 { id: 1, ..request() }, &message);
    assert_eq!(
        bed.run("to_endpoint", &packet),
        sent_back(from_health(&reply(1), &expected))
    );
}

#[test]
#[ignore = "needs root"]
fn fragments_are_left_to_the_stack() {
    let bed = bed();
    for (which, fragment) in [("first", 0x2000), ("middle", 0x2010), ("last", 0x0010)] {
        let packet = to_health(
            &Ipv4 {
                fragment,
                id: 9,
                ..request()
            },
            &echo4(8, 0, 5, 6, &payload(64)),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "{which} fragment"
        );
    }
}

#[test]
#[ignore = "needs root"]
fn other_messages_and_protocols_are_left_alone() {
    let bed = bed();
    for kind in (0..=255).filter(|&kind| kind != 8) {
        let packet = to_health(&request(), &echo4(kind, 0, 5, 6, b"data"));
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "type {kind}"
        );
    }
    let packet = to_health(&request(), &echo4(8, 1, 5, 6, b"data"));
    assert_eq!(
        bed.run("to_endpoint", &packet),
        untouched(&packet),
        "code 1"
    );
    for protocol in [2, 6, 17, 58, 132] {
        let packet = to_health(
            &Ipv4 {
                protocol,
                ..request()
            },
            &echo4(8, 0, 5, 6, b"data"),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "protocol {protocol}"
        );
    }
    assert_eq!(bed.counted(Reason::EchoAnswered), 0);
}

#[test]
#[ignore = "needs root"]
fn requests_to_others_pass() {
    let bed = bed();
    for destination in [
        Ipv4Addr::new(10, 244, 1, 8),
        Ipv4Addr::BROADCAST,
        Ipv4Addr::new(224, 0, 0, 1),
    ] {
        let packet = to_health(&Ipv4::icmp(PEER, destination), &echo4(8, 0, 5, 6, b"data"));
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "{destination}"
        );
    }
    // Packets to the endpoint's address, sent to a broadcast or multicast MAC address.
    for mac in [[0xff; 6], [0x01, 0, 0x5e, 0, 0, 1]] {
        let packet = ethernet(
            mac,
            HOST_MAC,
            IPV4,
            &request().packet(&echo4(8, 0, 5, 6, b"data")),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "{mac:?}"
        );
    }
}

#[test]
#[ignore = "needs root"]
fn impossible_sources_are_refused() {
    let bed = bed();
    let sources = [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
    ];
    for source in sources
        .iter()
        .map(|s| s.parse().expect("an address"))
        .chain([HEALTH])
    {
        let packet = to_health(&Ipv4::icmp(source, HEALTH), &echo4(8, 0, 5, 6, b"data"));
        assert_eq!(
            bed.run("to_endpoint", &packet),
            dropped(&packet),
            "{source}"
        );
    }
    assert_eq!(bed.counted(Reason::InvalidSource), 8);
    for source in [
        Ipv6Addr::UNSPECIFIED,
        Ipv6Addr::LOCALHOST,
        "ff02::1".parse().expect("an address"),
        HEALTH6,
    ] {
        let ip = Ipv6::icmp(source, HEALTH6);
        let packet = ethernet(
            MAC,
            HOST_MAC,
            IPV6,
            &ip.packet(&ip.with_checksum(echo(128, 0, 5, 6, b"data"))),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            dropped(&packet),
            "{source}"
        );
    }
}

#[test]
#[ignore = "needs root"]
fn nothing_is_read_past_what_the_packet_holds() {
    let bed = bed();
    let ip = Ipv6::icmp(PEER6, HEALTH6);
    for (program, whole, ip_len) in [
        (
            "to_endpoint",
            to_health(&request(), &echo4(8, 0, 5, 6, b"")),
            20,
        ),
        (
            "to_endpoint",
            to_health(
                &Ipv4 {
                    options: vec![1; 40],
                    ..request()
                },
                &echo4(8, 0, 5, 6, b""),
            ),
            20,
        ),
        (
            "to_endpoint",
            ethernet(
                MAC,
                HOST_MAC,
                IPV6,
                &ip.packet(&ip.with_checksum(echo(128, 0, 5, 6, b""))),
            ),
            40,
        ),
        ("to_endpoint", arp_request(HOST_MAC, PEER, HEALTH), 0),
        ("from_endpoint", arp_request(MAC, HEALTH, GATEWAY), 0),
        ("to_endpoint", solicitation(PEER6, HEALTH6, HOST_MAC), 40),
        ("from_endpoint", solicitation(HEALTH6, GATEWAY6, MAC), 40),
        ("to_netdev", probe(Path::Host, 8, PROBE_ID, 1), 20),
        ("from_netdev", probe(Path::Host, 0, PROBE_ID, 1), 20),
    ] {
        for len in 0..whole.len() {
            match bed.try_run(program, &whole[..len]) {
                Some(Outcome { code, bytes }) => {
                    assert_ne!(
                        code,
                        REDIRECT,
                        "{program} answered {len} bytes of {}",
                        whole.len()
                    );
                    assert_eq!(bytes, &whole[..len], "{program} on {len} bytes");
                }
                None => assert!(
                    len <= 14 || len < 14 + ip_len,
                    "{program} was not run on {len} bytes"
                ),
            }
        }
    }
    // A length field that disagrees with the packet.
    let mut longer = to_health(&request(), &echo4(8, 0, 5, 6, b"data"));
    longer.extend([0; 6]);
    assert_eq!(bed.run("to_endpoint", &longer), untouched(&longer));
    assert_eq!(bed.counted(Reason::EchoAnswered), 0);
}

#[test]
#[ignore = "needs root"]
fn tagged_packets_are_not_the_endpoints() {
    let bed = bed();
    let inner = [
        &[0x00, 0x05][..],
        &IPV4.to_be_bytes(),
        &request().packet(&echo4(8, 0, 5, 6, b"data")),
    ]
    .concat();
    for tag in [0x8100, 0x88a8] {
        let packet = ethernet(MAC, HOST_MAC, tag, &inner);
        assert_eq!(bed.run("to_endpoint", &packet), untouched(&packet));
    }
}

#[test]
#[ignore = "needs root"]
fn an_icmpv6_echo_request_becomes_its_reply() {
    let bed = bed();
    for len in [0, 1, 56, 57, 1452] {
        for (class, flow, hop_limit) in [(0, 0, 64), (0xb8, 0x12345, 3)] {
            let data = payload(len);
            let ip = Ipv6 {
                class,
                flow,
                hop_limit,
                ..Ipv6::icmp(PEER6, HEALTH6)
            };
            let packet = ethernet(
                MAC,
                HOST_MAC,
                IPV6,
                &ip.packet(&ip.with_checksum(echo(128, 0, 5, 6, &data))),
            );
            let back = Ipv6 {
                class,
                flow,
                ..Ipv6::icmp(HEALTH6, PEER6)
            };
            let expected = ethernet(
                HOST_MAC,
                MAC,
                IPV6,
                &back.packet(&back.with_checksum(echo(129, 0, 5, 6, &data))),
            );
            assert_eq!(
                bed.run("to_endpoint", &packet),
                sent_back(expected),
                "payload of {len}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn icmpv6_behind_extension_headers_is_left_to_the_stack() {
    let bed = bed();
    for header in [0, 43, 44, 60, 135] {
        let ip = Ipv6 {
            next_header: header,
            ..Ipv6::icmp(PEER6, HEALTH6)
        };
        // Padding in the options header, followed by the echo.
        let extension = [58, 0, 1, 4, 0, 0, 0, 0];
        let message = ip.with_checksum(echo(128, 0, 5, 6, b"data"));
        let packet = ethernet(
            MAC,
            HOST_MAC,
            IPV6,
            &ip.packet(&[&extension[..], &message].concat()),
        );
        assert_eq!(
            bed.run("to_endpoint", &packet),
            untouched(&packet),
            "header {header}"
        );
    }
    assert_eq!(bed.counted(Reason::LeftToStack), 5);
}

#[test]
#[ignore = "needs root"]
fn http_to_the_health_endpoint_is_left_to_its_stack_by_both_ip_versions() {
    const SYN: u8 = 2;
    let syn = Tcp::between((40_000, 4240), SYN);
    for (peer, health) in [
        (IpAddr::from(PEER), IpAddr::from(HEALTH)),
        (PEER6.into(), HEALTH6.into()),
    ] {
        let bed = bed();
        let packet = syn.frame(peer, health);
        assert_eq!(bed.run("to_endpoint", &packet), untouched(&packet));
        let counted = [Reason::LeftToStack, Reason::Forwarded].map(|reason| bed.counted(reason));
        assert_eq!(counted, [1, 0], "to {health}");
    }
}

fn arp_request(mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    ethernet(
        [0xff; 6],
        mac,
        ARP,
        &arp(1, (mac, sender), ([0; 6], target)),
    )
}

#[test]
#[ignore = "needs root"]
fn arp_for_endpoint_and_gateway_is_answered() {
    let bed = bed();
    let expected = ethernet(HOST_MAC, MAC, ARP, &arp(2, (MAC, HEALTH), (HOST_MAC, PEER)));
    assert_eq!(
        bed.run("to_endpoint", &arp_request(HOST_MAC, PEER, HEALTH)),
        sent_back(expected)
    );
    let expected = ethernet(
        MAC,
        HOST_MAC,
        ARP,
        &arp(2, (HOST_MAC, GATEWAY), (MAC, HEALTH)),
    );
    assert_eq!(
        bed.run("from_endpoint", &arp_request(MAC, HEALTH, GATEWAY)),
        sent_back(expected)
    );
    assert_eq!(bed.counted(Reason::NeighbourAnswered), 2);
}

#[test]
#[ignore = "needs root"]
fn arp_that_is_malformed_or_for_others_is_not_answered() {
    let bed = bed();
    let other = Ipv4Addr::new(10, 244, 1, 9);
    let mut cases = vec![
        arp_request(HOST_MAC, PEER, other),
        arp_request(HOST_MAC, Ipv4Addr::UNSPECIFIED, HEALTH),
        arp_request(HOST_MAC, HEALTH, HEALTH),
        ethernet(MAC, HOST_MAC, ARP, &arp(2, (HOST_MAC, PEER), (MAC, HEALTH))),
        // The ARP sender address differs from the frame's source address.
        ethernet(
            [0xff; 6],
            HOST_MAC,
            ARP,
            &arp(1, ([2; 6], PEER), ([0; 6], HEALTH)),
        ),
    ];
    for at in 0..6 {
        let mut wrong = arp_request(HOST_MAC, PEER, HEALTH);
        wrong[14 + at] ^= 0x40;
        cases.push(wrong);
    }
    for packet in cases {
        assert_eq!(bed.run("to_endpoint", &packet), untouched(&packet));
    }
    // In duplicate address detection, the sender address is unspecified.
    for packet in [
        arp_request(MAC, HEALTH, other),
        arp_request(MAC, Ipv4Addr::UNSPECIFIED, HEALTH),
    ] {
        assert_eq!(bed.run("from_endpoint", &packet), untouched(&packet));
    }
    assert_eq!(bed.counted(Reason::NeighbourAnswered), 0);
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_cannot_make_itself_a_neighbour_under_others_addresses() {
    let bed = bed();
    let other = Ipv4Addr::new(10, 244, 1, 9);
    let cases = [
        arp_request(MAC, other, GATEWAY),
        arp_request(MAC, other, other),
        arp_request(MAC, GATEWAY, GATEWAY),
        ethernet(HOST_MAC, MAC, ARP, &arp(2, (MAC, other), (HOST_MAC, PEER))),
    ];
    for (packet, count) in cases.iter().zip(1..) {
        assert_eq!(bed.run("from_endpoint", packet), dropped(packet));
        assert_eq!(bed.counted(Reason::InvalidSource), count);
    }
    let cut = &cases[0][..41];
    assert_eq!(bed.run("from_endpoint", cut), dropped(cut));
    assert_eq!(bed.counted(Reason::InvalidPacket), 1);
}

fn solicited_node(target: Ipv6Addr) -> (Ipv6Addr, [u8; 6]) {
    let o = target.octets();
    let group = Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(o[13]),
        u16::from_be_bytes([o[14], o[15]]),
    );
    (group, [0x33, 0x33, 0xff, o[13], o[14], o[15]])
}

fn solicitation_message(target: Ipv6Addr, mac: [u8; 6]) -> Vec<u8> {
    [
        &[135, 0, 0, 0, 0, 0, 0, 0][..],
        &target.octets(),
        &[1, 1],
        &mac,
    ]
    .concat()
}

fn solicitation(source: Ipv6Addr, target: Ipv6Addr, mac: [u8; 6]) -> Vec<u8> {
    let (group, group_mac) = solicited_node(target);
    let ip = Ipv6 {
        hop_limit: 255,
        ..Ipv6::icmp(source, group)
    };
    ethernet(
        group_mac,
        mac,
        IPV6,
        &ip.packet(&ip.with_checksum(solicitation_message(target, mac))),
    )
}

fn advertisement(from: ([u8; 6], Ipv6Addr), to: ([u8; 6], Ipv6Addr), flags: u8) -> Vec<u8> {
    let ip = Ipv6 {
        hop_limit: 255,
        ..Ipv6::icmp(from.1, to.1)
    };
    let message = [
        &[136, 0, 0, 0, flags, 0, 0, 0][..],
        &from.1.octets(),
        &[2, 1],
        &from.0,
    ]
    .concat();
    ethernet(to.0, from.0, IPV6, &ip.packet(&ip.with_checksum(message)))
}

#[test]
#[ignore = "needs root"]
fn solicitations_for_endpoint_and_gateway_are_answered() {
    let bed = bed();
    for source in [PEER6, "fe80::1".parse().expect("an address")] {
        let expected = advertisement((MAC, HEALTH6), (HOST_MAC, source), 0x60);
        assert_eq!(
            bed.run("to_endpoint", &solicitation(source, HEALTH6, HOST_MAC)),
            sent_back(expected)
        );
    }
    let expected = advertisement((HOST_MAC, GATEWAY6), (MAC, HEALTH6), 0xe0);
    assert_eq!(
        bed.run("from_endpoint", &solicitation(HEALTH6, GATEWAY6, MAC)),
        sent_back(expected)
    );
}

#[test]
#[ignore = "needs root"]
fn solicitations_that_are_invalid_or_for_others_are_not_answered() {
    let bed = bed();
    let other: Ipv6Addr = "fd00:10:244:1::9".parse().expect("an address");
    let (group, group_mac) = solicited_node(HEALTH6);
    let build =
        |ip: &Ipv6, message: Vec<u8>| ethernet(group_mac, HOST_MAC, IPV6, &ip.packet(&message));
    let ip = Ipv6 {
        hop_limit: 255,
        ..Ipv6::icmp(PEER6, group)
    };
    let message = ip.with_checksum(solicitation_message(HEALTH6, HOST_MAC));
    let routed = Ipv6 {
        hop_limit: 254,
        ..ip.clone()
    };
    let mut damaged = message.clone();
    damaged[3] ^= 1;
    let mut coded = solicitation_message(HEALTH6, HOST_MAC);
    coded[1] = 1;
    let without_option = ip.with_checksum(message[..24].to_vec());
    for packet in [
        solicitation(PEER6, other, HOST_MAC),
        // A duplicate address detection probe has an unspecified source.
        solicitation(Ipv6Addr::UNSPECIFIED, HEALTH6, HOST_MAC),
        build(&routed, message.clone()),
        build(&ip, damaged),
        build(&ip, ip.with_checksum(coded)),
        build(&ip, without_option),
    ] {
        assert_eq!(bed.run("to_endpoint", &packet), untouched(&packet));
    }
    assert_eq!(bed.counted(Reason::NeighbourAnswered), 0);
}

/// A host drops packets sent to another MAC address, so the program does not answer them on the host's behalf.
#[test]
#[ignore = "needs root"]
fn what_is_for_another_hardware_address_is_not_answered() {
    let bed = bed();
    let v6 = Ipv6::icmp(PEER6, HEALTH6);
    let echo6 = v6.packet(&v6.with_checksum(echo(128, 0, 5, 6, b"data")));
    let with_options = Ipv4 {
        options: vec![1; 8],
        ..request()
    };
    let to = "to_endpoint";
    let from = "from_endpoint";
    let groups = [[0xff; 6], [0x33, 0x33, 0xff, 0, 0, 7]];
    for (program, own, packet, answers_groups) in [
        (
            to,
            MAC,
            to_health(&request(), &echo4(8, 0, 5, 6, b"data")),
            false,
        ),
        (
            to,
            MAC,
            to_health(&with_options, &echo4(8, 0, 5, 6, b"data")),
            false,
        ),
        (to, MAC, ethernet(MAC, HOST_MAC, IPV6, &echo6), false),
        (to, MAC, arp_request(HOST_MAC, PEER, HEALTH), true),
        (to, MAC, solicitation(PEER6, HEALTH6, HOST_MAC), true),
        (from, HOST_MAC, arp_request(MAC, HEALTH, GATEWAY), true),
        (from, HOST_MAC, solicitation(HEALTH6, GATEWAY6, MAC), true),
    ] {
        let with = |mac: [u8; 6]| [&mac[..], &packet[6..]].concat();
        let code = |mac| bed.run(program, &with(mac)).code;
        assert_eq!(code(own), REDIRECT);
        for group in groups {
            assert_eq!(
                code(group) == REDIRECT,
                answers_groups,
                "{program} {group:x?}"
            );
        }
        for bit in 1..48 {
            let mut other = own;
            other[bit / 8] ^= 1 << (bit % 8);
            let packet = with(other);
            assert_eq!(
                bed.run(program, &packet),
                untouched(&packet),
                "{program} {other:x?}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_can_only_send_as_itself() {
    let bed = bed();
    let own = from_health(&Ipv4::icmp(HEALTH, PEER), &echo4(8, 0, 5, 6, b"data"));
    assert_eq!(bed.run("from_endpoint", &own), untouched(&own));
    let forged = from_health(
        &Ipv4::icmp(Ipv4Addr::new(10, 244, 1, 8), PEER),
        &echo4(8, 0, 5, 6, b"data"),
    );
    assert_eq!(bed.run("from_endpoint", &forged), dropped(&forged));
    let link_local = Addr::link_local(MAC).to_ip().to_string();
    for (source, expected) in [
        (&*link_local, GO_ON),
        ("::", GO_ON),
        ("fe80::1", DROP),
        ("fd00::1", DROP),
    ] {
        let routers = "ff02::2".parse().expect("an address");
        let ip = Ipv6 {
            hop_limit: 255,
            ..Ipv6::icmp(source.parse().expect("an address"), routers)
        };
        let packet = ethernet(
            HOST_MAC,
            MAC,
            IPV6,
            &ip.packet(&ip.with_checksum(echo(133, 0, 0, 0, b""))),
        );
        assert_eq!(bed.run("from_endpoint", &packet).code, expected, "{source}");
    }
    assert_eq!(bed.counted(Reason::InvalidSource), 3);
}

#[test]
#[ignore = "needs root"]
fn each_exchange_is_in_conntrack() {
    let bed = bed();
    for sequence in 1..=3 {
        let packet = to_health(&request(), &echo4(8, 0, 0x1234, sequence, &payload(56)));
        assert_eq!(bed.run("to_endpoint", &packet).code, REDIRECT);
    }
    let flows = bed.maps().conntrack().expect("the flows");
    let [(flow, entry)] = &flows[..] else {
        panic!("one flow, not {flows:?}")
    };
    assert!(flow.inbound);
    assert_eq!((flow.source, flow.source_port), (IpAddr::V4(PEER), 0x1234));
    assert_eq!(
        (flow.destination, flow.destination_port, flow.protocol),
        (IpAddr::V4(HEALTH), 0, 1)
    );
    assert_eq!((entry.rx_packets, entry.tx_packets), (3, 3));
    assert_eq!((entry.rx_bytes, entry.tx_bytes), (3 * 84, 3 * 84));
    assert_eq!(entry.expires, entry.last_rx + 60);
    assert!(entry.last_rx > 0 && entry.last_tx == entry.last_rx);
}

fn probe_number(sequence: u16) -> Probe {
    Probe {
        key: KEY,
        id: PROBE_ID,
        sequence,
        session: SESSION,
        round: 0,
        path: Path::Host as u8,
        flags: 0,
        turnround: 0,
        arrived: 0,
    }
}

fn probe(path: Path, kind: u8, id: u16, sequence: u16) -> Vec<u8> {
    let probe = Probe {
        id,
        path: path as u8,
        ..probe_number(sequence)
    };
    let ip = if kind == 8 {
        Ipv4::icmp(HEALTH, PEER)
    } else {
        Ipv4::icmp(PEER, HEALTH)
    };
    ethernet(HOST_MAC, MAC, IPV4, &ip.packet(&probe.message4(kind)))
}

fn number(sequence: u16) -> ProbeId {
    ProbeId {
        session: SESSION,
        round: 0,
        sequence,
    }
}

/// Reports the answer to a probe the way the agent does. The uplinks' programs must have matched the answer. Returns
/// the round trip.
fn hear(rtt: &KernelRtt, key: RttKey, number: ProbeId) -> u64 {
    match rtt.answered(key, number, u64::MAX) {
        Ok(Measurement::ByKernel(rtt_ns)) => rtt_ns,
        other => panic!("{number:?} was stamped and matched, not {other:?}"),
    }
}

/// The row after the answer to a probe was reported with [`hear`].
fn entered(rtt: &KernelRtt, key: RttKey, number: ProbeId) -> RttRow {
    hear(rtt, key, number);
    rtt.row(key).expect("the map").expect("the row")
}

#[test]
#[ignore = "needs root"]
fn a_probe_and_its_reply_make_a_round_trip() {
    let bed = bed();
    let rtt = bed.datapath.rtt().expect("the rows");
    let key = RttKey {
        peer: PEER.into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    };
    rtt.ensure(key).expect("a row");
    for sequence in 1..=3 {
        let out = probe(Path::Host, 8, PROBE_ID, sequence);
        assert_eq!(bed.run("to_netdev", &out), untouched(&out));
        let back = probe(Path::Host, 0, PROBE_ID, sequence);
        assert_eq!(bed.run("from_netdev", &back), untouched(&back));
    }
    // The row stays empty until the agent reports the answers.
    assert_eq!(rtt.row(key).expect("the map"), Some(RttRow::EMPTY));
    assert_eq!(bed.maps().inflight().expect("the probes").len(), 3);
    let times = [1, 2, 3].map(|sequence| hear(&rtt, key, number(sequence)));
    assert!(bed.maps().inflight().expect("the probes").is_empty());
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!(
        (
            row.samples,
            row.lost,
            row.late,
            row.last_sequence,
            row.source
        ),
        (3, 0, 0, 3, SOURCE_KERNEL)
    );
    assert!(times.iter().all(|&rtt_ns| rtt_ns > 0));
    assert_eq!(
        (Some(row.min_ns), Some(row.max_ns), row.sum_ns, row.last_ns),
        (
            times.iter().min().copied(),
            times.iter().max().copied(),
            times.iter().sum(),
            times[2]
        )
    );
    assert_eq!(row.histogram.iter().map(|&n| u64::from(n)).sum::<u64>(), 3);
    assert_eq!(bed.counted(Reason::ProbeStamped), 3);
    assert_eq!(bed.counted(Reason::ProbeMatched), 3);

    // The last reply once more, and a reply to a probe that was never sent.
    for sequence in [3, 9] {
        bed.run("from_netdev", &probe(Path::Host, 0, PROBE_ID, sequence));
    }
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!((row.samples, row.duplicates, row.late), (3, 1, 0));
    assert_eq!(bed.counted(Reason::ProbeUnmatched), 2);
    // Reporting the answers again changes nothing.
    for (sequence, rtt_ns) in (1..).zip(times) {
        assert_eq!(hear(&rtt, key, number(sequence)), rtt_ns);
    }
    let again = rtt.row(key).expect("the map").expect("the row");
    assert_eq!((again.samples, again.sum_ns), (3, row.sum_ns));

    // The agent's own echoes are host-local in NAT and outbound in conntrack.
    let flows = bed.maps().conntrack().expect("the flows");
    let [(flow, entry)] = &flows[..] else {
        panic!("one flow, not {flows:?}")
    };
    assert!(!flow.inbound);
    assert_eq!((entry.tx_packets, entry.rx_packets), (3, 5));
    let nat = bed.maps().nat().expect("the translations");
    assert_eq!(nat.len(), 2);
    assert!(
        nat.iter()
            .all(|(_, to)| to.host_local && to.addr == IpAddr::V4(HEALTH) && to.port == PROBE_ID)
    );
}

#[test]
#[ignore = "needs root"]
fn a_probe_that_crosses_two_uplinks_counts_from_the_second() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let out = probe(Path::Host, 8, PROBE_ID, 1);
    bed.run("to_netdev", &out);
    std::thread::sleep(Duration::from_millis(200));
    let second = Instant::now();
    bed.run("to_netdev", &out);
    bed.run("from_netdev", &probe(Path::Host, 0, PROBE_ID, 1));
    let most = second.elapsed();
    let measured = Duration::from_nanos(hear(&rtt, key, number(1)));
    assert!(measured <= most, "{measured:?} of {most:?}");
}

#[test]
#[ignore = "needs root"]
fn a_reply_counts_from_the_kernels_stamp_and_not_from_one_of_another_time() {
    const LONG: Duration = Duration::from_millis(1);
    const HOUR_NS: u64 = 3_600_000_000_000;
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    // The measured round trip and its upper bounds: the time until the stamp, and the total time.
    let round_trip = |sequence, stamp: fn(u64) -> u64| {
        let before = Instant::now();
        bed.run("to_netdev", &probe(Path::Host, 8, PROBE_ID, sequence));
        let (taken, stamped_ns, after) = (Instant::now(), utc_ns(), Instant::now());
        while after.elapsed() < LONG {}
        let reply = probe(Path::Host, 0, PROBE_ID, sequence);
        bed.run_with("from_netdev", &reply, &stamped(stamp(stamped_ns)));
        let measured = Duration::from_nanos(hear(&rtt, key, number(sequence)));
        assert!(measured <= before.elapsed(), "{measured:?}");
        (measured, after - before, taken.elapsed())
    };
    let mut sequence = 1;
    loop {
        let (measured, until_stamp, waited) = round_trip(sequence, |at| at);
        sequence += 1;
        // An older stamp is ignored: the machine was busy in between, so the measurement is repeated.
        if waited < Duration::from_millis(9) {
            assert!(measured <= until_stamp, "{measured:?} of {until_stamp:?}");
            break;
        }
    }
    let elsewhere: [fn(u64) -> u64; 5] = [
        |_| 0,
        |_| 1,
        |at| at + HOUR_NS,
        |at| at - HOUR_NS,
        |_| u64::MAX,
    ];
    for (sequence, stamp) in (sequence..).zip(elsewhere) {
        let (measured, ..) = round_trip(sequence, stamp);
        assert!(measured >= LONG, "{measured:?}");
    }
}

#[test]
#[ignore = "needs root"]
fn a_lost_probe_is_counted_once_and_an_answered_one_is_not() {
    let bed = bed();
    let rtt = bed.datapath.rtt().expect("the rows");
    let key = RttKey {
        peer: PEER.into(),
        path: Path::Endpoint as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    };
    assert_eq!(
        rtt.lost(key, number(1)).expect("an answer"),
        LossOutcome::UnknownPeer
    );
    rtt.ensure(key).expect("a row");
    bed.run("to_netdev", &probe(Path::Endpoint, 8, PROBE_ID, 1));
    assert_eq!(
        rtt.lost(key, number(1)).expect("an answer"),
        LossOutcome::Counted
    );
    assert_eq!(
        rtt.lost(key, number(1)).expect("an answer"),
        LossOutcome::AlreadyLost
    );
    // The answer to it arrives late; every further answer is a duplicate.
    for _ in 0..2 {
        bed.run("from_netdev", &probe(Path::Endpoint, 0, PROBE_ID, 1));
    }
    bed.run("to_netdev", &probe(Path::Endpoint, 8, PROBE_ID, 2));
    bed.run("from_netdev", &probe(Path::Endpoint, 0, PROBE_ID, 2));
    assert_eq!(
        rtt.lost(key, number(2)).expect("an answer"),
        LossOutcome::AlreadyAnswered
    );
    assert_eq!(
        rtt.lost_untracked(key).expect("an answer"),
        LossOutcome::Counted
    );
    rtt.sample(key, 5_000).expect("counted");
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!(
        (row.samples, row.lost, row.late, row.duplicates, row.last_ns),
        (2, 2, 1, 1, 5_000)
    );
}

#[test]
#[ignore = "needs root"]
fn other_peoples_pings_are_not_stamped() {
    let bed = bed();
    let rtt = bed.datapath.rtt().expect("the rows");
    let key = RttKey {
        peer: PEER.into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    };
    rtt.ensure(key).expect("a row");
    let foreign = ethernet(
        HOST_MAC,
        MAC,
        IPV4,
        &Ipv4::icmp(HEALTH, PEER).packet(&echo4(8, 0, PROBE_ID, 1, &payload(56))),
    );
    let short = ethernet(
        HOST_MAC,
        MAC,
        IPV4,
        &Ipv4::icmp(HEALTH, PEER).packet(&echo4(8, 0, PROBE_ID, 1, b"")),
    );
    let own = probe_number(1);
    let others = [
        Probe {
            key: [KEY[0], 0],
            ..own
        },
        Probe {
            key: [0; 2],
            turnround: ARRIVAL | 5,
            ..own
        },
    ];
    let mut packets = Vec::new();
    for other in others {
        for kind in [8, 0] {
            let ip = Ipv4::icmp(PEER, HEALTH);
            packets.push(ethernet(
                HOST_MAC,
                MAC,
                IPV4,
                &ip.packet(&other.message4(kind)),
            ));
            let ip = Ipv6::icmp(PEER6, HEALTH6);
            let kind6 = if kind == 8 { 128 } else { 129 };
            packets.push(ethernet(
                HOST_MAC,
                MAC,
                IPV6,
                &ip.packet(&other.message6(kind6, &ip)),
            ));
        }
    }
    // The source is an address of this node, so `foreign` and `short` cannot arrive on an uplink.
    for packet in [&foreign, &short].into_iter().chain(&packets) {
        assert_eq!(bed.run("to_netdev", packet), untouched(packet));
    }
    for packet in &packets {
        assert_eq!(bed.run("from_netdev", packet), untouched(packet));
    }
    for reason in [
        Reason::ProbeStamped,
        Reason::ProbeMatched,
        Reason::ProbeArrived,
        Reason::ProbeReturned,
    ] {
        assert_eq!(bed.counted(reason), 0, "{reason:?}");
    }
    assert!(bed.maps().inflight().expect("the probes").is_empty());
    assert_eq!(rtt.row(key).expect("the map"), Some(RttRow::EMPTY));
}

/// Marks a value as a time of arrival from the wire.
const ARRIVAL: u64 = 1 << 63;

fn host_row(bed: &TestRun) -> (KernelRtt, RttKey) {
    row_of(bed, PEER.into())
}

fn row_of(bed: &TestRun, peer: IpAddr) -> (KernelRtt, RttKey) {
    let rtt = bed.datapath.rtt().expect("the rows");
    let key = RttKey {
        peer: peer.into(),
        path: Path::Host as u8,
        protocol: PROTOCOL_ICMP,
        pad: 0,
    };
    rtt.ensure(key).expect("a row");
    (rtt, key)
}

/// A packet with a message between two hosts, of either IP version, with or without VLAN tags.
fn uplink_packet(
    v6: bool,
    tags: &[(u16, u16)],
    outbound: bool,
    probe: &Probe,
    kind: u8,
) -> Vec<u8> {
    let frame = if v6 {
        let (from, to) = if outbound {
            (HEALTH6, PEER6)
        } else {
            (PEER6, HEALTH6)
        };
        let ip = Ipv6::icmp(from, to);
        let kind = if kind == 8 { 128 } else { 129 };
        ethernet(MAC, HOST_MAC, IPV6, &ip.packet(&probe.message6(kind, &ip)))
    } else {
        let (from, to) = if outbound {
            (HEALTH, PEER)
        } else {
            (PEER, HEALTH)
        };
        ethernet(
            MAC,
            HOST_MAC,
            IPV4,
            &Ipv4::icmp(from, to).packet(&probe.message4(kind)),
        )
    };
    tagged(&frame, tags)
}

const TAGS: [&[(u16, u16)]; 4] = [
    &[],
    &[(0x8100, 5)],
    &[(0x88a8, 7), (0x8100, 0x6005)],
    &[(0x8100, 7), (0x8100, 5)],
];

#[test]
#[ignore = "needs root"]
fn probes_are_measured_on_vlans_too() {
    for v6 in [false, true] {
        for tags in TAGS {
            let bed = bed();
            let peer = if v6 { PEER6.into() } else { PEER.into() };
            let (rtt, key) = row_of(&bed, peer);
            let probe = probe_number(1);
            let out = uplink_packet(v6, tags, true, &probe, 8);
            assert_eq!(bed.run("to_netdev", &out), untouched(&out), "{tags:?}");
            let back = uplink_packet(v6, tags, false, &probe, 0);
            assert_eq!(bed.run("from_netdev", &back), untouched(&back), "{tags:?}");
            let row = entered(&rtt, key, number(1));
            assert_eq!(row.samples, 1, "IPv6 {v6} {tags:?}");
        }
        // The datapath does not parse a third tag.
        let bed = bed();
        let three = [(0x88a8, 1), (0x8100, 2), (0x8100, 3)];
        let out = uplink_packet(v6, &three, true, &probe_number(1), 8);
        assert_eq!(bed.run("to_netdev", &out), untouched(&out));
        assert_eq!(bed.counted(Reason::ProbeStamped), 0);
    }
}

#[test]
#[ignore = "needs root"]
fn a_reply_reports_how_long_the_probe_stayed() {
    for v6 in [false, true] {
        for tags in TAGS {
            for damage in [0, 0x20] {
                let bed = bed();
                let theirs = Probe {
                    id: 77,
                    session: 99,
                    path: Path::Endpoint as u8,
                    ..probe_number(3)
                };
                let mut request = uplink_packet(v6, tags, false, &theirs, 8);
                // Damages the reserved bytes, which only the checksum covers.
                let damaged_at = request.len() - 18;
                request[damaged_at] ^= damage;
                let arrived = bed.run("from_netdev", &request);
                assert_eq!(arrived.code, GO_ON);
                let at = request.len() - 16;
                let field = |bytes: &[u8]| {
                    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
                };
                let since = field(&arrived.bytes);
                assert!(since & ARRIVAL != 0, "{since:#x}");
                let mut expected = uplink_packet(
                    v6,
                    tags,
                    false,
                    &Probe {
                        turnround: since,
                        ..theirs
                    },
                    8,
                );
                // The damage stays: the checksum is still that of the undamaged message.
                expected[damaged_at] ^= damage;
                assert_eq!(arrived.bytes, expected, "IPv6 {v6} {tags:?}");
                // The packet crosses another uplink and is not changed again.
                assert_eq!(bed.run("from_netdev", &arrived.bytes).code, GO_ON);

                let mut reply = uplink_packet(
                    v6,
                    tags,
                    true,
                    &Probe {
                        turnround: since,
                        ..theirs
                    },
                    0,
                );
                reply[damaged_at] ^= damage;
                let left = bed.run("to_netdev", &reply);
                let stay = field(&left.bytes);
                assert!((1..60_000_000_000).contains(&stay), "{stay}");
                let mut expected = uplink_packet(
                    v6,
                    tags,
                    true,
                    &Probe {
                        turnround: stay,
                        ..theirs
                    },
                    0,
                );
                expected[damaged_at] ^= damage;
                assert_eq!(left.bytes, expected);
                // The packet crosses another uplink. It already carries a duration.
                assert_eq!(bed.run("to_netdev", &left.bytes), untouched(&left.bytes));

                let prober = Prober {
                    session: theirs.session,
                    icmp_id_be: theirs.id.to_be(),
                    pad: 0,
                };
                let counts = bed.datapath.arrivals().expect("the counts");
                let counts = counts
                    .arrivals(prober)
                    .expect("the map")
                    .expect("the entry");
                let mut ways = [WayCounts::default(); WAYS];
                ways[way(!v6, theirs.path)] = WayCounts {
                    arrived: 1,
                    replied: 1,
                };
                assert_eq!(counts.ways, ways);
                assert_eq!(bed.counted(Reason::ProbeArrived), 2);
                assert_eq!(bed.counted(Reason::ProbeReturned), 1);
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_reply_reports_the_remote_hosts_part_and_no_more_than_can_be() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let reply = |sequence, turnround| {
        let probe = Probe {
            turnround,
            ..probe_number(sequence)
        };
        bed.run(
            "to_netdev",
            &uplink_packet(false, &[], true, &probe_number(sequence), 8),
        );
        bed.run("from_netdev", &uplink_packet(false, &[], false, &probe, 0));
        entered(&rtt, key, number(sequence))
    };
    let row = reply(1, 0);
    assert_eq!((row.samples, row.remote.samples), (1, 0));
    assert_eq!(row.remote.network_share(), None);
    let row = reply(2, 100);
    assert_eq!(
        (row.samples, row.remote.samples, row.remote.last_ns),
        (2, 1, 100)
    );
    assert_eq!(
        (row.remote.sum_ns, row.remote.rtt_sum_ns),
        (100, row.last_ns)
    );
    // A duration longer than the whole round trip, and arrival times that were never replaced.
    for (sequence, lie) in [(3, 3_600_000_000_000), (4, ARRIVAL | 1), (5, u64::MAX)] {
        let row = reply(sequence, lie);
        assert_eq!(
            (row.samples, row.remote.samples),
            (u64::from(sequence), 1),
            "{lie:#x}"
        );
    }
}

#[test]
#[ignore = "needs root"]
fn one_way_delays_are_reported_where_clocks_can_be_in_step() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let reply = |sequence, flags, arrived: u64| {
        let probe = Probe {
            flags,
            ..probe_number(sequence)
        };
        bed.run("to_netdev", &uplink_packet(false, &[], true, &probe, 8));
        let probe = Probe {
            turnround: 100,
            arrived,
            ..probe
        };
        bed.run("from_netdev", &uplink_packet(false, &[], false, &probe, 0));
        entered(&rtt, key, number(sequence))
    };
    let tai_offset_ns = health_net::clock::state()
        .expect("the clock's state")
        .tai_offset_ns();
    let row = reply(1, 0, utc_ns() + tai_offset_ns);
    assert_eq!(row.one_way.samples, 0, "not asked for");
    let row = reply(2, 1, utc_ns() + tai_offset_ns);
    assert_eq!(row.one_way.samples, 1);
    let (forward, back) = (row.one_way.forward, row.one_way.back);
    assert_eq!(forward.last_ns + back.last_ns + 100, row.last_ns as i64);
    assert_eq!(
        (forward.min_ns, forward.smoothed_ns),
        (forward.last_ns, forward.last_ns)
    );
    // The peer's clock jumped, or was never set.
    for (sequence, arrived) in [
        (3, utc_ns() + 3_600_000_000_000),
        (4, utc_ns() - 3_600_000_000_000),
        (5, 5),
        (6, u64::MAX),
        (7, 1 << 63),
        (8, 0),
    ] {
        let row = reply(sequence, 1, arrived);
        assert_eq!(
            (row.samples, row.one_way.samples),
            (u64::from(sequence), 1),
            "{arrived}"
        );
    }
    // A reply to a peer carries the time at which the request arrived.
    let theirs = Probe {
        flags: 1,
        id: 77,
        ..probe_number(9)
    };
    let request = uplink_packet(false, &[], false, &theirs, 8);
    let arrived = bed.run("from_netdev", &request).bytes;
    let field = arrived[arrived.len() - 8..]
        .try_into()
        .expect("eight bytes");
    let reported = u64::from_be_bytes(field) - tai_offset_ns;
    assert!(reported.abs_diff(utc_ns()) < 60_000_000_000, "{reported}");
}

#[test]
#[ignore = "needs root"]
fn replies_that_lie_make_no_sample_and_are_delivered() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    bed.run("to_netdev", &probe(Path::Host, 8, PROBE_ID, 1));
    let honest = probe(Path::Host, 0, PROBE_ID, 1);
    let own = probe_number(1);
    let ip = Ipv4::icmp(PEER, HEALTH);
    let of = |ip: &Ipv4, message: &[u8]| ethernet(HOST_MAC, MAC, IPV4, &ip.packet(message));
    let mut lies = Vec::new();
    // Flips bits in every byte of the message and of the addresses in the header.
    for at in 14 + 12..honest.len() {
        for bit in [0x01, 0x80] {
            let mut damaged = honest.clone();
            damaged[at] ^= bit;
            lies.push(damaged);
        }
    }
    for probe in [
        Probe {
            session: SESSION + 1,
            ..own
        },
        Probe { round: 1, ..own },
        Probe { sequence: 2, ..own },
        Probe { path: 2, ..own },
        Probe { path: 0, ..own },
        Probe { key: [1, 2], ..own },
    ] {
        lies.push(of(&ip, &probe.message4(0)));
    }
    // A reply from an address other than the one probed.
    lies.push(of(&Ipv4::icmp(GATEWAY, HEALTH), &own.message4(0)));
    for options in 1..=10 {
        let ip = Ipv4 {
            options: vec![1; options * 4],
            ..ip.clone()
        };
        lies.push(of(&ip, &own.message4(0)));
    }
    for fragment in [0x2000, 0x0001] {
        let ip = Ipv4 {
            fragment,
            ..ip.clone()
        };
        lies.push(of(&ip, &own.message4(0)));
    }
    let mut longer = own.payload();
    longer.push(0);
    lies.push(of(&ip, &echo4(0, 0, PROBE_ID, 1, &longer)));
    lies.push(of(&ip, &echo4(0, 1, PROBE_ID, 1, &own.payload())));
    for len in 34..honest.len() {
        lies.push(honest[..len].to_vec());
    }
    for packet in lies {
        assert_eq!(bed.run("from_netdev", &packet), untouched(&packet));
        let row = rtt.row(key).expect("the map").expect("the row");
        assert_eq!(
            (row.samples, row.duplicates, row.late),
            (0, 0, 0),
            "{packet:?}"
        );
    }
    assert_eq!(bed.counted(Reason::ProbeMatched), 0);
    bed.run("from_netdev", &honest);
    assert_eq!(entered(&rtt, key, number(1)).samples, 1);
}

#[test]
#[ignore = "needs root"]
fn an_icmpv6_reply_with_a_wrong_checksum_or_extension_headers_makes_no_sample() {
    let bed = bed();
    let (rtt, key) = row_of(&bed, PEER6.into());
    let own = probe_number(1);
    bed.run("to_netdev", &uplink_packet(true, &[], true, &own, 8));
    let honest = uplink_packet(true, &[], false, &own, 0);
    let mut damaged = honest.clone();
    damaged[14 + 40 + 2] ^= 1;
    let extension = |next_header| {
        let ip = Ipv6 {
            next_header,
            ..Ipv6::icmp(PEER6, HEALTH6)
        };
        let header = [58, 0, 1, 4, 0, 0, 0, 0];
        let message = own.message6(129, &Ipv6::icmp(PEER6, HEALTH6));
        ethernet(
            MAC,
            HOST_MAC,
            IPV6,
            &ip.packet(&[&header[..], &message].concat()),
        )
    };
    let mut lies = vec![damaged];
    lies.extend([0, 43, 44, 60, 135].map(extension));
    lies.extend((54..honest.len()).map(|len| honest[..len].to_vec()));
    for packet in lies {
        assert_eq!(bed.run("from_netdev", &packet), untouched(&packet));
        assert_eq!(
            rtt.row(key).expect("the map"),
            Some(RttRow::EMPTY),
            "{packet:?}"
        );
    }
    assert_eq!(bed.counted(Reason::ProbeDamaged), 1);
    assert_eq!(bed.counted(Reason::ProbeMatched), 0);
    bed.run("from_netdev", &honest);
    assert_eq!(entered(&rtt, key, number(1)).samples, 1);
}

#[test]
#[ignore = "needs root"]
fn sequence_numbers_that_wrap_are_distinguished() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let of_round = |round| Probe {
        round,
        ..probe_number(1)
    };
    bed.run(
        "to_netdev",
        &uplink_packet(false, &[], true, &of_round(u16::MAX), 8),
    );
    bed.run(
        "to_netdev",
        &uplink_packet(false, &[], true, &of_round(0), 8),
    );
    // The answer to the first probe arrives when the second one with the same number is in flight.
    bed.run(
        "from_netdev",
        &uplink_packet(false, &[], false, &of_round(u16::MAX), 0),
    );
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!((row.samples, row.late, row.duplicates), (0, 1, 0));
    bed.run(
        "from_netdev",
        &uplink_packet(false, &[], false, &of_round(0), 0),
    );
    let row = entered(&rtt, key, number(1));
    assert_eq!((row.samples, row.late, row.duplicates), (1, 1, 0));
}

#[test]
#[ignore = "needs root"]
fn what_a_dead_agent_left_in_flight_is_lost_once() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    for sequence in 1..=3 {
        bed.run("to_netdev", &probe(Path::Host, 8, PROBE_ID, sequence));
    }
    bed.run("from_netdev", &probe(Path::Host, 0, PROBE_ID, 2));
    assert_eq!(bed.maps().inflight().expect("the probes").len(), 3);
    assert_eq!(rtt.give_up_leftovers().expect("the maps"), 2);
    assert_eq!(rtt.give_up_leftovers().expect("the maps"), 0);
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!((row.samples, row.lost), (1, 2));
    assert!(bed.maps().inflight().expect("the probes").is_empty());
}

#[test]
#[ignore = "needs root"]
fn an_answer_that_the_uplink_did_not_see_is_counted_once() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    bed.run("to_netdev", &probe(Path::Host, 8, PROBE_ID, 1));
    for sequence in [1, 2] {
        let measured = rtt.answered(key, number(sequence), 7_000);
        assert_eq!(measured.expect("a row"), Measurement::AtSocket);
    }
    // The answer does arrive on the uplink, but late.
    bed.run("from_netdev", &probe(Path::Host, 0, PROBE_ID, 1));
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!(
        (row.samples, row.duplicates, row.source),
        (2, 1, SOURCE_SOCKET)
    );
    assert_eq!(
        rtt.lost(key, number(2)).expect("an answer"),
        LossOutcome::AlreadyAnswered
    );
}

#[test]
#[ignore = "needs root"]
fn a_probe_that_crosses_no_uplink_leaves_no_flow() {
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let measured = rtt.answered(key, number(1), 7_000);
    assert_eq!(measured.expect("a row"), Measurement::AtSocket);
    assert_eq!(bed.maps().conntrack().expect("the flows"), []);
    assert_eq!(bed.maps().nat().expect("the translations"), []);
}

#[test]
#[ignore = "needs root"]
fn rows_are_whole_while_several_cpus_write_them_and_resets_lose_nothing_else() {
    const PASSES: u64 = 20_000;
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    let writes_left = AtomicU64::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (left, bed) = (&writes_left, &bed);
            scope.spawn(move || {
                let rtt = bed.datapath.rtt().expect("the rows");
                for _ in 0..PASSES {
                    // All samples have the same value, so that a complete row is easy to verify.
                    rtt.sample(key, 5_000).expect("counted");
                }
                left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        while writes_left.load(Ordering::Relaxed) > 0 {
            let alone = rtt.row(key).expect("the map").expect("the row");
            let listed = bed.maps().rtt().expect("the rows");
            assert_eq!(listed.len(), 1);
            for row in [alone, listed[0].1] {
                assert_eq!(row.sum_ns, row.samples * 5_000, "{row:?}");
                let counted: u64 = row.histogram.iter().map(|&n| u64::from(n)).sum();
                assert_eq!(counted, row.samples, "{row:?}");
            }
        }
    });
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!(row.samples, 2 * PASSES);
    assert_eq!(bed.maps().reset_rtt(&[key]).expect("a reset"), 1);
    let row = rtt.row(key).expect("the map").expect("the row");
    assert_eq!(
        row,
        RttRow {
            version: row.version,
            lock: row.lock,
            ..RttRow::EMPTY
        }
    );
    assert!(row.lock > 2 * PASSES);
}

#[test]
#[ignore = "needs root"]
fn a_full_bucket_halves_the_histogram_and_nothing_else() {
    const FEW: u16 = 10;
    let (usual_ns, rare_ns) = (20_000, 1_000_000);
    let bed = bed();
    let (rtt, key) = host_row(&bed);
    for _ in 0..FEW {
        rtt.sample(key, rare_ns).expect("counted");
    }
    for _ in 0..u16::MAX {
        rtt.sample(key, usual_ns).expect("counted");
    }
    let counts = || {
        let row = rtt.row(key).expect("the map").expect("the row");
        let of = |ns| row.histogram[bucket(ns)];
        (row.samples, of(usual_ns), of(rare_ns))
    };
    let samples = u64::from(u16::MAX) + u64::from(FEW);
    assert_eq!(counts(), (samples, u16::MAX, FEW));
    rtt.sample(key, usual_ns).expect("counted");
    assert_eq!(counts(), (samples + 1, u16::MAX / 2, FEW / 2));
    rtt.sample(key, usual_ns).expect("counted");
    assert_eq!(counts(), (samples + 2, u16::MAX / 2 + 1, FEW / 2));
}
