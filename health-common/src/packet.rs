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

/// Maximum number of extension headers that are walked. A packet with more belongs to no flow.
pub const EXTENSIONS_MAX: usize = 6;
/// Extension header: fragment, a [`crate::fragment::FragmentHeader`] of eight bytes.
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

/// Number of bytes of a packet's transport header that every ICMP error contains (RFC 792).
const ERROR_HOLDS: u32 = 8;

/// An IPv6 extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Type of the next header.
    pub next_header: u8,
    /// Length of this header in bytes.
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

/// Minimum length of a transport header in bytes. A shorter packet belongs to no flow. Protocols that are tracked by
/// number alone need no transport header.
#[inline(always)]
pub const fn transport_len(protocol: u8) -> u32 {
    match protocol {
        IP_PROTOCOL_TCP => 20,
        IP_PROTOCOL_UDP | PROTOCOL_ICMP | PROTOCOL_ICMPV6 => 8,
        IP_PROTOCOL_SCTP => 12,
        _ => 0,
    }
}

/// Like [`transport_len`], for the packet inside an ICMP error.
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
    /// A fragment of a flow's packet. The first fragment has the flow's tuple. In later fragments, the ports are 0 and
    /// must be taken from the first.
    Fragment(Fragment),
    /// An error about the packet inside it, which identifies the flow: [`inner4`], [`inner6`]. Its own tuple has no
    /// ports.
    IcmpError,
    /// A packet that neither belongs to a flow nor reports an error about one: another ICMP message (neighbour
    /// discovery, multicast groups, redirects and others), or no payload at all. Its tuple has no ports.
    NoFlow,
}

/// A packet as conntrack sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<T> {
    /// The packet's tuple, in the direction of the packet.
    pub tuple: T,
    /// TCP flags, 0 for other protocols.
    pub tcp_flags: u8,
    /// How conntrack classifies the packet.
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
            // ICMP of the other IP version has no meaning here.
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

    /// Classifies the packet. The caller has already handled later fragments.
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
            // The length is too large for the field (BIG TCP).
            0 => len,
            claimed => claimed as u32,
        };
        let there = if claimed < len { claimed } else { len };
        there.checked_sub(header_len)
    }
}

impl Ipv6Header {
    /// Like [`Ipv4Header::data_len`], including the extension headers.
    #[inline(always)]
    pub const fn data_len(&self, len: u32) -> Option<u32> {
        if !self.is_version_6() {
            return None;
        }
        let Some(there) = len.checked_sub(IPV6_LEN as u32) else {
            return None;
        };
        let claimed = match u16::from_be(self.payload_len_be) as u32 {
            // The length is too large for the field (RFC 2675, BIG TCP).
            0 if there > u16::MAX as u32 => there,
            claimed => claimed,
        };
        Some(if claimed < there { claimed } else { there })
    }
}

/// Parses an IPv4 packet that travels in `direction` (as in a tuple) and has `len` bytes from the IP header on. `None`
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

/// Parses the packet inside an IPv4 ICMP error. The error travels in `direction` and contains `len` bytes from the
/// inner IP header on; `start` is the first [`inner_transport_len`] bytes after it. `None` if the inner packet is
/// truncated or belongs to no flow. Returns the tuple of a reply to the inner packet, so the flow can be looked up as
/// for any packet in the error's direction.
#[inline(always)]
pub fn inner4(ip: &Ipv4Header, len: u32, start: &TransportStart, direction: u8) -> Option<Tuple4> {
    let data_len = ip.data_len(len)?;
    let is_later = matches!(ip.fragment(), Some(fragment) if !fragment.first);
    if is_later || data_len < inner_transport_len(ip.protocol) {
        return None;
    }
    let transport = Transport::read(ip.protocol, PROTOCOL_ICMP, start);
    // Hosts send no errors about errors (RFC 1122 section 3.2.2).
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

/// Like [`read4`], for an IPv6 packet whose extension headers have been walked. In a later fragment's tuple, the
/// protocol is taken from the fragment header and need not be the packet's protocol.
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

/// Like [`inner4`], for the packet inside an ICMPv6 error.
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
mod tests;
