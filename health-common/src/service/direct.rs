//! Direct server return: the backend's node answers an outside client directly, from the service's address and port.
//!
//! The first node forwards the client's packet to the backend with the client's source address, and names the frontend
//! in an IPv4 option (RFC 791, with the experimental number of RFC 4727) or an IPv6 destination options header (RFC
//! 8200 section 4.6). The option carries a tag that only nodes of the mesh can produce. The backend's node removes the
//! option.

use crate::addr::Addr;
use crate::checksum::fold64;
use crate::echo::{IPV4_LEN, Ipv4Header, Ipv6Header};
use crate::packet::is_extension;
use crate::siphash::{SipKey, siphash24_words};

/// The single value of `HEALTH_DIRECT`, at index 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectConfig {
    /// Keys of the tags. New tags are created with the first key; tags of all keys are accepted.
    pub keys: [SipKey; DIRECT_KEYS],
    /// Number of keys. 0: no packets are sent or accepted this way.
    pub count: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

/// Maximum number of keys: two exist while the key of the mesh changes.
pub const DIRECT_KEYS: usize = 2;

crate::map_types!(DirectConfig = 40);

/// Number of words that a tag covers.
const COVERED_WORDS: usize = 8;

/// Data that a tag covers: a packet's endpoints, its frontend, and what distinguishes it from other packets of its
/// flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covered {
    words: [u64; COVERED_WORDS],
}

/// An address and port, network byte order.
pub type End = (Addr, u16);

impl Covered {
    /// The data of a packet from `client` to `backend`, for `frontend`. `sequence_be`: its sequence number; 0 if it has
    /// none.
    #[inline(always)]
    pub const fn new(
        client: &End,
        frontend: &End,
        backend: &End,
        protocol: u8,
        sequence_be: u32,
    ) -> Self {
        let ports = word(
            client.1 as u32 | (frontend.1 as u32) << 16,
            backend.1 as u32 | (protocol as u32) << 16,
        );
        let [c, f, b] = [
            &client.0.words_be,
            &frontend.0.words_be,
            &backend.0.words_be,
        ];
        Self {
            words: [
                word(c[0], c[1]),
                word(c[2], c[3]),
                word(f[0], f[1]),
                word(f[2], f[3]),
                word(b[0], b[1]),
                word(b[2], b[3]),
                ports,
                sequence_be as u64,
            ],
        }
    }

    /// The tag over this data.
    #[inline(always)]
    pub const fn tag(&self, key: SipKey) -> u64 {
        siphash24_words(key, &self.words)
    }
}

#[inline(always)]
const fn word(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Type of the IPv4 option: copied into fragments, number 30.
const KIND4: u8 = 0x9e;
/// Type of the IPv6 option: receivers that do not know it drop the packet silently.
const KIND6: u8 = 0x5e;
/// Type of a destination options header.
pub const DESTINATION_OPTIONS: u8 = 60;

/// The options of an IPv4 header that contains only the direct return option.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Option4 {
    kind: u8,
    len: u8,
    port_be: u16,
    addr_be: u32,
    tag: [u32; 2],
}

/// A destination options header that contains only the direct return option.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Option6 {
    next_header: u8,
    units: u8,
    kind: u8,
    len: u8,
    port_be: u16,
    reserved: u16,
    addr_be: [u32; 4],
    tag: [u32; 2],
}

const _: () = assert!(size_of::<Option4>() == 16 && size_of::<Option6>() == 32);

/// The direct return option for one IP version.
pub trait DirectOption: Copy + Default {
    /// An address, network byte order.
    type Address;
    /// The header in front of the option.
    type Header: Copy;

    /// The option for a packet to this frontend.
    fn new(frontend: (Self::Address, u16), tag: u64) -> Self;
    /// The frontend and the tag; `None` if this is another option.
    fn read(&self) -> Option<((Self::Address, u16), u64)>;
    /// Whether this header may be followed by the option.
    fn may_follow(ip: &Self::Header) -> bool;
    /// Whether this is the header of an unfragmented packet without options.
    fn is_plain(ip: &Self::Header) -> bool;
    /// The header, adjusted for the option after it. `None` if the header is not plain or the packet would become too
    /// long.
    fn put_behind(&mut self, ip: &Self::Header) -> Option<Self::Header>;
    /// The header, adjusted for the removal of the option. `None` if the packet is truncated.
    fn take_off(&self, ip: &Self::Header) -> Option<Self::Header>;
}

#[inline(always)]
const fn halves(tag: u64) -> [u32; 2] {
    [tag as u32, (tag >> 32) as u32]
}

impl Option4 {
    const LEN: u16 = size_of::<Self>() as u16;
    const PLAIN: u8 = 0x45;
    /// Mask of the MF bit and the fragment offset.
    const FRAGMENT: u16 = 0x3fff;
    const WITH_IT: u8 = 0x45 + (size_of::<Self>() / 4) as u8;

    /// Sum of the option's words.
    #[inline(always)]
    fn sum(&self) -> u64 {
        let first = u32::from_ne_bytes([
            self.kind,
            self.len,
            self.port_be.to_ne_bytes()[0],
            self.port_be.to_ne_bytes()[1],
        ]);
        u64::from(first) + u64::from(self.addr_be) + u64::from(self.tag[0]) + u64::from(self.tag[1])
    }

    /// The header with new lengths. The checksum is updated incrementally: a wrong one stays wrong.
    #[inline(always)]
    fn resized(ip: &Ipv4Header, version_ihl: u8, len: u16, options: u64) -> Ipv4Header {
        let total_len_be = len.to_be();
        let changed = |version_ihl: u8, total_len_be: u16| {
            let [a, b] = total_len_be.to_ne_bytes();
            u32::from_ne_bytes([version_ihl, ip.tos, a, b])
        };
        let old = changed(ip.version_ihl, ip.total_len_be);
        let new = changed(version_ihl, total_len_be);
        let sum = u64::from(!ip.check) + u64::from(!old) + u64::from(new) + options;
        Ipv4Header {
            version_ihl,
            total_len_be,
            check: !fold64(sum),
            ..*ip
        }
    }
}

impl DirectOption for Option4 {
    type Address = u32;
    type Header = Ipv4Header;

    #[inline(always)]
    fn new((addr_be, port_be): (u32, u16), tag: u64) -> Self {
        Self {
            kind: KIND4,
            len: Self::LEN as u8,
            port_be,
            addr_be,
            tag: halves(tag),
        }
    }

    #[inline(always)]
    fn read(&self) -> Option<((u32, u16), u64)> {
        let is_it = self.kind == KIND4 && self.len == Self::LEN as u8;
        is_it.then(|| ((self.addr_be, self.port_be), word(self.tag[0], self.tag[1])))
    }

    #[inline(always)]
    fn may_follow(ip: &Ipv4Header) -> bool {
        ip.version_ihl == Self::WITH_IT
    }

    #[inline(always)]
    fn is_plain(ip: &Ipv4Header) -> bool {
        ip.version_ihl == Self::PLAIN && u16::from_be(ip.fragment_be) & Self::FRAGMENT == 0
    }

    #[inline(always)]
    fn put_behind(&mut self, ip: &Ipv4Header) -> Option<Ipv4Header> {
        let len = u16::from_be(ip.total_len_be).checked_add(Self::LEN)?;
        Self::is_plain(ip).then(|| Self::resized(ip, Self::WITH_IT, len, self.sum()))
    }

    #[inline(always)]
    fn take_off(&self, ip: &Ipv4Header) -> Option<Ipv4Header> {
        let len = u16::from_be(ip.total_len_be).checked_sub(Self::LEN)?;
        // Adding the complement of each word subtracts the option.
        let gone = 4 * u64::from(u32::MAX) - self.sum();
        (len >= IPV4_LEN as u16).then(|| Self::resized(ip, Self::PLAIN, len, gone))
    }
}

impl Option6 {
    const LEN: u16 = size_of::<Self>() as u16;
    /// Length in units of eight bytes, not counting the first.
    const UNITS: u8 = (size_of::<Self>() / 8 - 1) as u8;
    /// Length of the option alone, after its type and length bytes.
    const OPTION_LEN: u8 = size_of::<Self>() as u8 - 4;
}

impl DirectOption for Option6 {
    type Address = [u32; 4];
    type Header = Ipv6Header;

    #[inline(always)]
    fn new((addr_be, port_be): ([u32; 4], u16), tag: u64) -> Self {
        Self {
            next_header: 0,
            units: Self::UNITS,
            kind: KIND6,
            len: Self::OPTION_LEN,
            port_be,
            reserved: 0,
            addr_be,
            tag: halves(tag),
        }
    }

    #[inline(always)]
    fn read(&self) -> Option<(([u32; 4], u16), u64)> {
        let is_it = self.units == Self::UNITS
            && self.kind == KIND6
            && self.len == Self::OPTION_LEN
            && self.reserved == 0;
        is_it.then(|| ((self.addr_be, self.port_be), word(self.tag[0], self.tag[1])))
    }

    #[inline(always)]
    fn may_follow(ip: &Ipv6Header) -> bool {
        ip.next_header == DESTINATION_OPTIONS
    }

    #[inline(always)]
    fn is_plain(ip: &Ipv6Header) -> bool {
        !is_extension(ip.next_header)
    }

    #[inline(always)]
    fn put_behind(&mut self, ip: &Ipv6Header) -> Option<Ipv6Header> {
        let len = u16::from_be(ip.payload_len_be).checked_add(Self::LEN)?;
        if !Self::is_plain(ip) {
            return None;
        }
        self.next_header = ip.next_header;
        Some(Ipv6Header {
            payload_len_be: len.to_be(),
            next_header: DESTINATION_OPTIONS,
            ..*ip
        })
    }

    #[inline(always)]
    fn take_off(&self, ip: &Ipv6Header) -> Option<Ipv6Header> {
        let len = u16::from_be(ip.payload_len_be).checked_sub(Self::LEN)?;
        Some(Ipv6Header {
            payload_len_be: len.to_be(),
            next_header: self.next_header,
            ..*ip
        })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::checksum::{fold, sum};
    use core::net::Ipv4Addr;
    use proptest::prelude::*;

    const KEY: SipKey = [1, 2];

    fn end(last: u8, port: u16) -> End {
        (Addr::from(Ipv4Addr::new(192, 0, 2, last)), port.to_be())
    }

    #[test]
    fn a_tag_covers_each_end_the_protocol_and_the_sequence_number() {
        let all = [end(1, 40_000), end(2, 80), end(3, 8080)];
        let tag = |[client, frontend, backend]: [End; 3], protocol, sequence| {
            Covered::new(&client, &frontend, &backend, protocol, sequence).tag(KEY)
        };
        let right = tag(all, 6, 7);
        assert_ne!(right, tag(all, 17, 7));
        assert_ne!(right, tag(all, 6, 8));
        assert_ne!(
            right,
            Covered::new(&all[0], &all[1], &all[2], 6, 7).tag([1, 3])
        );
        for which in 0..all.len() {
            let mut other = all;
            other[which].0 = end(9, 0).0;
            assert_ne!(right, tag(other, 6, 7));
            other = all;
            other[which].1 ^= 1;
            assert_ne!(right, tag(other, 6, 7));
        }
    }

    fn words4(ip: &Ipv4Header, option: &Option4) -> std::vec::Vec<u16> {
        let mut words = ip.words().to_vec();
        words.push(u16::from_ne_bytes([option.kind, option.len]));
        words.push(option.port_be);
        for word in [option.addr_be, option.tag[0], option.tag[1]] {
            let [a, b, c, d] = word.to_ne_bytes();
            words.extend([u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]);
        }
        words
    }

    fn is_right(words: &[u16]) -> bool {
        fold(words.iter().map(|&word| u32::from(word)).sum()) == 0xffff
    }

    proptest! {
        #[test]
        fn an_ipv4_header_is_right_with_the_option_and_again_without(
            addresses: [u32; 2],
            len in 40_u16..1500,
            frontend: (u32, u16),
            tag: u64,
            damage: u16,
        ) {
            let mut ip = Ipv4Header {
                version_ihl: 0x45,
                total_len_be: len.to_be(),
                ttl: 64,
                protocol: 6,
                saddr_be: addresses[0],
                daddr_be: addresses[1],
                ..Ipv4Header::default()
            };
            ip.check = !fold(sum(&ip.words()));
            for check in [ip.check, ip.check ^ damage] {
                ip.check = check;
                let was_right = is_right(&ip.words());
                let mut option = Option4::new(frontend, tag);
                let with = option.put_behind(&ip).expect("a plain header");
                prop_assert_eq!(is_right(&words4(&with, &option)), was_right);
                prop_assert_eq!(u16::from_be(with.total_len_be), len + 16);
                prop_assert!(Option4::may_follow(&with) && !Option4::may_follow(&ip));
                prop_assert!(option.put_behind(&with).is_none());
                prop_assert_eq!(option.read(), Some((frontend, tag)));
                let without = option.take_off(&with).expect("long enough");
                prop_assert_eq!(is_right(&without.words()), was_right);
                prop_assert_eq!(Ipv4Header { check: 0, ..without }, Ipv4Header { check: 0, ..ip });
            }
        }

        #[test]
        fn an_ipv6_header_is_the_same_after_the_option(
            next_header in prop::sample::select(std::vec![6_u8, 17]),
            len in 20_u16..1500,
            frontend: ([u32; 4], u16),
            tag: u64,
        ) {
            let ip = Ipv6Header {
                payload_len_be: len.to_be(),
                next_header,
                ..Ipv6Header::default()
            };
            let mut option = Option6::new(frontend, tag);
            let with = option.put_behind(&ip).expect("room");
            prop_assert_eq!(u16::from_be(with.payload_len_be), len + 32);
            prop_assert!(Option6::may_follow(&with) && !Option6::may_follow(&ip));
            prop_assert!(option.put_behind(&with).is_none());
            prop_assert_eq!(option.read(), Some((frontend, tag)));
            prop_assert_eq!(option.take_off(&with), Some(ip));
        }
    }

    #[test]
    fn what_is_no_such_option_is_not_read() {
        assert_eq!(Option4::default().read(), None);
        assert_eq!(Option6::default().read(), None);
        let mut four = Option4::new((1, 2), 3);
        four.len = 12;
        assert_eq!(four.read(), None);
        let mut six = Option6::new(([1; 4], 2), 3);
        six.units = 2;
        assert_eq!(six.read(), None);
    }

    #[test]
    fn fragments_get_no_option() {
        let mut ip = Ipv4Header {
            version_ihl: 0x45,
            total_len_be: 40_u16.to_be(),
            ..Ipv4Header::default()
        };
        for (fragment, is_plain) in [(0x4000_u16, true), (0x2000, false), (0x0003, false)] {
            ip.fragment_be = fragment.to_be();
            assert_eq!(Option4::is_plain(&ip), is_plain);
            assert_eq!(Option4::new((1, 2), 3).put_behind(&ip).is_some(), is_plain);
        }
    }

    #[test]
    fn a_packet_that_is_cut_short_keeps_its_option() {
        let mut option = Option4::new((1, 2), 3);
        let short = Ipv4Header {
            total_len_be: 30_u16.to_be(),
            ..Ipv4Header::default()
        };
        assert_eq!(option.take_off(&short), None);
        let long = Ipv4Header {
            version_ihl: 0x45,
            total_len_be: 65_530_u16.to_be(),
            ..Ipv4Header::default()
        };
        assert_eq!(option.put_behind(&long), None);
        let short = Ipv6Header::default();
        assert_eq!(Option6::new(([1; 4], 2), 3).take_off(&short), None);
    }
}
