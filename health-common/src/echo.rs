//! Decides which ICMP echo requests the kernel program answers itself, and turns requests into replies.
//!
//! The program either answers exactly as a Linux host would (RFC 1122 section 3.2.2.6, RFC 4443 section 4.2,
//! `net/ipv4/icmp.c`, `net/ipv6/icmp.c`) or leaves the packet to the endpoint's own stack.

use network_types::eth::EthHdr;
use network_types::icmp::{Icmpv4Type, Icmpv6Type};
use network_types::ip::IpProto;

use crate::addr::{v4_source_is_possible, v6_source_is_possible};
use crate::checksum::{fold, sum, update};
use crate::metrics::Reason;

/// Length of an Ethernet header without tags, in bytes.
pub const ETHERNET_LEN: usize = EthHdr::LEN;
/// Length of an IPv4 header without options, in bytes.
pub const IPV4_LEN: usize = 20;
/// Length of an IPv6 header in bytes.
pub const IPV6_LEN: usize = 40;
/// Length of an ICMP echo header in bytes.
pub const ECHO_LEN: usize = 8;
/// Maximum length of IPv4 options in bytes (RFC 791 section 3.1: a header has at most 60).
pub const IPV4_OPTIONS_MAX: usize = 40;

/// IP protocol number of ICMP.
pub const PROTOCOL_ICMP: u8 = IpProto::Icmp as u8;
/// IP protocol number of ICMPv6.
pub const PROTOCOL_ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
/// ICMP type of an echo reply.
pub const ICMP_ECHO_REPLY: u8 = Icmpv4Type::EchoReply as u8;
/// ICMP type of an echo request.
pub const ICMP_ECHO_REQUEST: u8 = Icmpv4Type::Echo as u8;
/// ICMPv6 type of an echo request.
pub const ICMPV6_ECHO_REQUEST: u8 = Icmpv6Type::EchoRequest as u8;
/// ICMPv6 type of an echo reply.
pub const ICMPV6_ECHO_REPLY: u8 = Icmpv6Type::EchoReply as u8;

/// Time to live and hop limit of a reply, Linux's default (`IPDEFTTL`).
const REPLY_TTL: u8 = 64;
const DONT_FRAGMENT: u16 = 0x4000;
/// Mask: the more-fragments bit and the fragment offset.
pub(crate) const FRAGMENT_MASK: u16 = 0x3fff;

// The IP, TCP and ICMP headers are our own types: `network_types` stores words as unaligned bytes, which LLVM loads
// and stores one by one on this target, using more stack than is available.

/// IPv4 header without options (RFC 791 section 3.1). Multi-byte fields in network byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv4Header {
    /// Version in the high four bits, header length in words in the low four.
    pub version_ihl: u8,
    /// Type of service.
    pub tos: u8,
    /// Length of header and data in bytes.
    pub total_len_be: u16,
    /// Identification.
    pub id_be: u16,
    /// Flags and fragment offset.
    pub fragment_be: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the data.
    pub protocol: u8,
    /// Header checksum.
    pub check: u16,
    /// Source address.
    pub saddr_be: u32,
    /// Destination address.
    pub daddr_be: u32,
}

/// IPv6 header (RFC 8200 section 3). Multi-byte fields in network byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv6Header {
    /// Version, traffic class and flow label.
    pub version_class_flow_be: u32,
    /// Length of the data after this header, in bytes.
    pub payload_len_be: u16,
    /// Protocol of the data after this header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub saddr_be: [u32; 4],
    /// Destination address.
    pub daddr_be: [u32; 4],
}

/// ICMP or ICMPv6 echo header (RFC 792, RFC 4443 section 4).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EchoHeader {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// Checksum over the message; for ICMPv6 also over the pseudo header.
    pub check: u16,
    /// Identifier.
    pub id_be: u16,
    /// Sequence number.
    pub sequence_be: u16,
}

const _: () = assert!(core::mem::size_of::<Ipv4Header>() == IPV4_LEN);
const _: () = assert!(core::mem::size_of::<Ipv6Header>() == IPV6_LEN);
const _: () = assert!(core::mem::size_of::<EchoHeader>() == ECHO_LEN);

impl Ipv4Header {
    /// Header length claimed by the packet, in bytes, 0..=60.
    #[inline(always)]
    pub const fn header_len(&self) -> u32 {
        (self.version_ihl as u32 & 0x0f) * 4
    }

    /// The header as 16-bit words in memory order, including the checksum.
    #[inline(always)]
    pub fn words(&self) -> [u16; IPV4_LEN / 2] {
        let [a, b] = halves(self.saddr_be);
        let [c, d] = halves(self.daddr_be);
        [
            u16::from_ne_bytes([self.version_ihl, self.tos]),
            self.total_len_be,
            self.id_be,
            self.fragment_be,
            u16::from_ne_bytes([self.ttl, self.protocol]),
            self.check,
            a,
            b,
            c,
            d,
        ]
    }
}

impl Ipv6Header {
    /// Whether the version field is 6.
    #[inline(always)]
    pub const fn is_version_6(&self) -> bool {
        u32::from_be(self.version_class_flow_be) >> 28 == 6
    }
}

/// The two 16-bit halves of a 32-bit word. Their order does not matter in one's complement sums.
#[inline(always)]
pub const fn halves(word: u32) -> [u16; 2] {
    [word as u16, (word >> 16) as u16]
}

/// What to do with a packet to the health endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EchoVerdict {
    /// Turn it into a reply.
    Answer,
    /// Remove this many bytes of IPv4 options, then turn it into a reply.
    AnswerWithoutOptions(u32),
    /// Leave it to the endpoint's stack.
    Stack,
    /// Drop it.
    Refuse(Reason),
}

/// Judges an IPv4 packet to the health endpoint that has `frame_len` bytes from the Ethernet header on. If it has
/// options, [`judge_options`] must agree too.
#[inline(always)]
pub fn judge4(ip: &Ipv4Header, echo: &EchoHeader, frame_len: u32) -> EchoVerdict {
    let header_len = ip.header_len();
    let total_len = u16::from_be(ip.total_len_be) as u32;
    if ip.version_ihl >> 4 != 4
        || header_len < IPV4_LEN as u32
        || total_len < header_len + ECHO_LEN as u32
        || total_len + ETHERNET_LEN as u32 != frame_len
        || ip.protocol != PROTOCOL_ICMP
        || u16::from_be(ip.fragment_be) & FRAGMENT_MASK != 0
        || echo.kind != ICMP_ECHO_REQUEST
        || echo.code != 0
    {
        return EchoVerdict::Stack;
    }
    if !v4_source_is_possible(ip.saddr_be) || ip.saddr_be == ip.daddr_be {
        return EchoVerdict::Refuse(Reason::InvalidSource);
    }
    if header_len > IPV4_LEN as u32 {
        return EchoVerdict::AnswerWithoutOptions(header_len - IPV4_LEN as u32);
    }
    if fold(sum(&ip.words())) != 0xffff {
        return EchoVerdict::Refuse(Reason::InvalidHeaderChecksum);
    }
    EchoVerdict::Answer
}

/// Judges the options of a packet for which [`judge4`] returned `AnswerWithoutOptions(len)`. `options` holds the option
/// bytes in memory order, zero past `len`.
///
/// A Linux host echoes record route, timestamps and source routes and drops all other options (`__ip_options_echo`).
/// So a packet with only padding and router alert (RFC 2113) is answered without options; everything else is left to
/// the stack. Options are checked word by word: handling unaligned options, which no sender produces, would cost a
/// verifier state per byte.
#[inline(always)]
pub fn judge_options(
    ip: &Ipv4Header,
    options: &[u32; IPV4_OPTIONS_MAX / 4],
    len: u32,
) -> EchoVerdict {
    /// The bytes 0 (end of list) and 1 (no operation) have none of these bits set.
    const NOT_PADDING: u32 = 0xfefe_fefe;
    const ROUTER_ALERT: [u8; 2] = [148, 4];

    let mut total = sum(&ip.words());
    let mut i = 0;
    while i < options.len() {
        let word = options[i];
        let [first, second, ..] = word.to_ne_bytes();
        if word & NOT_PADDING != 0 && [first, second] != ROUTER_ALERT {
            return EchoVerdict::Stack;
        }
        total += sum(&halves(word));
        i += 1;
    }
    if fold(total) != 0xffff {
        return EchoVerdict::Refuse(Reason::InvalidHeaderChecksum);
    }
    EchoVerdict::AnswerWithoutOptions(len)
}

/// Corrects the length and checksum of a header whose options were removed.
#[inline(always)]
pub fn drop_options(ip: &mut Ipv4Header, options_len: u32) {
    ip.version_ihl = 0x45;
    ip.total_len_be = (u16::from_be(ip.total_len_be) - options_len as u16).to_be();
    ip.check = 0;
    ip.check = !fold(sum(&ip.words()));
}

/// Turns an echo request into its reply: addresses swapped, TTL 64, type of service kept.
///
/// As in Linux's replies, the don't-fragment bit is cleared, so the reply may be fragmented on its way. It therefore
/// needs an identification (RFC 6864 section 4.3): the request's or, if that is zero, one that differs between
/// consecutive echoes.
#[inline(always)]
pub fn turn4(ip: &mut Ipv4Header, echo: &mut EchoHeader) {
    core::mem::swap(&mut ip.saddr_be, &mut ip.daddr_be);

    let old_ttl = u16::from_ne_bytes([ip.ttl, ip.protocol]);
    ip.ttl = REPLY_TTL;
    ip.check = update(ip.check, old_ttl, u16::from_ne_bytes([ip.ttl, ip.protocol]));

    let old_fragment = ip.fragment_be;
    ip.fragment_be = old_fragment & !DONT_FRAGMENT.to_be();
    ip.check = update(ip.check, old_fragment, ip.fragment_be);

    if ip.id_be == 0 {
        ip.id_be = echo.id_be ^ echo.sequence_be;
        ip.check = update(ip.check, 0, ip.id_be);
    }

    turn_echo(echo, ICMP_ECHO_REPLY);
}

/// Judges an IPv6 packet to the health endpoint that has `frame_len` bytes from the Ethernet header on. Packets with
/// extension headers are left to the stack.
#[inline(always)]
pub fn judge6(ip: &Ipv6Header, echo: &EchoHeader, frame_len: u32) -> EchoVerdict {
    let payload_len = u16::from_be(ip.payload_len_be) as u32;
    if !ip.is_version_6()
        || payload_len < ECHO_LEN as u32
        || payload_len + (ETHERNET_LEN + IPV6_LEN) as u32 != frame_len
        || ip.next_header != PROTOCOL_ICMPV6
        || echo.kind != ICMPV6_ECHO_REQUEST
        || echo.code != 0
    {
        return EchoVerdict::Stack;
    }
    if !v6_source_is_possible(&ip.saddr_be) || ip.saddr_be == ip.daddr_be {
        return EchoVerdict::Refuse(Reason::InvalidSource);
    }
    EchoVerdict::Answer
}

/// Turns an ICMPv6 echo request into its reply: addresses swapped, hop limit 64, traffic class and
/// flow label kept.
#[inline(always)]
pub fn turn6(ip: &mut Ipv6Header, echo: &mut EchoHeader) {
    core::mem::swap(&mut ip.saddr_be, &mut ip.daddr_be);
    ip.hop_limit = REPLY_TTL;
    turn_echo(echo, ICMPV6_ECHO_REPLY);
}

/// Changes the type. The checksum is updated incrementally, so corruption on the way remains detectable.
#[inline(always)]
fn turn_echo(echo: &mut EchoHeader, kind: u8) {
    let old = u16::from_ne_bytes([echo.kind, echo.code]);
    echo.kind = kind;
    echo.check = update(echo.check, old, u16::from_ne_bytes([echo.kind, echo.code]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(saddr: [u8; 4], daddr: [u8; 4], payload: u16) -> (Ipv4Header, EchoHeader, u32) {
        let mut ip = Ipv4Header {
            version_ihl: 0x45,
            tos: 0x10,
            total_len_be: (IPV4_LEN as u16 + ECHO_LEN as u16 + payload).to_be(),
            id_be: 0,
            fragment_be: DONT_FRAGMENT.to_be(),
            ttl: 63,
            protocol: PROTOCOL_ICMP,
            check: 0,
            saddr_be: u32::from_ne_bytes(saddr),
            daddr_be: u32::from_ne_bytes(daddr),
        };
        ip.check = !fold(sum(&ip.words()));
        let echo = EchoHeader {
            kind: ICMP_ECHO_REQUEST,
            id_be: 0x1234_u16.to_be(),
            sequence_be: 7_u16.to_be(),
            ..EchoHeader::default()
        };
        (
            ip,
            echo,
            (ETHERNET_LEN + IPV4_LEN + ECHO_LEN) as u32 + u32::from(payload),
        )
    }

    #[test]
    fn a_plain_request_is_answered_and_its_oddities_are_not() {
        let (ip, echo, len) = request([10, 0, 0, 1], [10, 244, 1, 7], 56);
        assert_eq!(judge4(&ip, &echo, len), EchoVerdict::Answer);
        assert_eq!(
            judge4(&ip, &echo, len + 1),
            EchoVerdict::Stack,
            "padding behind the packet"
        );
        for fragment in [0x2000_u16, 0x2001, 0x0001, 0x1fff] {
            let ip = Ipv4Header {
                fragment_be: fragment.to_be(),
                ..ip
            };
            assert_eq!(
                judge4(&ip, &echo, len),
                EchoVerdict::Stack,
                "fragment {fragment:#x}"
            );
        }
        for kind in (0..=255).filter(|&kind| kind != ICMP_ECHO_REQUEST) {
            assert_eq!(
                judge4(&ip, &EchoHeader { kind, ..echo }, len),
                EchoVerdict::Stack
            );
        }
        assert_eq!(
            judge4(&ip, &EchoHeader { code: 1, ..echo }, len),
            EchoVerdict::Stack
        );
        let damaged = Ipv4Header {
            check: ip.check ^ 1,
            ..ip
        };
        assert_eq!(
            judge4(&damaged, &echo, len),
            EchoVerdict::Refuse(Reason::InvalidHeaderChecksum)
        );
    }

    #[test]
    fn sources_that_cannot_be_answered_are_refused() {
        for source in [
            [0, 0, 0, 0],
            [127, 0, 0, 1],
            [224, 0, 0, 5],
            [255, 255, 255, 255],
            [10, 244, 1, 7],
        ] {
            let (ip, echo, len) = request(source, [10, 244, 1, 7], 0);
            assert_eq!(
                judge4(&ip, &echo, len),
                EchoVerdict::Refuse(Reason::InvalidSource)
            );
        }
    }

    #[test]
    fn only_options_that_linux_would_not_echo_are_dropped() {
        let judge = |bytes: &[u8]| {
            let mut options = [0; IPV4_OPTIONS_MAX / 4];
            for (word, four) in options.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_ne_bytes([four[0], four[1], four[2], four[3]]);
            }
            let (mut ip, ..) = request([10, 0, 0, 1], [10, 244, 1, 7], 0);
            ip.version_ihl = 0x40 | (5 + bytes.len() / 4) as u8;
            ip.check = 0;
            let rest = bytes
                .chunks(2)
                .map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]])));
            ip.check = !fold(sum(&ip.words()) + rest.sum::<u32>());
            judge_options(&ip, &options, bytes.len() as u32)
        };
        assert_eq!(judge(&[1, 1, 1, 0]), EchoVerdict::AnswerWithoutOptions(4));
        assert_eq!(judge(&[148, 4, 0, 0]), EchoVerdict::AnswerWithoutOptions(4));
        assert_eq!(judge(&[1; 40]), EchoVerdict::AnswerWithoutOptions(40));
        assert_eq!(
            judge(&[148, 3, 0, 0]),
            EchoVerdict::Stack,
            "router alert of a wrong length"
        );
        assert_eq!(
            judge(&[1, 1, 148, 4]),
            EchoVerdict::Stack,
            "router alert past the end"
        );
        assert_eq!(
            judge(&[7, 7, 4, 0, 0, 0, 0, 0]),
            EchoVerdict::Stack,
            "record route"
        );
        assert_eq!(
            judge(&[68, 8, 5, 0, 0, 0, 0, 0]),
            EchoVerdict::Stack,
            "timestamp"
        );
    }

    proptest! {
        #[test]
        fn a_reply_has_a_valid_header_checksum(
            saddr in any::<[u8; 4]>(), daddr in any::<[u8; 4]>(), id in any::<u16>(), ttl in any::<u8>(),
            tos in any::<u8>(), sequence in any::<u16>(), fragment in prop::sample::select(&[0_u16, 0x4000][..]),
        ) {
            let (mut ip, mut echo, _) = request(saddr, daddr, 0);
            ip = Ipv4Header { id_be: id, ttl, tos, fragment_be: fragment.to_be(), check: 0, ..ip };
            ip.check = !fold(sum(&ip.words()));
            echo.sequence_be = sequence;
            let before = ip;
            turn4(&mut ip, &mut echo);
            prop_assert_eq!(fold(sum(&ip.words())), 0xffff);
            prop_assert_eq!((ip.saddr_be, ip.daddr_be), (before.daddr_be, before.saddr_be));
            prop_assert_eq!((ip.ttl, ip.tos, ip.fragment_be), (64, tos, 0));
            prop_assert_eq!(echo.kind, ICMP_ECHO_REPLY);
        }
    }
}
