//! What conntrack wants to know of a packet: its tuple, its TCP flags, and whether it is a fragment or
//! tells of an error.
//!
//! The kernel side fetches bytes and hands them in; nothing here looks past what the packet holds.

use crate::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP, TUPLE_IN, Tuple4, Tuple6};
use crate::echo::{
    ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, IPV4_LEN,
    Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use crate::fragment::Fragment;
use crate::tcp::IP_PROTOCOL_TCP;

/// Most extension headers that are walked. A packet with more belongs to no flow.
pub const EXTENSIONS_MAX: usize = 6;
/// Extension header: fragment, whose eight bytes are a [`crate::fragment::FragmentHeader`].
pub const EXTENSION_FRAGMENT: u8 = 44;
const EXTENSION_HOP_BY_HOP: u8 = 0;
const EXTENSION_ROUTING: u8 = 43;
const EXTENSION_AUTHENTICATION: u8 = 51;
const EXTENSION_DESTINATION: u8 = 60;
/// Nothing follows (RFC 8200 section 4.7).
const NO_NEXT_HEADER: u8 = 59;

/// ICMP types of errors about a packet (RFC 792). Source quench and redirects are left out: the first
/// is obsolete (RFC 6633), the second is an advice to the sender's host.
const ICMP_UNREACHABLE: u8 = 3;
const ICMP_TIME_EXCEEDED: u8 = 11;
const ICMP_PARAMETER_PROBLEM: u8 = 12;
/// ICMPv6 types of errors about a packet, from unreachable to parameter problem (RFC 4443 section 3).
const ICMPV6_UNREACHABLE: u8 = 1;
const ICMPV6_PARAMETER_PROBLEM: u8 = 4;

/// Bytes of a packet's transport header that an ICMP error has for certain (RFC 792).
const ERROR_HOLDS: u32 = 8;

/// An extension header of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Type of the header behind it.
    pub next_header: u8,
    /// Its length, bytes.
    pub len: u32,
}

/// Whether this is the type of a header to be walked over (RFC 8200 section 4, RFC 4302), and not that
/// of what the packet carries.
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

/// Reads the first two bytes of a header of this type; `None` when it is no extension header.
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

/// The first bytes of a transport header as they lie in memory, [`transport_len`] of them; the rest is
/// zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStart {
    /// Words in network byte order.
    pub words_be: [u16; 10],
}

/// How many bytes a transport header has at least. Without them a packet belongs to no flow. Protocols
/// that are tracked by their number alone need none.
#[inline(always)]
pub const fn transport_len(protocol: u8) -> u32 {
    match protocol {
        IP_PROTOCOL_TCP => 20,
        IP_PROTOCOL_UDP | PROTOCOL_ICMP | PROTOCOL_ICMPV6 => 8,
        IP_PROTOCOL_SCTP => 12,
        _ => 0,
    }
}

/// As [`transport_len`], of a packet in an ICMP error.
#[inline(always)]
pub const fn inner_transport_len(protocol: u8) -> u32 {
    let len = transport_len(protocol);
    if len > ERROR_HOLDS { ERROR_HOLDS } else { len }
}

/// What a packet is to conntrack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole packet of the flow.
    Flow,
    /// A fragment of a packet of the flow. The first one has the flow's tuple, whose ports the others
    /// need; theirs are 0.
    Fragment(Fragment),
    /// An error about the packet in it, which tells the flow: [`inner4`], [`inner6`]. Its own tuple has
    /// no ports.
    IcmpError,
}

/// A packet as conntrack sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<T> {
    /// Its tuple, in the direction that the packet goes.
    pub tuple: T,
    /// Its TCP flags, 0 for other protocols.
    pub tcp_flags: u8,
    /// What it is.
    pub kind: Kind,
}

/// What stands in the transport header.
#[derive(Clone, Copy)]
struct Transport {
    sport_be: u16,
    dport_be: u16,
    tcp_flags: u8,
    is_error: bool,
}

impl Transport {
    const NONE: Self = Self {
        sport_be: 0,
        dport_be: 0,
        tcp_flags: 0,
        is_error: false,
    };

    /// `None` for ICMP messages that neither belong to a flow nor tell of one. `icmp` is the protocol that
    /// is ICMP in this IP version.
    #[inline(always)]
    fn read(protocol: u8, icmp: u8, start: &TransportStart) -> Option<Self> {
        let [first, second, third, ..] = start.words_be;
        match protocol {
            IP_PROTOCOL_TCP => Some(Self {
                sport_be: first,
                dport_be: second,
                tcp_flags: u16::from_be(start.words_be[6]) as u8,
                ..Self::NONE
            }),
            IP_PROTOCOL_UDP | IP_PROTOCOL_SCTP => Some(Self {
                sport_be: first,
                dport_be: second,
                ..Self::NONE
            }),
            _ if protocol == icmp => Self::read_icmp(icmp, (u16::from_be(first) >> 8) as u8, third),
            _ => Some(Self::NONE),
        }
    }

    #[inline(always)]
    fn read_icmp(icmp: u8, kind: u8, id_be: u16) -> Option<Self> {
        let (request, reply, is_error) = if icmp == PROTOCOL_ICMP {
            let errors = [ICMP_UNREACHABLE, ICMP_TIME_EXCEEDED, ICMP_PARAMETER_PROBLEM];
            let is_error = kind == errors[0] || kind == errors[1] || kind == errors[2];
            (ICMP_ECHO_REQUEST, ICMP_ECHO_REPLY, is_error)
        } else {
            let is_error = kind >= ICMPV6_UNREACHABLE && kind <= ICMPV6_PARAMETER_PROBLEM;
            (ICMPV6_ECHO_REQUEST, ICMPV6_ECHO_REPLY, is_error)
        };
        if kind == request {
            return Some(Self {
                sport_be: id_be,
                ..Self::NONE
            });
        }
        if kind == reply {
            return Some(Self {
                dport_be: id_be,
                ..Self::NONE
            });
        }
        is_error.then_some(Self {
            is_error,
            ..Self::NONE
        })
    }

    /// `fragment` is known not to be a later one.
    #[inline(always)]
    fn kind(&self, fragment: Option<Fragment>) -> Kind {
        match fragment {
            _ if self.is_error => Kind::IcmpError,
            Some(fragment) => Kind::Fragment(fragment),
            None => Kind::Flow,
        }
    }
}

impl Ipv4Header {
    /// How many bytes follow the header, of a packet of which `len` are there from the header on. `None`
    /// for what is not an IPv4 packet.
    #[inline(always)]
    pub const fn data_len(&self, len: u32) -> Option<u32> {
        let header_len = self.header_len();
        if self.version_ihl >> 4 != 4 || header_len < IPV4_LEN as u32 {
            return None;
        }
        let claimed = match u16::from_be(self.total_len_be) {
            // Larger than the field can say (BIG TCP).
            0 => len,
            claimed => claimed as u32,
        };
        let there = if claimed < len { claimed } else { len };
        there.checked_sub(header_len)
    }
}

/// Reads an IPv4 packet that goes in `direction` (as in a tuple) and of which `len` bytes are there from
/// the IP header on. `None` when it belongs to no flow: it is cut short or not IPv4, or an ICMP message
/// without one.
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
    let transport = Transport::read(ip.protocol, PROTOCOL_ICMP, start)?;
    Some(Packet {
        tuple: tuple4(ip, &transport, direction),
        tcp_flags: transport.tcp_flags,
        kind: transport.kind(fragment),
    })
}

/// Reads the packet in an IPv4 ICMP error that goes in `direction` and holds `len` bytes from that
/// packet's IP header on. The result is the tuple of a reply to it, so that the flow it belongs to is
/// found as for a packet that goes the error's way.
#[inline(always)]
pub fn inner4(ip: &Ipv4Header, len: u32, start: &TransportStart, direction: u8) -> Option<Tuple4> {
    let data_len = ip.data_len(len)?;
    let is_later = matches!(ip.fragment(), Some(fragment) if !fragment.first);
    if is_later || data_len < inner_transport_len(ip.protocol) {
        return None;
    }
    let transport = Transport::read(ip.protocol, PROTOCOL_ICMP, start)?;
    // There are no errors about errors (RFC 1122 section 3.2.2).
    if transport.is_error {
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

/// What the walk over the extension headers of an IPv6 packet has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upper {
    /// Type of the first header that is no extension header; in a later fragment, of the first one that
    /// was cut.
    pub protocol: u8,
    /// How many bytes are there from that header on.
    pub len: u32,
    /// From the fragment header, if there is one. The walk ends at it in a later fragment.
    pub fragment: Option<Fragment>,
}

/// As [`read4`], for IPv6 with what follows its extension headers. The protocol in the tuple of a later
/// fragment is what that fragment says, not necessarily the packet's.
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
    if upper.protocol == NO_NEXT_HEADER || upper.len < transport_len(upper.protocol) {
        return None;
    }
    let transport = Transport::read(upper.protocol, PROTOCOL_ICMPV6, start)?;
    Some(Packet {
        tuple: tuple6(ip, upper.protocol, &transport, direction),
        tcp_flags: transport.tcp_flags,
        kind: transport.kind(upper.fragment),
    })
}

/// As [`inner4`], for the packet in an ICMPv6 error.
#[inline(always)]
pub fn inner6(
    ip: &Ipv6Header,
    upper: &Upper,
    start: &TransportStart,
    direction: u8,
) -> Option<Tuple6> {
    let is_later = matches!(upper.fragment, Some(fragment) if !fragment.first);
    if is_later
        || upper.protocol == NO_NEXT_HEADER
        || upper.len < inner_transport_len(upper.protocol)
    {
        return None;
    }
    let transport = Transport::read(upper.protocol, PROTOCOL_ICMPV6, start)?;
    // As for IPv4 (RFC 4443 section 2.4).
    if transport.is_error {
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
