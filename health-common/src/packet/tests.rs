extern crate std;
use super::*;
use crate::ct::TUPLE_OUT;
use proptest::prelude::*;
use std::vec::Vec;

const A: u32 = 0x0a00_0001;
const B: u32 = 0x0a00_0002;
const A6: [u32; 4] = [1, 2, 3, 4];
const B6: [u32; 4] = [5, 6, 7, 8];

fn start(bytes: &[u8]) -> TransportStart {
    let mut start = TransportStart::default();
    for (word, pair) in start.words_be.iter_mut().zip(bytes.chunks_exact(2)) {
        *word = u16::from_ne_bytes([pair[0], pair[1]]);
    }
    start
}

fn ip4(protocol: u8, data_len: u16) -> Ipv4Header {
    Ipv4Header {
        version_ihl: 0x45,
        total_len_be: (20 + data_len).to_be(),
        protocol,
        id_be: 0x5678,
        saddr_be: A,
        daddr_be: B,
        ..Ipv4Header::default()
    }
}

fn ip6() -> Ipv6Header {
    Ipv6Header {
        saddr_be: A6,
        daddr_be: B6,
        ..Ipv6Header::default()
    }
}

fn upper(protocol: u8, len: u32) -> Upper {
    Upper {
        protocol,
        len,
        fragment: None,
    }
}

fn expected4(protocol: u8, sport: u16, dport: u16) -> Tuple4 {
    Tuple4 {
        saddr_be: A,
        daddr_be: B,
        sport_be: sport.to_be(),
        dport_be: dport.to_be(),
        protocol,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

fn expected6(protocol: u8, sport: u16, dport: u16) -> Tuple6 {
    Tuple6 {
        saddr_be: A6,
        daddr_be: B6,
        sport_be: sport.to_be(),
        dport_be: dport.to_be(),
        protocol,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

/// A 20-byte header from port 1000 to port 80, with the TCP flags SYN and ACK.
const PORTS: [u8; 20] = [
    3, 232, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x12, 0, 0, 0, 0, 0, 0,
];

/// An ICMP message of this type with the identifier 0x0102.
fn icmp(kind: u8) -> TransportStart {
    start(&[kind, 0, 0xaa, 0xbb, 1, 2, 0, 7])
}

#[test]
fn protocols_with_ports_are_identified_by_them_and_others_by_their_number() {
    for (protocol, sport, dport, flags) in [
        (6, 1000, 80, 0x12),
        (17, 1000, 80, 0),
        (132, 1000, 80, 0),
        (47, 0, 0, 0),
        (50, 0, 0, 0),
    ] {
        let packet = read4(&ip4(protocol, 20), 40, &start(&PORTS), TUPLE_OUT).unwrap();
        assert_eq!(packet.tuple, expected4(protocol, sport, dport));
        assert_eq!((packet.tcp_flags, packet.kind), (flags, Kind::Flow));
        let packet = read6(&ip6(), &upper(protocol, 20), &start(&PORTS), TUPLE_OUT).unwrap();
        assert_eq!(packet.tuple, expected6(protocol, sport, dport));
        assert_eq!((packet.tcp_flags, packet.kind), (flags, Kind::Flow));
    }
}

#[test]
fn an_echo_has_its_identifier_in_place_of_the_requesters_port() {
    for (kind, sport, dport) in [(8, 0x102, 0), (0, 0, 0x102)] {
        let packet = read4(&ip4(1, 8), 28, &icmp(kind), TUPLE_OUT).unwrap();
        assert_eq!(packet.tuple, expected4(1, sport, dport));
        assert_eq!(packet.kind, Kind::Flow);
    }
    for (kind, sport, dport) in [(128, 0x102, 0), (129, 0, 0x102)] {
        let packet = read6(&ip6(), &upper(58, 8), &icmp(kind), TUPLE_OUT).unwrap();
        assert_eq!(packet.tuple, expected6(58, sport, dport));
        assert_eq!(packet.kind, Kind::Flow);
    }
}

#[test]
fn icmp_of_the_other_ip_version_belongs_to_no_flow() {
    for kind in 0..=u8::MAX {
        let packet = read4(&ip4(58, 8), 28, &icmp(kind), TUPLE_OUT).unwrap();
        assert_eq!(
            (packet.tuple, packet.kind),
            (expected4(58, 0, 0), Kind::NoFlow)
        );
        assert_eq!(inner4(&ip4(58, 8), 28, &icmp(kind), TUPLE_OUT), None);
        let packet = read6(&ip6(), &upper(1, 8), &icmp(kind), TUPLE_OUT).unwrap();
        assert_eq!(
            (packet.tuple, packet.kind),
            (expected6(1, 0, 0), Kind::NoFlow)
        );
        assert_eq!(inner6(&ip6(), &upper(1, 8), &icmp(kind), TUPLE_OUT), None);
    }
}

#[test]
fn only_errors_about_packets_identify_a_flow() {
    let of = |v6: bool, kind| {
        let message = icmp(kind);
        if v6 {
            read6(&ip6(), &upper(58, 8), &message, TUPLE_OUT)
                .unwrap()
                .kind
        } else {
            read4(&ip4(1, 8), 28, &message, TUPLE_OUT).unwrap().kind
        }
    };
    for kind in 0..=u8::MAX {
        let expected = match kind {
            0 | 8 => Kind::Flow,
            3 | 11 | 12 => Kind::IcmpError,
            _ => Kind::NoFlow,
        };
        assert_eq!(of(false, kind), expected, "{kind}");
        let expected = match kind {
            128 | 129 => Kind::Flow,
            1..=4 => Kind::IcmpError,
            _ => Kind::NoFlow,
        };
        assert_eq!(of(true, kind), expected, "{kind}");
    }
    let nothing = read6(&ip6(), &upper(59, 0), &start(&[]), TUPLE_OUT).unwrap();
    assert_eq!(nothing.kind, Kind::NoFlow);
}

#[test]
fn a_transport_header_that_is_cut_short_is_not_read() {
    for (protocol, needed) in [(6, 20), (17, 8), (132, 12), (1, 8), (47, 0)] {
        for len in 0..24_u16 {
            let frame = u32::from(len) + 20;
            let is_whole = len >= needed;
            let claimed = read4(&ip4(protocol, len), 60, &start(&PORTS), TUPLE_OUT);
            assert_eq!(claimed.is_some(), is_whole, "{protocol} {len}");
            let there = read4(&ip4(protocol, 40), frame, &start(&PORTS), TUPLE_OUT);
            assert_eq!(there.is_some(), is_whole, "{protocol} {len}");
        }
    }
    let short = read6(&ip6(), &upper(58, 7), &icmp(128), TUPLE_OUT);
    assert_eq!(short, None);
}

#[test]
fn a_packet_that_is_larger_than_its_length_field_is_as_long_as_it_is() {
    let mut ip = ip4(6, 0);
    ip.total_len_be = 0;
    assert_eq!(ip.data_len(70_000), Some(69_980));
    assert!(read4(&ip, 70_000, &start(&PORTS), TUPLE_OUT).is_some());
}

#[test]
fn an_ipv6_packet_ends_where_its_header_says_and_where_its_bytes_do() {
    let of = |payload_len: u16, len| {
        let ip = Ipv6Header {
            version_class_flow_be: 0x6000_0000_u32.to_be(),
            payload_len_be: payload_len.to_be(),
            ..Ipv6Header::default()
        };
        ip.data_len(len)
    };
    assert_eq!(of(4, 46), Some(4), "padding is no data");
    assert_eq!(of(0, 46), Some(0));
    assert_eq!(of(1400, 60), Some(20), "cut short");
    assert_eq!(of(0, 70_000), Some(69_960));
    assert_eq!(of(0, 39), None);
    assert_eq!(ip6().data_len(40), None, "no version");
}

#[test]
fn what_is_not_ipv4_is_not_read() {
    for version_ihl in [0x44, 0x65, 0x40, 0x00] {
        let ip = Ipv4Header {
            version_ihl,
            ..ip4(6, 20)
        };
        assert_eq!(read4(&ip, 60, &start(&PORTS), TUPLE_OUT), None);
    }
    let mut ip = ip4(6, 24);
    ip.version_ihl = 0x46;
    assert!(read4(&ip, 60, &start(&PORTS), TUPLE_OUT).is_some());
    ip.version_ihl = 0x4f;
    assert_eq!(read4(&ip, 44, &start(&PORTS), TUPLE_OUT), None);
}

#[test]
fn the_first_fragment_has_the_ports_and_later_ones_have_none() {
    let mut ip = ip4(17, 16);
    ip.fragment_be = 0x2000_u16.to_be();
    let first = read4(&ip, 36, &start(&PORTS), TUPLE_OUT).unwrap();
    assert_eq!(first.tuple, expected4(17, 1000, 80));
    assert!(matches!(first.kind, Kind::Fragment(f) if f.first && f.more && f.id_be == 0x5678));
    ip.fragment_be = 0x0002_u16.to_be();
    let last = read4(&ip, 21, &start(&PORTS), TUPLE_OUT).unwrap();
    assert_eq!(last.tuple, expected4(17, 0, 0));
    assert!(matches!(last.kind, Kind::Fragment(f) if !f.first && !f.more));
    assert_eq!(inner4(&ip, 36, &start(&PORTS), TUPLE_OUT), None);

    let of = |first| Upper {
        fragment: Some(Fragment {
            id_be: 9,
            first,
            more: true,
        }),
        ..upper(17, 8)
    };
    let first = read6(&ip6(), &of(true), &start(&PORTS), TUPLE_OUT).unwrap();
    assert_eq!(first.tuple, expected6(17, 1000, 80));
    let later = read6(&ip6(), &of(false), &start(&PORTS), TUPLE_OUT).unwrap();
    assert_eq!(later.tuple, expected6(17, 0, 0));
    assert!(matches!(later.kind, Kind::Fragment(f) if f.id_be == 9 && !f.first));
}

#[test]
fn a_first_fragment_without_a_whole_transport_header_is_not_read() {
    let mut ip = ip4(6, 16);
    ip.fragment_be = 0x2000_u16.to_be();
    assert_eq!(read4(&ip, 36, &start(&PORTS), TUPLE_OUT), None);
}

#[test]
fn an_error_finds_the_flow_as_a_reply_to_the_packet_in_it_would() {
    let eight = start(&PORTS[..8]);
    for protocol in [6, 17, 132, 47] {
        let sent = read4(&ip4(protocol, 20), 40, &start(&PORTS), TUPLE_OUT).unwrap();
        let inner = inner4(&ip4(protocol, 20), 28, &eight, TUPLE_IN).unwrap();
        assert_eq!(inner, sent.tuple.reversed());
        let sent = read6(&ip6(), &upper(protocol, 20), &start(&PORTS), TUPLE_OUT).unwrap();
        let inner = inner6(&ip6(), &upper(protocol, 8), &eight, TUPLE_IN).unwrap();
        assert_eq!(inner, sent.tuple.reversed());
    }
    let sent = read4(&ip4(1, 8), 28, &icmp(8), TUPLE_OUT).unwrap();
    let inner = inner4(&ip4(1, 8), 28, &icmp(8), TUPLE_IN).unwrap();
    assert_eq!(inner, sent.tuple.reversed());
    assert_eq!((inner.sport_be, inner.dport_be), (0, 0x102_u16.to_be()));
}

#[test]
fn an_error_about_an_error_or_about_too_little_reports_nothing() {
    assert_eq!(inner4(&ip4(1, 8), 28, &icmp(3), TUPLE_IN), None);
    assert_eq!(inner6(&ip6(), &upper(58, 8), &icmp(1), TUPLE_IN), None);
    assert_eq!(inner6(&ip6(), &upper(58, 8), &icmp(135), TUPLE_IN), None);
    assert_eq!(inner4(&ip4(6, 20), 27, &start(&PORTS), TUPLE_IN), None);
    assert_eq!(inner6(&ip6(), &upper(6, 7), &start(&PORTS), TUPLE_IN), None);
}

#[test]
fn extension_headers_have_the_lengths_of_their_kinds() {
    for (kind, units, len) in [
        (0, 0, 8),
        (43, 2, 24),
        (60, 255, 2048),
        (44, 99, 8),
        (51, 4, 24),
    ] {
        assert!(is_extension(kind));
        let expected = Extension {
            next_header: 6,
            len,
        };
        assert_eq!(extension(kind, [6, units]), Some(expected));
    }
}

proptest! {
    #[test]
    fn exactly_what_is_an_extension_header_is_walked_over_and_always_forward(kind: u8, bytes: [u8; 2]) {
        let walked = extension(kind, bytes);
        prop_assert_eq!(walked.is_some(), is_extension(kind));
        if let Some(header) = walked {
            prop_assert_eq!(header.next_header, bytes[0]);
            prop_assert!((8..=2048).contains(&header.len) && header.len % 4 == 0);
        }
    }

    /// Nothing is read past the end of the packet: bytes after it make no difference.
    #[test]
    fn bytes_past_the_end_of_a_packet_do_not_count(
        header: [u8; 4],
        fragment_be: u16,
        protocol in prop::sample::select(&[1_u8, 6, 17, 47, 58, 132][..]),
        len in 0_u32..80,
        bytes: [u8; 20],
        more in prop::collection::vec(any::<u8>(), 20),
        direction in 0_u8..2,
    ) {
        let ip = Ipv4Header {
            version_ihl: 0x40 | header[0] & 0x0f,
            total_len_be: u16::from(header[1] % 80).to_be(),
            id_be: u16::from_be_bytes([header[2], header[3]]),
            fragment_be,
            ..ip4(protocol, 0)
        };
        let there = ip.data_len(len).unwrap_or(0).min(20) as usize;
        let tail: Vec<u8> = bytes[..there].iter().chain(&more[there..]).copied().collect();
        prop_assert_eq!(
            read4(&ip, len, &start(&bytes), direction),
            read4(&ip, len, &start(&tail), direction)
        );
        prop_assert_eq!(
            inner4(&ip, len, &start(&bytes), direction),
            inner4(&ip, len, &start(&tail), direction)
        );
    }
}
