//! How a translation changes a packet: its header fields and the checksums that cover them.

use crate::checksum::fold64;
use crate::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP};
use crate::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use crate::tcp::IP_PROTOCOL_TCP;

/// Which end of a packet is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Source address and port.
    Source,
    /// Destination address and port.
    Destination,
}

/// Offset of an end's port, or of an ICMP echo's identifier, in the transport header, in bytes.
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
    /// Offset of the field in bytes.
    pub at: u32,
    /// Whether it covers the addresses.
    pub has_pseudo_header: bool,
    /// Whether 0 means no checksum, and 0xffff stands for a checksum of 0 (RFC 768).
    pub is_optional: bool,
}

/// The checksum field of a protocol that uses the Internet checksum; `None` if an address can change without
/// affecting it.
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

/// The change in the one's complement sum underlying a checksum (RFC 1624).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference(u64);

impl Difference {
    /// No change.
    pub const NONE: Self = Self(0);

    /// Change of one 16-bit word, in memory order.
    #[inline(always)]
    pub const fn of16(old: u16, new: u16) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// Change of one 32-bit word at an even offset, in memory order.
    #[inline(always)]
    pub const fn of32(old: u32, new: u32) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// Change of an IPv6 address.
    #[inline(always)]
    pub const fn of128(old: &[u32; 4], new: &[u32; 4]) -> Self {
        Self::of32(old[0], new[0])
            .and(Self::of32(old[1], new[1]))
            .and(Self::of32(old[2], new[2]))
            .and(Self::of32(old[3], new[3]))
    }

    /// Combines both changes.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// The change in the form that `bpf_l4_csum_replace` expects in `to` if `from` and the size are 0.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        let folded = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        ((folded & 0xffff_ffff) + (folded >> 32)) as u32
    }

    /// The change folded to 16 bits, for [`apply_folded`].
    #[inline(always)]
    pub const fn folded(self) -> u16 {
        fold64(self.0)
    }

    /// Applies the change to a checksum.
    #[inline(always)]
    pub const fn apply(self, check: u16) -> u16 {
        !fold64(!check as u64 + self.0)
    }

    /// Like [`Difference::apply`], for an optional checksum: 0 stays 0, and no other checksum becomes 0.
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

/// Like [`Difference::apply`], for a change from [`Difference::folded`]: the sum has at most one carry.
#[inline(always)]
pub const fn apply_folded(folded: u16, check: u16) -> u16 {
    let sum = !check as u32 + folded as u32;
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// How a translation changes one end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Change of the address.
    pub address: Difference,
    /// Change of the port or identifier; from 0 to 0 if the protocol has neither.
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

    /// Combines the changes at both ends.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self {
            address: self.address.and(other.address),
            port: self.port.and(other.port),
        }
    }

    /// The change in the sum underlying a transport checksum.
    #[inline(always)]
    pub const fn under(&self, field: &ChecksumField) -> Difference {
        if field.has_pseudo_header {
            self.address.and(self.port)
        } else {
            self.port
        }
    }

    /// Computes how the same change to the packet inside an ICMP error affects the inner checksums and the error's own.
    ///
    /// `ip_check` is the checksum of the inner IPv4 header, `None` with IPv6. `transport_check` is the checksum of
    /// the inner transport header, if the error contains it: a router need not send more than the first eight bytes
    /// (RFC 792).
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
    /// The new checksum of the inner transport header; `None` if the protocol has none or the error does not contain
    /// it.
    pub transport_check: Option<u16>,
    /// The change in the sum underlying the error's own checksum. With ICMPv6, the caller must add the change of the
    /// outer address.
    pub around: Difference,
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::checksum::{fold, sum32};
    use proptest::prelude::*;

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
        fn a_folded_change_makes_the_same_checksum(old: (u32, u16), new: (u32, u16), check: u16) {
            let change = Change::v4(old, new);
            let difference = change.address.and(change.port);
            prop_assert_eq!(apply_folded(difference.folded(), check), difference.apply(check));
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
            // Adds the word to the sum, as the kernel does.
            let by_word = !fold64(u64::from(!full(old)) + u64::from(difference.word()));
            prop_assert_eq!(normal(by_word), normal(full(new)));
        }

        /// Builds a whole ICMP error twice: about the packet before translation, and about the translated one.
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
