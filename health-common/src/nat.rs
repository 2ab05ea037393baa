//! Network address translation: `HEALTH_NAT4` and `HEALTH_NAT6`, keyed by conntrack tuples; which port
//! a flow gets, and what changes in its packets.
//!
//! Each translation is two entries: direction out (source is rewritten) and in (destination is). Each
//! holds what the key of the other is made from.

use crate::checksum::fold64;
use crate::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use crate::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::tcp::IP_PROTOCOL_TCP;

/// Flag: the flow is the host's own; its port or identifier is reserved, nothing is rewritten.
pub const NAT_HOST_LOCAL: u32 = 1;

/// Translation of an IPv4 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry4 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: u32,
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: [u16; 3],
}

/// Translation of an IPv6 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry6 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: [u32; 4],
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
}

crate::map_types!(NatEntry4 = 24, NatEntry6 = 32);

impl NatEntry4 {
    /// The key of the entry of direction in that belongs to this one of `out`.
    #[inline(always)]
    pub const fn inbound_key(&self, out: &Tuple4) -> Tuple4 {
        Tuple4 {
            saddr_be: out.daddr_be,
            daddr_be: self.addr_be,
            sport_be: out.dport_be,
            dport_be: self.port_be,
            protocol: out.protocol,
            direction: TUPLE_IN,
            pad: 0,
        }
    }

    /// The key of the entry of direction out that belongs to this one of `inbound`, which is also the
    /// flow's key in conntrack.
    #[inline(always)]
    pub const fn outbound_key(&self, inbound: &Tuple4) -> Tuple4 {
        Tuple4 {
            saddr_be: self.addr_be,
            daddr_be: inbound.saddr_be,
            sport_be: self.port_be,
            dport_be: inbound.sport_be,
            protocol: inbound.protocol,
            direction: TUPLE_OUT,
            pad: 0,
        }
    }
}

impl NatEntry6 {
    /// As [`NatEntry4::inbound_key`].
    #[inline(always)]
    pub const fn inbound_key(&self, out: &Tuple6) -> Tuple6 {
        Tuple6 {
            saddr_be: out.daddr_be,
            daddr_be: self.addr_be,
            sport_be: out.dport_be,
            dport_be: self.port_be,
            protocol: out.protocol,
            direction: TUPLE_IN,
            pad: 0,
        }
    }

    /// As [`NatEntry4::outbound_key`].
    #[inline(always)]
    pub const fn outbound_key(&self, inbound: &Tuple6) -> Tuple6 {
        Tuple6 {
            saddr_be: self.addr_be,
            daddr_be: inbound.saddr_be,
            sport_be: self.port_be,
            dport_be: inbound.sport_be,
            protocol: inbound.protocol,
            direction: TUPLE_OUT,
            pad: 0,
        }
    }
}

/// Whether another port can be given to a flow. SCTP's checksum is a CRC over the whole packet (RFC 9260
/// section 6.8), too long to compute here; other protocols have no ports. Their flows are translated
/// as long as no other has the same ports.
#[inline(always)]
pub const fn can_change_port(protocol: u8) -> bool {
    matches!(
        protocol,
        IP_PROTOCOL_TCP | IP_PROTOCOL_UDP | PROTOCOL_ICMP | PROTOCOL_ICMPV6
    )
}

/// Ports, or ICMP identifiers, that translated flows may have; host byte order, both ends included.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// The lowest.
    pub min: u16,
    /// The highest; at least `min`.
    pub max: u16,
}

crate::map_types!(Ports = 4);

/// Most ports that are tried for one flow.
pub const TRIES: u32 = 32;

impl Ports {
    /// Whether the port is one of them.
    #[inline(always)]
    pub const fn contains(self, port: u16) -> bool {
        self.min <= port && port <= self.max
    }

    /// How many there are, 1..=65536.
    #[inline(always)]
    pub const fn count(self) -> u32 {
        self.max.saturating_sub(self.min) as u32 + 1
    }

    /// The ports to try for a flow from `source`, host byte order. `random` is anew for each search.
    #[inline(always)]
    pub const fn search(self, source: u16, random: u32) -> PortSearch {
        let count = self.count();
        let is_kept = self.contains(source);
        PortSearch {
            min: self.min,
            count,
            // The search goes round the range from here. When the source port is in it, it is the last one
            // on the round, which is left out.
            begin: if is_kept {
                (source - self.min) as u32 + 1
            } else {
                scale(random >> 16, count)
            },
            kept: is_kept as u32,
            random,
        }
    }
}

/// The ports that are tried for one flow: its own where it may keep it, then others, no port twice.
///
/// The range is cut into 32 parts, which are tried in an order of their own, at a place of their own. So
/// the tries of flows that want the same ports go apart at once, and meet ports in use as rarely as
/// ports drawn at random would.
#[derive(Clone, Copy, Debug)]
pub struct PortSearch {
    min: u16,
    count: u32,
    begin: u32,
    kept: u32,
    random: u32,
}

impl PortSearch {
    /// The port to try after `tries` others were in use, host byte order. `None` when it is time to give
    /// up: after [`TRIES`], or when the range has no other.
    #[inline(always)]
    pub const fn candidate(&self, tries: u32) -> Option<u16> {
        if tries >= TRIES {
            return None;
        }
        if tries < self.kept {
            return Some(self.port(self.count - 1));
        }
        let place = tries - self.kept;
        let others = self.count - self.kept;
        if others <= TRIES {
            return if place < others {
                Some(self.port(place))
            } else {
                None
            };
        }
        // An odd factor makes a permutation of the 32 parts.
        let part = (place.wrapping_mul(self.random | 1) + (self.random >> 5)) % TRIES;
        let begin = part * others / TRIES;
        let end = (part + 1) * others / TRIES;
        // The golden ratio in 32 bits: spreads neighbours (Knuth, The Art of Computer Programming 6.4).
        let spread = (self.random ^ part).wrapping_mul(0x9e37_79b9) >> 16;
        Some(self.port(begin + scale(spread, end - begin)))
    }

    /// The port at a place on the round, 0..count.
    #[inline(always)]
    const fn port(&self, place: u32) -> u16 {
        let around = self.begin + place;
        let index = if around >= self.count {
            around - self.count
        } else {
            around
        };
        self.min.wrapping_add(index as u16)
    }
}

/// A number of 16 bits, scaled to 0..count.
#[inline(always)]
const fn scale(number: u32, count: u32) -> u32 {
    ((number as u64 * count as u64) >> 16) as u32
}

/// Which end of a packet is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Source address and port.
    Source,
    /// Destination address and port.
    Destination,
}

/// Where the port of an end, or the identifier of an ICMP echo, stands in the transport header, bytes.
#[inline(always)]
pub const fn port_at(protocol: u8, end: End) -> Option<u32> {
    match (protocol, end) {
        (IP_PROTOCOL_TCP | IP_PROTOCOL_UDP | IP_PROTOCOL_SCTP, End::Source) => Some(0),
        (IP_PROTOCOL_TCP | IP_PROTOCOL_UDP | IP_PROTOCOL_SCTP, End::Destination) => Some(2),
        (PROTOCOL_ICMP | PROTOCOL_ICMPV6, _) => Some(4),
        _ => None,
    }
}

/// The checksum in a transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumField {
    /// Where it stands, bytes.
    pub at: u32,
    /// Whether it covers the addresses.
    pub has_pseudo_header: bool,
    /// Whether 0 means that there is none, and 0xffff that it is 0 (RFC 768).
    pub is_optional: bool,
}

/// The checksum of a protocol that is the Internet checksum; `None` where an address may change without
/// it.
#[inline(always)]
pub const fn checksum_field(protocol: u8) -> Option<ChecksumField> {
    let (at, has_pseudo_header) = match protocol {
        IP_PROTOCOL_TCP => (16, true),
        IP_PROTOCOL_UDP => (6, true),
        PROTOCOL_ICMP => (2, false),
        PROTOCOL_ICMPV6 => (2, true),
        _ => return None,
    };
    Some(ChecksumField {
        at,
        has_pseudo_header,
        is_optional: protocol == IP_PROTOCOL_UDP,
    })
}

/// By how much the sum under a checksum changes (RFC 1624).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference(u64);

impl Difference {
    /// One 16-bit word, as in memory.
    #[inline(always)]
    pub const fn of16(old: u16, new: u16) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// One 32-bit word at an even place, as in memory.
    #[inline(always)]
    pub const fn of32(old: u32, new: u32) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// An IPv6 address.
    #[inline(always)]
    pub const fn of128(old: &[u32; 4], new: &[u32; 4]) -> Self {
        Self::of32(old[0], new[0])
            .and(Self::of32(old[1], new[1]))
            .and(Self::of32(old[2], new[2]))
            .and(Self::of32(old[3], new[3]))
    }

    /// Both changes.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// As `bpf_l4_csum_replace` takes it in `to`, with size and `from` 0.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        let folded = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        ((folded & 0xffff_ffff) + (folded >> 32)) as u32
    }

    /// The checksum after the change.
    #[inline(always)]
    pub const fn apply(self, check: u16) -> u16 {
        !fold64(!check as u64 + self.0)
    }

    /// As [`Difference::apply`], of a checksum that may be left out: 0 stays 0, and none becomes 0.
    #[inline(always)]
    pub const fn apply_optional(self, check: u16) -> u16 {
        if check == 0 {
            return 0;
        }
        match self.apply(check) {
            0 => 0xffff,
            check => check,
        }
    }
}

/// What a translation changes at one end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The address.
    pub address: Difference,
    /// The port or identifier; both 0 where the protocol has none.
    pub port: Difference,
}

impl Change {
    /// From one IPv4 address and port to another, network byte order.
    #[inline(always)]
    pub const fn v4(old: (u32, u16), new: (u32, u16)) -> Self {
        Self {
            address: Difference::of32(old.0, new.0),
            port: Difference::of16(old.1, new.1),
        }
    }

    /// From one IPv6 address and port to another, network byte order.
    #[inline(always)]
    pub const fn v6(old: (&[u32; 4], u16), new: (&[u32; 4], u16)) -> Self {
        Self {
            address: Difference::of128(old.0, new.0),
            port: Difference::of16(old.1, new.1),
        }
    }

    /// By how much the sum under a transport checksum changes.
    #[inline(always)]
    pub const fn under(&self, field: &ChecksumField) -> Difference {
        if field.has_pseudo_header {
            self.address.and(self.port)
        } else {
            self.port
        }
    }

    /// What the same change, to the packet in an ICMP error, does to the checksums in it and around it.
    ///
    /// `ip_check` is the checksum of the inner IPv4 header, `None` with IPv6. `transport_check` is that of
    /// the inner transport header, where the error holds it: a router need not send more than the first
    /// eight bytes (RFC 792).
    #[inline(always)]
    pub const fn inside(
        &self,
        protocol: u8,
        ip_check: Option<u16>,
        transport_check: Option<u16>,
    ) -> Inside {
        let mut around = self.address.and(self.port);
        let ip_check = match ip_check {
            Some(old) => {
                let new = self.address.apply(old);
                around = around.and(Difference::of16(old, new));
                Some(new)
            }
            None => None,
        };
        let transport_check = match (transport_check, checksum_field(protocol)) {
            (Some(old), Some(field)) => {
                let difference = self.under(&field);
                let new = if field.is_optional {
                    difference.apply_optional(old)
                } else {
                    difference.apply(old)
                };
                around = around.and(Difference::of16(old, new));
                Some(new)
            }
            _ => None,
        };
        Inside {
            ip_check,
            transport_check,
            around,
        }
    }
}

/// The checksums of an ICMP error whose inner packet has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inside {
    /// The new checksum of the inner IPv4 header.
    pub ip_check: Option<u16>,
    /// The new checksum of the inner transport header; `None`: there is none, or it is not there.
    pub transport_check: Option<u16>,
    /// By how much the sum under the error's own checksum changes. With ICMPv6 the change of the outer
    /// address comes on top.
    pub around: Difference,
}
