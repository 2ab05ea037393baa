//! Fragments: how to recognise them, and the ports of fragments without a transport header.
//!
//! Only a packet's first fragment has the transport header. Its ports are stored for the later fragments, under the
//! fields that all fragments of the packet share.

use crate::echo::Ipv4Header;

/// IPv4: more fragments follow (RFC 791 section 3.1).
const IPV4_MORE: u16 = 0x2000;
/// IPv4: the fragment offset, in units of eight bytes.
const IPV4_OFFSET: u16 = 0x1fff;
/// IPv6: more fragments follow (RFC 8200 section 4.5).
const IPV6_MORE: u16 = 0x0001;
/// IPv6: the fragment offset in bytes.
const IPV6_OFFSET: u16 = 0xfff8;

/// A fragment's position in its packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Identification of the packet, as in the header: 16 bits with IPv4.
    pub id_be: u32,
    /// Whether this is the first fragment, which has the transport header.
    pub first: bool,
    /// Whether more fragments follow.
    pub more: bool,
}

/// IPv6 fragment header (RFC 8200 section 4.5).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Type of the first header of the packet's fragmentable part.
    pub next_header: u8,
    /// Zero.
    pub reserved: u8,
    /// Fragment offset and more-fragments bit.
    pub offset_be: u16,
    /// Identification.
    pub id_be: u32,
}

const _: () = assert!(core::mem::size_of::<FragmentHeader>() == 8);

impl Ipv4Header {
    /// Fragment information; `None` for a whole packet.
    #[inline(always)]
    pub const fn fragment(&self) -> Option<Fragment> {
        let bits = u16::from_be(self.fragment_be);
        if bits & (IPV4_MORE | IPV4_OFFSET) == 0 {
            return None;
        }
        Some(Fragment {
            id_be: self.id_be as u32,
            first: bits & IPV4_OFFSET == 0,
            more: bits & IPV4_MORE != 0,
        })
    }
}

impl FragmentHeader {
    /// Fragment information; `None` for an atomic fragment, a whole packet with a fragment header (RFC 6946).
    #[inline(always)]
    pub const fn fragment(&self) -> Option<Fragment> {
        let bits = u16::from_be(self.offset_be);
        if bits & (IPV6_MORE | IPV6_OFFSET) == 0 {
            return None;
        }
        Some(Fragment {
            id_be: self.id_be,
            first: bits & IPV6_OFFSET == 0,
            more: bits & IPV6_MORE != 0,
        })
    }
}

/// The fields that all fragments of an IPv4 packet share (RFC 791 section 3.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FragmentKey4 {
    /// Source address.
    pub saddr_be: u32,
    /// Destination address.
    pub daddr_be: u32,
    /// Identification.
    pub id_be: u16,
    /// Protocol of the data.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: u8,
}

/// The fields that all fragments of an IPv6 packet share (RFC 8200 section 4.5). The protocol is not one of them: a
/// later fragment names the first header of the fragmentable part, which may be an extension header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FragmentKey6 {
    /// Source address.
    pub saddr_be: [u32; 4],
    /// Destination address.
    pub daddr_be: [u32; 4],
    /// Identification.
    pub id_be: u32,
}

/// Ports and protocol of a packet's first fragment, for its later fragments.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentPorts {
    /// When the entry expires: `CLOCK_MONOTONIC`, in seconds. Entries expire because identifications are reused.
    pub expires: u32,
    /// See [`crate::ct::Tuple4::sport_be`].
    pub sport_be: u16,
    /// See [`crate::ct::Tuple4::dport_be`].
    pub dport_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
}

impl FragmentPorts {
    /// Whether the entry has expired at `now` (`CLOCK_MONOTONIC`, in seconds).
    #[inline(always)]
    pub const fn has_expired(&self, now: u32) -> bool {
        self.expires <= now
    }
}

crate::map_types!(FragmentKey4 = 12, FragmentKey6 = 36, FragmentPorts = 12);

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(bits: u16) -> Option<Fragment> {
        let ip = Ipv4Header {
            id_be: 0x1234,
            fragment_be: bits.to_be(),
            ..Ipv4Header::default()
        };
        ip.fragment()
    }

    fn ipv6(bits: u16) -> Option<Fragment> {
        let header = FragmentHeader {
            id_be: 0x1234,
            offset_be: bits.to_be(),
            ..FragmentHeader::default()
        };
        header.fragment()
    }

    fn fragment(first: bool, more: bool) -> Option<Fragment> {
        Some(Fragment {
            id_be: 0x1234,
            first,
            more,
        })
    }

    #[test]
    fn a_fragment_is_identified_by_its_offset_and_by_what_follows() {
        assert_eq!(ipv4(0x4000), None, "don't fragment");
        assert_eq!(ipv4(0), None);
        assert_eq!(ipv4(0x2000), fragment(true, true));
        assert_eq!(ipv4(0x2001), fragment(false, true));
        assert_eq!(ipv4(0x1fff), fragment(false, false));
        assert_eq!(ipv6(0), None);
        assert_eq!(ipv6(0x0006), None, "reserved bits");
        assert_eq!(ipv6(0x0001), fragment(true, true));
        assert_eq!(ipv6(0x0009), fragment(false, true));
        assert_eq!(ipv6(0xfff8), fragment(false, false));
    }

    #[test]
    fn ports_hold_until_their_second() {
        let ports = FragmentPorts {
            expires: 30,
            ..FragmentPorts::default()
        };
        assert!(!ports.has_expired(29));
        assert!(ports.has_expired(30));
    }
}
