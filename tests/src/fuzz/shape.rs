//! Locates the parts of a frame and verifies its checksums, according to the RFCs and independent of the datapath.

use std::ops::Range;

use crate::packet::{IPV4, IPV6};

pub(super) const ICMP: u8 = 1;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const FRAGMENT: u8 = 44;
pub(super) const ICMPV6: u8 = 58;

/// Length of an Ethernet header and of a VLAN tag.
const ETHERNET_LEN: usize = 14;
const TAG_LEN: usize = 4;
const TAGS_MAX: usize = 2;
/// Length of an ICMP header. In an error, it is followed by the packet that the error is about.
const ICMP_LEN: usize = 8;
/// More extension headers than any program parses.
const EXTENSIONS_MAX: usize = 16;

/// Reads a 16-bit number in network byte order.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([pair[0], pair[1]]))
}

pub(super) fn set_word(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(pair) = bytes.get_mut(at..at + 2) {
        pair.copy_from_slice(&value.to_be_bytes());
    }
}

/// EtherType and offset of a frame's content, after at most two VLAN tags.
pub(super) fn network(frame: &[u8]) -> Option<(u16, usize)> {
    let mut at = ETHERNET_LEN;
    let mut ethertype = word(frame, at - 2)?;
    for _ in 0..TAGS_MAX {
        if !matches!(ethertype, 0x8100 | 0x88a8) {
            break;
        }
        at += TAG_LEN;
        ethertype = word(frame, at - 2)?;
    }
    Some((ethertype, at))
}

/// An IP packet in a frame or in an ICMP error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ip {
    /// Offset of the packet.
    pub(super) at: usize,
    /// IP version: true for 4, false for 6.
    pub(super) is_v4: bool,
    /// Length of the header including options, without extension headers.
    pub(super) header_len: usize,
    /// Offset of the packet's end according to its header, limited to the end of the frame.
    pub(super) end: usize,
    /// The protocol after all extension headers.
    pub(super) protocol: u8,
    /// Offset of the transport header; `None` in later fragments and truncated packets.
    pub(super) transport_at: Option<usize>,
}

impl Ip {
    /// Locates the packet in a frame.
    pub(super) fn of(frame: &[u8]) -> Option<Self> {
        match network(frame)? {
            (IPV4, at) => Self::read(frame, at, true),
            (IPV6, at) => Self::read(frame, at, false),
            _ => None,
        }
    }

    fn read(frame: &[u8], at: usize, is_v4: bool) -> Option<Self> {
        if is_v4 {
            Self::read4(frame, at)
        } else {
            Self::read6(frame, at)
        }
    }

    fn read4(frame: &[u8], at: usize) -> Option<Self> {
        let header = frame.get(at..at + 20)?;
        let header_len = usize::from(header[0] & 0xf) * 4;
        if header[0] >> 4 != 4 || header_len < 20 || at + header_len > frame.len() {
            return None;
        }
        let end = match word(header, 2)? {
            // The packet is larger than the field can hold (BIG TCP).
            0 => frame.len(),
            len => (at + usize::from(len)).min(frame.len()),
        };
        let is_later = word(header, 6)? & 0x1fff != 0;
        let is_there = at + header_len <= end;
        Some(Self {
            at,
            is_v4: true,
            header_len,
            end,
            protocol: header[9],
            transport_at: (is_there && !is_later).then_some(at + header_len),
        })
    }

    fn read6(frame: &[u8], at: usize) -> Option<Self> {
        let header = frame.get(at..at + 40)?;
        if header[0] >> 4 != 6 {
            return None;
        }
        // For IPv6, a BIG TCP packet looks like an empty payload, but is too long for a test run anyway.
        let end = (at + 40 + usize::from(word(header, 4)?)).min(frame.len());
        let mut packet = Self {
            at,
            is_v4: false,
            header_len: 40,
            end,
            protocol: header[6],
            transport_at: None,
        };
        let mut next = at + 40;
        for _ in 0..EXTENSIONS_MAX {
            let Some(start) = frame.get(next..next + 8).filter(|_| next + 8 <= end) else {
                break;
            };
            let len = match packet.protocol {
                0 | 43 | 60 => (usize::from(start[1]) + 1) * 8,
                51 => (usize::from(start[1]) + 2) * 4,
                FRAGMENT if word(start, 2)? & 0xfff8 != 0 => {
                    packet.protocol = start[0];
                    return Some(packet);
                }
                FRAGMENT => 8,
                _ => break,
            };
            packet.protocol = start[0];
            next += len;
        }
        packet.transport_at = (next <= end).then_some(next);
        Some(packet)
    }

    /// Range of the source address.
    pub(super) fn source(&self) -> Range<usize> {
        let (at, len) = if self.is_v4 { (12, 4) } else { (8, 16) };
        self.at + at..self.at + at + len
    }

    /// Range of the destination address.
    pub(super) fn destination(&self) -> Range<usize> {
        let source = self.source();
        source.end..source.end + source.len()
    }

    /// Whether the packet carries ICMP of its own IP version.
    pub(super) fn is_icmp(&self) -> bool {
        self.protocol == if self.is_v4 { ICMP } else { ICMPV6 }
    }

    /// The type of the packet's ICMP message.
    pub(super) fn icmp_type(&self, frame: &[u8]) -> Option<u8> {
        let at = self.transport_at.filter(|_| self.is_icmp())?;
        frame[..self.end].get(at).copied()
    }

    /// Whether the packet is an echo request or reply.
    pub(super) fn is_echo(&self, frame: &[u8]) -> bool {
        let kinds = if self.is_v4 { [8, 0] } else { [128, 129] };
        self.icmp_type(frame)
            .is_some_and(|kind| kinds.contains(&kind))
    }

    /// The packet that this ICMP error is about.
    pub(super) fn inner(&self, frame: &[u8]) -> Option<Self> {
        let kind = self.icmp_type(frame)?;
        let is_error = if self.is_v4 {
            matches!(kind, 3 | 11 | 12)
        } else {
            matches!(kind, 1..=4)
        };
        let at = self.transport_at? + ICMP_LEN;
        Self::read(&frame[..self.end], at, self.is_v4).filter(|_| is_error)
    }

    /// Range of the source or destination port, or of an echo's identifier.
    pub(super) fn port(&self, frame: &[u8], is_source: bool) -> Option<Range<usize>> {
        let at = self.transport_at?;
        let at = match self.protocol {
            TCP | UDP if is_source => at,
            TCP | UDP => at + 2,
            _ if self.is_echo(frame) => at + 4,
            _ => return None,
        };
        (at + 2 <= self.end).then_some(at..at + 2)
    }

    /// Ranges of the packet's own checksums.
    pub(super) fn checksum_places(&self) -> impl Iterator<Item = Range<usize>> {
        let fields = [self.header_field(), self.transport_field()];
        fields
            .into_iter()
            .flatten()
            .map(|field| field.at..field.at + 2)
    }

    /// The checksum of the IPv4 header.
    fn header_field(&self) -> Option<Field> {
        self.is_v4.then(|| Field {
            at: self.at + 10,
            covers: self.at..self.at + self.header_len,
            pseudo: None,
            is_optional: false,
        })
    }

    /// The checksum in the transport header.
    fn transport_field(&self) -> Option<Field> {
        let transport_at = self.transport_at?;
        let (at, has_pseudo) = match self.protocol {
            TCP => (16, true),
            UDP => (6, true),
            ICMP if self.is_v4 => (2, false),
            ICMPV6 if !self.is_v4 => (2, true),
            _ => return None,
        };
        let at = transport_at + at;
        let covers = transport_at..self.end;
        let pseudo = Pseudo {
            addresses: self.source().start..self.destination().end,
            protocol: self.protocol,
        };
        (at + 2 <= self.end).then(|| Field {
            at,
            covers,
            pseudo: has_pseudo.then_some(pseudo),
            // Also optional over IPv6, in tunnels (RFC 6935).
            is_optional: self.protocol == UDP,
        })
    }
}

/// The pseudo-header that a checksum covers (RFC 9293 section 3.1, RFC 8200 section 8.1).
struct Pseudo {
    addresses: Range<usize>,
    protocol: u8,
}

/// A checksum field in a frame.
struct Field {
    at: usize,
    covers: Range<usize>,
    pseudo: Option<Pseudo>,
    is_optional: bool,
}

impl Field {
    /// The one's complement sum over all covered bytes including the checksum: 0xffff if the checksum is correct.
    fn sum(&self, frame: &[u8]) -> u16 {
        let mut sum = add_words(&frame[self.covers.clone()]);
        if let Some(pseudo) = &self.pseudo {
            sum += add_words(&frame[pseudo.addresses.clone()]);
            sum += u64::from(pseudo.protocol) + self.covers.len() as u64;
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    fn mend(&self, frame: &mut [u8]) {
        set_word(frame, self.at, 0);
        let check = match !self.sum(frame) {
            // 0 means no checksum (RFC 768).
            0 if self.is_optional => 0xffff,
            check => check,
        };
        set_word(frame, self.at, check);
    }
}

fn add_words(bytes: &[u8]) -> u64 {
    let mut pairs = bytes.chunks_exact(2);
    let even: u64 = pairs
        .by_ref()
        .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    even + pairs
        .remainder()
        .first()
        .map_or(0, |&last| u64::from(last) << 8)
}

/// Which checksum of a frame it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The IPv4 header's checksum.
    Header,
    /// The checksum of TCP, UDP or ICMP.
    Transport,
    /// The checksum of the IPv4 header that an ICMP error quotes.
    InnerHeader,
    /// The checksum of the payload that an ICMP error quotes.
    InnerTransport,
}

/// The state of a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checksum {
    /// Which checksum it is.
    pub(super) place: Place,
    /// Its error in one's complement: 0 if the checksum is correct, or in fragments, where it cannot be verified.
    /// `None` if it is omitted.
    pub(super) error: Option<u16>,
}

/// The checksums of a frame, outermost first.
pub(super) fn checksums(frame: &[u8]) -> Vec<Checksum> {
    fields(frame)
        .into_iter()
        .map(|(place, field)| {
            let is_left_out = field.is_optional && word(frame, field.at) == Some(0);
            Checksum {
                place,
                // One's complement has two zeros, and only all-zero bytes sum to the other one.
                error: (!is_left_out).then(|| match !field.sum(frame) {
                    0xffff => 0,
                    error => error,
                }),
            }
        })
        .collect()
}

/// Corrects all checksums in a frame.
pub(super) fn mend_checksums(frame: &mut [u8]) {
    // Inner checksums first, as outer checksums cover them.
    for (_, field) in fields(frame).iter().rev() {
        field.mend(frame);
    }
}

/// Adjusts all lengths in the headers so that the packet ends at the end of the frame.
pub(super) fn mend_lengths(frame: &mut [u8]) {
    let Some(ip) = Ip::of(frame) else {
        return;
    };
    let len = frame.len() - ip.at;
    if ip.is_v4 {
        set_word(frame, ip.at + 2, len as u16);
    } else {
        set_word(frame, ip.at + 4, (len - ip.header_len) as u16);
    }
    if let Some(at) = ip.transport_at.filter(|_| ip.protocol == UDP) {
        let len = frame.len() - at;
        set_word(frame, at + 4, len as u16);
    }
}

fn fields(frame: &[u8]) -> Vec<(Place, Field)> {
    let outer = Ip::of(frame);
    let inner = outer.as_ref().and_then(|ip| ip.inner(frame));
    let of = |ip: &Option<Ip>, read: fn(&Ip) -> Option<Field>| ip.as_ref().and_then(read);
    [
        (Place::Header, of(&outer, Ip::header_field)),
        (Place::Transport, of(&outer, Ip::transport_field)),
        (Place::InnerHeader, of(&inner, Ip::header_field)),
        (Place::InnerTransport, of(&inner, Ip::transport_field)),
    ]
    .into_iter()
    .filter_map(|(place, field)| Some((place, field?)))
    .collect()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::packet::{Ipv4, Ipv6, Tcp, echo, echo4, ethernet};

    fn errors(frame: &[u8]) -> Vec<(Place, Option<u16>)> {
        let found = checksums(frame).into_iter();
        found.map(|found| (found.place, found.error)).collect()
    }

    fn segment(source: IpAddr, destination: IpAddr) -> Vec<u8> {
        let tcp = Tcp {
            source: 40_000,
            destination: 80,
            data: b"odd".to_vec(),
            ..Tcp::default()
        };
        tcp.frame(source, destination)
    }

    #[test]
    fn checksums_that_others_made_are_right() {
        let [a, b] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(192, 0, 2, 1)];
        let [c, d] = [1, 2].map(|last| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
        let right = |place| (place, Some(0));
        let whole = [Place::Header, Place::Transport].map(right);
        assert_eq!(errors(&segment(a.into(), b.into())), whole);
        assert_eq!(errors(&segment(c.into(), d.into())), whole[1..]);

        let ip = Ipv6::icmp(c, d);
        let message = ip.with_checksum(echo(128, 0, 1, 2, b"data"));
        assert_eq!(
            errors(&ethernet([0; 6], [0; 6], IPV6, &ip.packet(&message))),
            whole[1..]
        );

        let about = &segment(a.into(), b.into())[14..];
        let error = Ipv4::icmp(b, a).packet(&echo4(3, 1, 0, 0, about));
        let error = ethernet([0; 6], [0; 6], IPV4, &error);
        let all = [
            Place::Header,
            Place::Transport,
            Place::InnerHeader,
            Place::InnerTransport,
        ];
        assert_eq!(errors(&error), all.map(right));
    }

    #[test]
    fn damage_shows_and_is_mended() {
        let [a, b] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(192, 0, 2, 1)];
        let whole = segment(a.into(), b.into());
        let mut damaged = whole.clone();
        damaged[14 + 8] -= 1;
        damaged[14 + 20] ^= 0x40;
        assert!(errors(&damaged).iter().all(|(_, error)| *error != Some(0)));
        mend_checksums(&mut damaged);
        assert!(errors(&damaged).iter().all(|(_, error)| *error == Some(0)));
        let mut longer = whole.clone();
        longer.extend([0; 7]);
        mend_lengths(&mut longer);
        assert_eq!(Ip::of(&longer).map(|ip| ip.end), Some(longer.len()));
    }

    #[test]
    fn extension_headers_are_walked_over_and_later_fragments_have_no_ports() {
        let [c, d] = [1, 2].map(|last| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
        let with = |offset: u16| {
            let ip = Ipv6 {
                next_header: 60,
                ..Ipv6::icmp(c, d)
            };
            let [high, low] = offset.to_be_bytes();
            let options = [FRAGMENT, 0, 1, 4, 0, 0, 0, 0];
            let fragment = [UDP, 0, high, low, 0, 0, 0, 9];
            let content = [&options[..], &fragment, &[0; 8]].concat();
            Ip::of(&ethernet([0; 6], [0; 6], IPV6, &ip.packet(&content))).expect("a packet")
        };
        let first = with(1);
        assert_eq!(
            (first.protocol, first.transport_at),
            (UDP, Some(14 + 40 + 16))
        );
        let later = with(8);
        assert_eq!((later.protocol, later.transport_at), (UDP, None));
    }
}
