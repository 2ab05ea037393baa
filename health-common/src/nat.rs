//! Network address translation: `HEALTH_NAT4` and `HEALTH_NAT6` for TCP, `HEALTH_NAT_ANY4` and `HEALTH_NAT_ANY6`
//! for all other protocols, keyed by conntrack tuples; which port a flow gets, and what changes in its packets.
//!
//! Each translation is two entries: direction out (source is rewritten) and in (destination is). Each
//! holds what the key of the other is made from.

use crate::checksum::fold64;
use crate::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use crate::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::tcp::IP_PROTOCOL_TCP;

/// Flag: the flow is the host's own; its port or identifier is reserved, nothing is rewritten.
pub const NAT_HOST_LOCAL: u32 = 1;

/// Flag: no endpoint sends this flow, so the uplinks' programs enter its packets into conntrack.
pub const NAT_NEEDS_CT: u32 = 2;

/// Translation of an IPv4 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry4 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`] and [`NAT_NEEDS_CT`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: u32,
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
    /// Explicit padding, zero.
    pub pad2: u32,
}

/// Translation of an IPv6 tuple.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatEntry6 {
    /// When it was made: nanoseconds of `CLOCK_MONOTONIC`.
    pub created_ns: u64,
    /// [`NAT_HOST_LOCAL`] and [`NAT_NEEDS_CT`].
    pub flags: u32,
    /// The address after translation.
    pub addr_be: [u32; 4],
    /// The port or identifier after translation.
    pub port_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
}

crate::map_types!(NatEntry4 = 24, NatEntry6 = 32);

/// Where an entry has [`NatEntry4::created_ns`], bytes; the programs exchange it as a word.
pub const NAT_CREATED_OFFSET: usize = core::mem::offset_of!(NatEntry4, created_ns);

const _: () = {
    assert!(NAT_CREATED_OFFSET.is_multiple_of(8));
    assert!(core::mem::offset_of!(NatEntry6, created_ns) == NAT_CREATED_OFFSET);
};

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
        if others <= TRIES - self.kept {
            return if place < others {
                Some(self.port(place))
            } else {
                None
            };
        }
        // An odd factor makes a permutation of the 32 parts.
        let part = place
            .wrapping_mul(self.random | 1)
            .wrapping_add(self.random >> 5)
            % TRIES;
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

    /// The changes at both ends.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self {
            address: self.address.and(other.address),
            port: self.port.and(other.port),
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

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::checksum::{fold, sum32};
    use crate::ct::tests::{tuple4, tuple6};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn candidates(ports: Ports, source: u16, random: u32) -> Vec<u16> {
        let search = ports.search(source, random);
        (0..u32::MAX).map_while(|i| search.candidate(i)).collect()
    }

    fn ports() -> impl Strategy<Value = Ports> {
        prop_oneof![
            any::<(u16, u16)>(),
            (any::<u16>(), 0_u16..100).prop_map(|(min, more)| (min, min.saturating_add(more))),
        ]
        .prop_map(|(a, b)| Ports {
            min: a.min(b),
            max: a.max(b),
        })
    }

    /// How many searches it takes on average, and how many tries, to give `flows` ports of `count`.
    fn crowd(count: u16, flows: u32, source: impl Fn(u32) -> u16) -> (u32, u32) {
        let ports = Ports {
            min: 1024,
            max: 1023 + count,
        };
        let mut used = BTreeSet::new();
        let (mut searches, mut tries) = (0, 0);
        let mut random = 1_u32;
        for flow in 0..flows {
            loop {
                // Xorshift (Marsaglia, 2003).
                random ^= random << 13;
                random ^= random >> 17;
                random ^= random << 5;
                searches += 1;
                let all = candidates(ports, source(flow), random);
                let free = all.iter().position(|port| !used.contains(port));
                tries += free.map_or(TRIES, |at| at as u32 + 1);
                if let Some(at) = free {
                    used.insert(all[at]);
                    break;
                }
                assert!(searches < 100 * flows, "{} of {flows} found", used.len());
            }
        }
        (searches, tries)
    }

    #[test]
    fn flows_that_all_want_the_same_port_find_others_about_as_fast_as_by_chance() {
        // Half full in the end: a port drawn at random is in use once in four on average.
        let (searches, tries) = crowd(10_000, 5_000, |_| 4000);
        assert_eq!(searches, 5_000);
        assert!(tries < 3 * 5_000, "{tries}");
    }

    #[test]
    fn flows_from_everywhere_find_ports_until_nearly_all_are_in_use() {
        let (searches, tries) = crowd(10_000, 9_000, |flow| 30_000 + flow as u16);
        assert!(searches < 9_000 + 200, "{searches}");
        assert!(tries < 4 * 9_000, "{tries}");
    }

    #[test]
    fn whoever_asks_again_gets_the_last_port() {
        for count in [1, 31, 32, 33, 34, 50, 100, 300] {
            for source in [1, 1024, 1023 + count] {
                crowd(count, u32::from(count), |_| source);
            }
        }
    }

    #[test]
    fn fields_stand_where_their_protocols_have_them() {
        for protocol in [6, 17, 132] {
            assert_eq!(port_at(protocol, End::Source), Some(0));
            assert_eq!(port_at(protocol, End::Destination), Some(2));
        }
        for protocol in [1, 58] {
            assert_eq!(port_at(protocol, End::Source), Some(4));
            assert_eq!(port_at(protocol, End::Destination), Some(4));
        }
        assert_eq!(port_at(47, End::Source), None);
        let field = |protocol| checksum_field(protocol).map(|f| (f.at, f.has_pseudo_header));
        assert_eq!(field(6), Some((16, true)));
        assert_eq!(field(17), Some((6, true)));
        assert_eq!(field(1), Some((2, false)));
        assert_eq!(field(58), Some((2, true)));
        assert_eq!(field(132), None);
        assert_eq!(field(47), None);
        assert!(!can_change_port(132) && !can_change_port(47));
        for protocol in [6, 17, 1, 58] {
            assert!(can_change_port(protocol));
        }
    }

    #[test]
    fn a_udp_checksum_that_is_left_out_stays_so_and_none_becomes_so() {
        let difference = Difference::of16(1, 2);
        assert_eq!(difference.apply_optional(0), 0);
        let to_zero = Difference::of16(0, 0xfffe);
        assert_eq!(to_zero.apply(0xfffe), 0);
        assert_eq!(to_zero.apply_optional(0xfffe), 0xffff);
    }

    fn checksum(words: &[u32]) -> u16 {
        !fold64(sum32(words))
    }

    /// 0x0000 and 0xffff are the same number in one's complement.
    fn normal(check: u16) -> u16 {
        if check == 0xffff { 0 } else { check }
    }

    fn pair(first: u16, second: u16) -> u32 {
        let ([a, b], [c, d]) = (first.to_ne_bytes(), second.to_ne_bytes());
        u32::from_ne_bytes([a, b, c, d])
    }

    proptest! {
        #[test]
        fn candidates_are_in_range_and_never_come_twice(ports in ports(), source: u16, random: u32) {
            let all = candidates(ports, source, random);
            prop_assert_eq!(all.len() as u32, ports.count().min(TRIES));
            prop_assert!(all.iter().all(|&port| ports.contains(port)));
            prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
            if ports.contains(source) {
                prop_assert_eq!(all[0], source);
            }
        }

        #[test]
        fn a_range_upside_down_is_its_lowest_port(min: u16, max: u16, source: u16, random: u32) {
            prop_assume!(max < min);
            prop_assert_eq!(candidates(Ports { min, max }, source, random), [min]);
        }

        #[test]
        fn each_entry_of_a_translation_leads_to_the_other(
            four in tuple4(),
            six in tuple6(),
            addr_be: u32,
            addr6_be: [u32; 4],
            port_be: u16,
        ) {
            let out = Tuple4 { direction: TUPLE_OUT, ..four };
            let outbound = NatEntry4 { addr_be, port_be, ..NatEntry4::default() };
            let inbound = NatEntry4 {
                addr_be: out.saddr_be,
                port_be: out.sport_be,
                ..NatEntry4::default()
            };
            let key = outbound.inbound_key(&out);
            prop_assert_eq!(inbound.outbound_key(&key), out);
            let sent = Tuple4 { saddr_be: addr_be, sport_be: port_be, ..out };
            prop_assert_eq!(key, sent.reversed(), "the key is what a reply has");

            let out = Tuple6 { direction: TUPLE_OUT, ..six };
            let outbound = NatEntry6 { addr_be: addr6_be, port_be, ..NatEntry6::default() };
            let inbound = NatEntry6 {
                addr_be: out.saddr_be,
                port_be: out.sport_be,
                ..NatEntry6::default()
            };
            let key = outbound.inbound_key(&out);
            prop_assert_eq!(inbound.outbound_key(&key), out);
            let sent = Tuple6 { saddr_be: addr6_be, sport_be: port_be, ..out };
            prop_assert_eq!(key, sent.reversed());
        }

        #[test]
        fn an_applied_difference_is_the_recomputed_checksum(
            rest in prop::collection::vec(any::<u32>(), 0..20),
            old: ([u32; 4], u16),
            new: ([u32; 4], u16),
            other: u16,
        ) {
            let full = |(addr, port): ([u32; 4], u16)| checksum(&[&rest[..], &addr, &[pair(port, other)]].concat());
            let change = Change::v6((&old.0, old.1), (&new.0, new.1));
            let difference = change.address.and(change.port);
            prop_assert_eq!(normal(difference.apply(full(old))), normal(full(new)));
            // What the kernel does with the word: adds it to the sum.
            let by_word = !fold64(u64::from(!full(old)) + u64::from(difference.word()));
            prop_assert_eq!(normal(by_word), normal(full(new)));
        }

        /// A whole ICMP error is built twice, about the packet before and about the one after.
        #[test]
        fn an_error_with_a_translated_packet_has_the_checksums_of_one_made_about_it(
            protocol in prop::sample::select(&[1_u8, 6, 17][..]),
            old: (u32, u16),
            new: (u32, u16),
            peer: (u32, u16),
            has_check: bool,
            data: u32,
        ) {
            let build = |(addr, port): (u32, u16), given: Option<(u16, Option<u16>)>| {
                let start = [0x45, u32::from(protocol), addr, peer.0];
                let ip_check = given.map_or_else(|| checksum(&start), |(check, _)| check);
                let ports = pair(port, peer.1);
                let covered = match protocol {
                    1 => checksum(&[ports, data]),
                    _ => checksum(&[addr, peer.0, ports, data]),
                };
                let has_check = has_check || protocol != 17;
                let check = match given {
                    Some((_, check)) => check.unwrap(),
                    None if has_check => if covered == 0 { 0xffff } else { covered },
                    None => 0,
                };
                let bytes = [&start[..], &[u32::from(ip_check), ports, data, u32::from(check)]].concat();
                (ip_check, check, checksum(&bytes))
            };
            let (ip_check, check, around) = build(old, None);
            let inside = Change::v4(old, new).inside(protocol, Some(ip_check), Some(check));
            let (new_ip_check, new_check) = (inside.ip_check.unwrap(), inside.transport_check.unwrap());
            let (expected_ip_check, expected_check, _) = build(new, None);
            prop_assert_eq!(normal(new_ip_check), normal(expected_ip_check));
            prop_assert_eq!(normal(new_check), normal(expected_check));
            prop_assert_eq!(new_check == 0 && protocol == 17, check == 0);
            let (_, _, expected) = build(new, Some((new_ip_check, Some(new_check))));
            prop_assert_eq!(normal(inside.around.apply(around)), normal(expected));
        }

        #[test]
        fn an_error_that_ends_before_the_inner_checksum_keeps_its_own_right(
            old: ([u32; 4], u16),
            new: ([u32; 4], u16),
            rest: u16,
        ) {
            let full = |(addr, port): ([u32; 4], u16)| checksum(&[&addr[..], &[pair(port, rest)]].concat());
            let inside = Change::v6((&old.0, old.1), (&new.0, new.1)).inside(6, None, None);
            prop_assert_eq!((inside.ip_check, inside.transport_check), (None, None));
            prop_assert_eq!(normal(inside.around.apply(full(old))), normal(full(new)));
        }

        #[test]
        fn a_scaled_number_is_below_the_count(number in 0_u32..=0xffff, count in 1_u32..=65536) {
            prop_assert!(scale(number, count) < count);
        }
    }

    #[test]
    fn a_word_holds_the_carry_that_its_carries_leave() {
        let difference = Difference::of128(&[1, 2, 3, 4], &[1, 2, 3, 6]);
        for check in [1, 0x1234, 0xfffe] {
            let by_word = !fold64(u64::from(!check) + u64::from(difference.word()));
            assert_eq!(by_word, difference.apply(check));
        }
    }

    #[test]
    fn a_difference_of_nothing_changes_no_sum() {
        for check in [1, 0x1234, 0xfffe] {
            assert_eq!(Difference::default().apply(check), check);
            assert_eq!(Difference::of32(7, 7).apply(check), check);
            assert_eq!(fold(Difference::of32(7, 7).word()), 0xffff);
        }
    }
}
