//! The parts of a packet that conntrack needs: its tuple, its TCP flags, and whether it is a fragment or an ICMP
//! error.
//!
//! The kernel side fetches the bytes and passes them in; nothing here reads past the end of the packet.

use network_types::ip::IpProto;

use crate::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP, TUPLE_IN, Tuple4, Tuple6};
use crate::echo::{
    ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, IPV4_LEN, IPV6_LEN,
    Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use crate::fragment::Fragment;
use crate::tcp::IP_PROTOCOL_TCP;

/// Most extension headers that the walk covers. A packet with more belongs to no flow.
pub const EXTENSIONS_MAX: usize = 6;
/// Extension header: fragment, whose eight bytes are a [`crate::fragment::FragmentHeader`].
pub const EXTENSION_FRAGMENT: u8 = IpProto::Ipv6Frag as u8;
/// Extension header: hop-by-hop options.
pub const EXTENSION_HOP_BY_HOP: u8 = IpProto::HopOpt as u8;
const EXTENSION_ROUTING: u8 = IpProto::Ipv6Route as u8;
const EXTENSION_AUTHENTICATION: u8 = IpProto::Ah as u8;
const EXTENSION_DESTINATION: u8 = IpProto::Ipv6Opts as u8;
/// Nothing follows (RFC 8200 section 4.7).
const NO_NEXT_HEADER: u8 = IpProto::Ipv6NoNxt as u8;

/// ICMP types of errors about a packet (RFC 792). Source quench and redirects are left out: the first is obsolete
/// (RFC 6633), the second is advice to the sender's host.
const ICMP_UNREACHABLE: u8 = 3;
const ICMP_TIME_EXCEEDED: u8 = 11;
const ICMP_PARAMETER_PROBLEM: u8 = 12;
/// ICMPv6 types of errors about a packet, from unreachable to parameter problem (RFC 4443 section 3).
const ICMPV6_UNREACHABLE: u8 = 1;
const ICMPV6_PARAMETER_PROBLEM: u8 = 4;

/// Bytes of a packet's transport header that an ICMP error is sure to contain (RFC 792).
const ERROR_HOLDS: u32 = 8;

/// An IPv6 extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Type of the next header.
    pub next_header: u8,
    /// Length of this header, bytes.
    pub len: u32,
}

/// Whether this type is an extension header to skip (RFC 8200 section 4, RFC 4302), not the packet's payload.
#[inline(always)]
pub const fn is_extension(kind: u8) -> bool {
    matches!(
        kind,
        EXTENSION_HOP_BY_HOP
            | EXTENSION_ROUTING
            | EXTENSION_FRAGMENT
            | EXTENSION_AUTHENTICATION
            | EXTENSION_DESTINATION
    )
}

/// Parses the first two bytes of a header of this type; `None` if it is not an extension header.
#[inline(always)]
pub const fn extension(kind: u8, start: [u8; 2]) -> Option<Extension> {
    let [next_header, units] = start;
    let len = match kind {
        EXTENSION_HOP_BY_HOP | EXTENSION_ROUTING | EXTENSION_DESTINATION => (units as u32 + 1) * 8,
        EXTENSION_FRAGMENT => 8,
        EXTENSION_AUTHENTICATION => (units as u32 + 2) * 4,
        _ => return None,
    };
    Some(Extension { next_header, len })
}

/// The first [`transport_len`] bytes of a transport header in memory order; the rest is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStart {
    /// Words in network byte order.
    pub words_be: [u16; 10],
}

/// Minimum length of a transport header, bytes. A shorter packet belongs to no flow. Protocols that are tracked by
/// number alone need none.
#[inline(always)]
pub const fn transport_len(protocol: u8) -> u32 {
    match protocol {
        IP_PROTOCOL_TCP => 20,
        IP_PROTOCOL_UDP | PROTOCOL_ICMP | PROTOCOL_ICMPV6 => 8,
        IP_PROTOCOL_SCTP => 12,
        _ => 0,
    }
}

/// As [`transport_len`], for the packet inside an ICMP error.
#[inline(always)]
pub const fn inner_transport_len(protocol: u8) -> u32 {
    let len = transport_len(protocol);
    if len > ERROR_HOLDS { ERROR_HOLDS } else { len }
}

/// How conntrack classifies a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole packet of a flow.
    Flow,
    /// A fragment of a packet of a flow. The first one has the flow's tuple, whose ports the others need; their own
    /// ports are 0.
    Fragment(Fragment),
    /// An error about the packet inside it, which identifies the flow: [`inner4`], [`inner6`]. Its own tuple has no
    /// ports.
    IcmpError,
    /// Neither belongs to a flow nor reports on one: another ICMP message (neighbour discovery, multicast groups,
    /// redirects and others), or no payload at all. Its tuple has no ports.
    NoFlow,
}

/// A packet as conntrack sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<T> {
    /// Its tuple, in the direction of the packet.
    pub tuple: T,
    /// Its TCP flags, 0 for other protocols.
    pub tcp_flags: u8,
    /// What it is.
    pub kind: Kind,
}

impl<T> Packet<T> {
    /// Whether this is a later fragment, which has no transport header.
    #[inline(always)]
    pub const fn is_later(&self) -> bool {
        matches!(self.kind, Kind::Fragment(fragment) if !fragment.first)
    }
}

/// Contents of the transport header.
#[derive(Clone, Copy)]
struct Transport {
    sport_be: u16,
    dport_be: u16,
    tcp_flags: u8,
    message: Message,
}

/// How a packet's content relates to a flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Message {
    OfFlow,
    Error,
    Other,
}

impl Transport {
    /// For a flow identified by its protocol alone.
    const NONE: Self = Self {
        sport_be: 0,
        dport_be: 0,
        tcp_flags: 0,
        message: Message::OfFlow,
    };

    /// `icmp` is the protocol number of ICMP in this IP version.
    #[inline(always)]
    fn read(protocol: u8, icmp: u8, start: &TransportStart) -> Self {
        let [first, second, third, ..] = start.words_be;
        match protocol {
            IP_PROTOCOL_TCP => Self {
                sport_be: first,
                dport_be: second,
                tcp_flags: u16::from_be(start.words_be[6]) as u8,
                ..Self::NONE
            },
            IP_PROTOCOL_UDP | IP_PROTOCOL_SCTP => Self {
                sport_be: first,
                dport_be: second,
                ..Self::NONE
            },
            NO_NEXT_HEADER if icmp == PROTOCOL_ICMPV6 => Self {
                message: Message::Other,
                ..Self::NONE
            },
            _ if protocol == icmp => Self::read_icmp(icmp, (u16::from_be(first) >> 8) as u8, third),
            // ICMP of the other IP version means nothing here.
            PROTOCOL_ICMP | PROTOCOL_ICMPV6 => Self {
                message: Message::Other,
                ..Self::NONE
            },
            _ => Self::NONE,
        }
    }

    #[inline(always)]
    fn read_icmp(icmp: u8, kind: u8, id_be: u16) -> Self {
        let (request, reply, is_error) = if icmp == PROTOCOL_ICMP {
            let is_error = matches!(
                kind,
                ICMP_UNREACHABLE | ICMP_TIME_EXCEEDED | ICMP_PARAMETER_PROBLEM
            );
            (ICMP_ECHO_REQUEST, ICMP_ECHO_REPLY, is_error)
        } else {
            let is_error = matches!(kind, ICMPV6_UNREACHABLE..=ICMPV6_PARAMETER_PROBLEM);
            (ICMPV6_ECHO_REQUEST, ICMPV6_ECHO_REPLY, is_error)
        };
        let message = match kind {
            _ if is_error => Message::Error,
            _ if kind == request || kind == reply => Message::OfFlow,
            _ => Message::Other,
        };
        Self {
            sport_be: if kind == request { id_be } else { 0 },
            dport_be: if kind == reply { id_be } else { 0 },
            tcp_flags: 0,
            message,
        }
    }

    /// The caller has already handled later fragments.
    #[inline(always)]
    fn kind(&self, fragment: Option<Fragment>) -> Kind {
        match (self.message, fragment) {
            (Message::Error, _) => Kind::IcmpError,
            (Message::Other, _) => Kind::NoFlow,
            (Message::OfFlow, Some(fragment)) => Kind::Fragment(fragment),
            (Message::OfFlow, None) => Kind::Flow,
        }
    }
}

impl Ipv4Header {
    /// Number of bytes after the header, for a packet that has `len` bytes from the header on. `None` if it is not
    /// IPv4.
    #[inline(always)]
    pub const fn data_len(&self, len: u32) -> Option<u32> {
        let header_len = self.header_len();
        if self.version_ihl >> 4 != 4 || header_len < IPV4_LEN as u32 {
            return None;
        }
        let claimed = match u16::from_be(self.total_len_be) {
            // Too large for the field (BIG TCP).
            0 => len,
            claimed => claimed as u32,
        };
        let there = if claimed < len { claimed } else { len };
        there.checked_sub(header_len)
    }
}

impl Ipv6Header {
    /// As [`Ipv4Header::data_len`], including the extension headers.
    #[inline(always)]
    pub const fn data_len(&self, len: u32) -> Option<u32> {
        if !self.is_version_6() {
            return None;
        }
        let Some(there) = len.checked_sub(IPV6_LEN as u32) else {
            return None;
        };
        let claimed = match u16::from_be(self.payload_len_be) as u32 {
            // Too large for the field (RFC 2675, BIG TCP).
            0 if there > u16::MAX as u32 => there,
            claimed => claimed,
        };
        Some(if claimed < there { claimed } else { there })
    }
}

/// Reads an IPv4 packet that travels in `direction` (as in a tuple) and has `len` bytes from the IP header on. `None`
/// if it is truncated or not IPv4.
#[inline(always)]
pub fn read4(
    ip: &Ipv4Header,
    len: u32,
    start: &TransportStart,
    direction: u8,
) -> Option<Packet<Tuple4>> {
    let data_len = ip.data_len(len)?;
    let fragment = ip.fragment();
    if let Some(later) = fragment
        && !later.first
    {
        return Some(Packet {
            tuple: tuple4(ip, &Transport::NONE, direction),
            tcp_flags: 0,
            kind: Kind::Fragment(later),
        });
    }
    if data_len < transport_len(ip.protocol) {
        return None;
    }
    let transport = Transport::read(ip.protocol, PROTOCOL_ICMP, start);
    Some(Packet {
        tuple: tuple4(ip, &transport, direction),
        tcp_flags: transport.tcp_flags,
        kind: transport.kind(fragment),
    })
}

/// Reads the packet inside an IPv4 ICMP error. The error travels in `direction` and holds `len` bytes from the inner
/// IP header on; `start` is the first [`inner_transport_len`] bytes after it. `None` if the inner packet is truncated
/// or belongs to no flow. The result is the tuple of a reply to the inner packet, so the flow is found as for any
/// packet in the error's direction.
#[inline(always)]
pub fn inner4(ip: &Ipv4Header, len: u32, start: &TransportStart, direction: u8) -> Option<Tuple4> {
    let data_len = ip.data_len(len)?;
    let is_later = matches!(ip.fragment(), Some(fragment) if !fragment.first);
    if is_later || data_len < inner_transport_len(ip.protocol) {
        return None;
    }
    let transport = Transport::read(ip.protocol, PROTOCOL_ICMP, start);
    // There are no errors about errors (RFC 1122 section 3.2.2).
    if transport.message != Message::OfFlow {
        return None;
    }
    Some(tuple4(ip, &transport, direction ^ TUPLE_IN).reversed())
}

#[inline(always)]
fn tuple4(ip: &Ipv4Header, transport: &Transport, direction: u8) -> Tuple4 {
    Tuple4 {
        saddr_be: ip.saddr_be,
        daddr_be: ip.daddr_be,
        sport_be: transport.sport_be,
        dport_be: transport.dport_be,
        protocol: ip.protocol,
        direction,
        pad: 0,
    }
}

/// Result of walking the extension headers of an IPv6 packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upper {
    /// Type of the first header that is not an extension header; in a later fragment, of the first header in the
    /// fragmentable part.
    pub protocol: u8,
    /// Number of bytes from that header on.
    pub len: u32,
    /// From the fragment header, if present. In a later fragment the walk stops there.
    pub fragment: Option<Fragment>,
}

/// As [`read4`], for IPv6 with the data after its extension headers. The protocol in the tuple of a later fragment is
/// the fragment's claim, not necessarily the packet's protocol.
#[inline(always)]
pub fn read6(
    ip: &Ipv6Header,
    upper: &Upper,
    start: &TransportStart,
    direction: u8,
) -> Option<Packet<Tuple6>> {
    if let Some(later) = upper.fragment
        && !later.first
    {
        return Some(Packet {
            tuple: tuple6(ip, upper.protocol, &Transport::NONE, direction),
            tcp_flags: 0,
            kind: Kind::Fragment(later),
        });
    }
    if upper.len < transport_len(upper.protocol) {
        return None;
    }
    let transport = Transport::read(upper.protocol, PROTOCOL_ICMPV6, start);
    Some(Packet {
        tuple: tuple6(ip, upper.protocol, &transport, direction),
        tcp_flags: transport.tcp_flags,
        kind: transport.kind(upper.fragment),
    })
}

/// As [`inner4`], for the packet inside an ICMPv6 error.
#[inline(always)]
pub fn inner6(
    ip: &Ipv6Header,
    upper: &Upper,
    start: &TransportStart,
    direction: u8,
) -> Option<Tuple6> {
    let is_later = matches!(upper.fragment, Some(fragment) if !fragment.first);
    if is_later || upper.len < inner_transport_len(upper.protocol) {
        return None;
    }
    let transport = Transport::read(upper.protocol, PROTOCOL_ICMPV6, start);
    // As for IPv4 (RFC 4443 section 2.4).
    if transport.message != Message::OfFlow {
        return None;
    }
    Some(tuple6(ip, upper.protocol, &transport, direction ^ TUPLE_IN).reversed())
}

#[inline(always)]
fn tuple6(ip: &Ipv6Header, protocol: u8, transport: &Transport, direction: u8) -> Tuple6 {
    Tuple6 {
        saddr_be: ip.saddr_be,
        daddr_be: ip.daddr_be,
        sport_be: transport.sport_be,
        dport_be: transport.dport_be,
        protocol,
        direction,
        pad: 0,
    }
}

#[cfg(test)]
mod tests {
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
    fn protocols_with_ports_are_told_by_them_and_others_by_their_number() {
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
    fn only_errors_about_packets_tell_of_a_flow() {
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
    fn an_error_about_an_error_or_about_too_little_tells_nothing() {
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
}
