//! The ICMP error that informs a client that a service has no backend: port unreachable (RFC 792, RFC 4443 section
//! 3.1), as sent by Linux's `REJECT` target.

use crate::checksum::{fold64, sum32};
use crate::echo::{EchoHeader, Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6};

/// The part of a packet that an IPv4 error quotes: the header without options, and [`SHORT`] or [`LONG`] words.
pub type Quoted4<const WORDS: usize> = [u32; WORDS];
/// The part of a packet that an IPv6 error quotes: the header, and [`SHORT`] or [`LONG`] words.
pub type Quoted6<const WORDS: usize> = [u32; WORDS];

/// Minimum number of words quoted after the header (RFC 792).
pub const SHORT: usize = 2;
/// Number of words quoted after the header if the packet is long enough, the length of a TCP header. The kernel refuses
/// to truncate a packet before the end of a checksum field that is yet to be filled in.
pub const LONG: usize = 5;
/// Length of an IPv4 header, words.
pub const HEADER4: usize = 5;
/// Length of an IPv6 header, words.
pub const HEADER6: usize = 10;

/// An IPv4 error.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable4<const WORDS: usize> {
    /// IP header of the error.
    pub ip: Ipv4Header,
    /// Type, code and checksum; the rest is unused.
    pub icmp: EchoHeader,
    /// The quoted packet.
    pub quoted: Quoted4<WORDS>,
}

/// An IPv6 error.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable6<const WORDS: usize> {
    /// IP header of the error.
    pub ip: Ipv6Header,
    /// Type, code and checksum; the rest is unused.
    pub icmp: EchoHeader,
    /// The quoted packet.
    pub quoted: Quoted6<WORDS>,
}

const _: () = {
    assert!(size_of::<Unreachable4<{ HEADER4 + SHORT }>>() == 56);
    assert!(size_of::<Unreachable6<{ HEADER6 + LONG }>>() == 108);
};

const TTL: u8 = 64;
const UNREACHABLE4: u8 = 3;
const PORT4: u8 = 3;
const UNREACHABLE6: u8 = 1;
const PORT6: u8 = 4;
/// Precedence 6, internetwork control, for ICMP errors (RFC 1812 section 4.3.2.5).
const TOS: u8 = 0xc0;

impl<const WORDS: usize> Unreachable4<WORDS> {
    /// Builds the ICMP error for a packet. Its source address is the packet's destination.
    #[inline(always)]
    pub fn about(quoted: Quoted4<WORDS>) -> Self {
        const { assert!(WORDS > HEADER4) };
        let (saddr_be, daddr_be) = (quoted[3], quoted[4]);
        let mut ip = Ipv4Header {
            version_ihl: 0x45,
            tos: TOS,
            total_len_be: (size_of::<Self>() as u16).to_be(),
            ttl: TTL,
            protocol: PROTOCOL_ICMP,
            saddr_be: daddr_be,
            daddr_be: saddr_be,
            ..Ipv4Header::default()
        };
        let first = u32::from_ne_bytes([0x45, TOS, 0, size_of::<Self>() as u8]);
        let third = u32::from_ne_bytes([TTL, PROTOCOL_ICMP, 0, 0]);
        ip.check = !fold64(sum32(&[first, third, saddr_be, daddr_be]));
        let mut icmp = EchoHeader {
            kind: UNREACHABLE4,
            code: PORT4,
            ..EchoHeader::default()
        };
        let start = u32::from_ne_bytes([UNREACHABLE4, PORT4, 0, 0]);
        icmp.check = !fold64(sum32(&quoted) + u64::from(start));
        Self { ip, icmp, quoted }
    }
}

impl<const WORDS: usize> Unreachable6<WORDS> {
    /// Like [`Unreachable4::about`].
    #[inline(always)]
    pub fn about(quoted: Quoted6<WORDS>) -> Self {
        const { assert!(WORDS > HEADER6) };
        let [s0, s1, s2, s3] = [quoted[2], quoted[3], quoted[4], quoted[5]];
        let [d0, d1, d2, d3] = [quoted[6], quoted[7], quoted[8], quoted[9]];
        let len = (size_of::<EchoHeader>() + size_of::<Quoted6<WORDS>>()) as u16;
        let ip = Ipv6Header {
            version_class_flow_be: 0x6000_0000_u32.to_be(),
            payload_len_be: len.to_be(),
            next_header: PROTOCOL_ICMPV6,
            hop_limit: TTL,
            saddr_be: [d0, d1, d2, d3],
            daddr_be: [s0, s1, s2, s3],
        };
        let mut icmp = EchoHeader {
            kind: UNREACHABLE6,
            code: PORT6,
            ..EchoHeader::default()
        };
        let start = u32::from_ne_bytes([UNREACHABLE6, PORT6, 0, 0]);
        // The pseudo header contains the addresses (in either order), the length and the protocol.
        let pseudo = [
            s0,
            s1,
            s2,
            s3,
            d0,
            d1,
            d2,
            d3,
            u32::from(len).to_be(),
            u32::from(PROTOCOL_ICMPV6).to_be(),
        ];
        icmp.check = !fold64(sum32(&quoted) + sum32(&pseudo) + u64::from(start));
        Self { ip, icmp, quoted }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// The sum of RFC 1071, over bytes.
    fn sum(bytes: &[u8]) -> u16 {
        let mut sum: u32 = bytes
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn icmp(header: EchoHeader, quoted: &[u32]) -> Vec<u8> {
        let check = header.check.to_ne_bytes();
        let start = [header.kind, header.code, check[0], check[1], 0, 0, 0, 0];
        [start.to_vec(), bytes(quoted)].concat()
    }

    proptest! {
        #[test]
        fn errors_have_right_checksums_and_go_back(
            four: Quoted4<{ HEADER4 + LONG }>,
            six: Quoted6<{ HEADER6 + SHORT }>,
        ) {
            let error = Unreachable4::about(four);
            prop_assert_eq!(sum(&icmp(error.icmp, &four)), 0xffff);
            let ip = error.ip;
            let check = ip.check.to_ne_bytes();
            let header = [
                [0x45, 0xc0, 0, 68, 0, 0, 0, 0, 64, 1, check[0], check[1]].to_vec(),
                bytes(&[ip.saddr_be, ip.daddr_be]),
            ].concat();
            prop_assert_eq!(sum(&header), 0xffff);
            prop_assert_eq!((ip.saddr_be, ip.daddr_be), (four[4], four[3]));

            let error = Unreachable6::about(six);
            let pseudo = [bytes(&six[2..10]), [0, 0, 0, 56, 0, 0, 0, 58].to_vec()].concat();
            prop_assert_eq!(sum(&[pseudo, icmp(error.icmp, &six)].concat()), 0xffff);
            prop_assert_eq!(error.ip.daddr_be.as_slice(), &six[2..6]);
        }
    }
}
