//! One key type for IPv4 and IPv6 addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IP address as stored in maps: 16 bytes in network order, IPv4 mapped into `::ffff:0:0/96` (RFC 4291 section
/// 2.5.5.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addr {
    /// The address, four words in network byte order.
    pub words_be: [u32; 4],
}

crate::map_types!(Addr = 16);

impl Addr {
    /// An IPv4 address, given in network byte order.
    #[inline(always)]
    pub const fn v4(addr_be: u32) -> Self {
        Self {
            words_be: [0, 0, 0xffff_u32.to_be(), addr_be],
        }
    }

    /// An IPv6 address, given as four words in network byte order.
    #[inline(always)]
    pub const fn v6(words_be: [u32; 4]) -> Self {
        Self {
            words_be: words(words_be),
        }
    }

    /// The link-local address of a device with this hardware address (RFC 4291 appendix A, RFC 4862 section 5.3).
    #[inline(always)]
    pub const fn link_local([a, b, c, d, e, f]: [u8; 6]) -> Self {
        Self {
            words_be: [
                0xfe80_0000_u32.to_be(),
                0,
                u32::from_ne_bytes([a ^ 2, b, c, 0xff]),
                u32::from_ne_bytes([0xfe, d, e, f]),
            ],
        }
    }

    /// Whether this is an IPv4 address.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        let w = &self.words_be;
        w[0] | w[1] == 0 && w[2] == 0xffff_u32.to_be()
    }

    /// Whether the address is unset (`::`).
    #[inline(always)]
    pub const fn is_unset(&self) -> bool {
        let w = &self.words_be;
        w[0] | w[1] | w[2] | w[3] == 0
    }

    /// Converts the address to the standard library's type.
    pub fn to_ip(self) -> IpAddr {
        let mut octets = [0; 16];
        for (chunk, word) in octets.chunks_exact_mut(4).zip(self.words_be) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        let v6 = Ipv6Addr::from(octets);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }
}

impl From<Ipv4Addr> for Addr {
    fn from(addr: Ipv4Addr) -> Self {
        Self::v4(u32::from_ne_bytes(addr.octets()))
    }
}

impl From<Ipv6Addr> for Addr {
    fn from(addr: Ipv6Addr) -> Self {
        let mut words_be = [0; 4];
        for (word, chunk) in words_be.iter_mut().zip(addr.octets().chunks_exact(4)) {
            *word = u32::from_ne_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        }
        Self { words_be }
    }
}

impl From<IpAddr> for Addr {
    fn from(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => v6.into(),
        }
    }
}

/// Copies the words one by one. LLVM copies a whole array through the stack, which is scarce in eBPF programs.
#[inline(always)]
pub const fn words([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    [a, b, c, d]
}

/// Whether an IPv4 address (network byte order) is valid as the source of a packet to answer: not this-network,
/// loopback, multicast, reserved or broadcast (RFC 1122 section 3.2.1.3).
#[inline(always)]
pub const fn v4_source_is_possible(addr_be: u32) -> bool {
    let first = u32::from_be(addr_be) >> 24;
    first != 0 && first != 127 && first < 224
}

/// Whether an IPv6 address (words in network byte order) is valid as the source of a packet to answer: not unspecified,
/// loopback or multicast (RFC 4291 sections 2.5.2, 2.5.3 and 2.7).
#[inline(always)]
pub const fn v6_source_is_possible(words_be: &[u32; 4]) -> bool {
    let zero_or_one =
        words_be[0] | words_be[1] | words_be[2] == 0 && u32::from_be(words_be[3]) <= 1;
    !v6_is_group(words_be) && !zero_or_one
}

/// Whether an IPv6 address (words in network byte order) is multicast, `ff00::/8` (RFC 4291 section 2.7).
#[inline(always)]
pub const fn v6_is_group(words_be: &[u32; 4]) -> bool {
    u32::from_be(words_be[0]) >> 24 == 0xff
}

/// Whether an IPv6 address (words in network byte order) is link-local unicast, `fe80::/10`.
#[inline(always)]
pub const fn v6_is_link_local(words_be: &[u32; 4]) -> bool {
    u32::from_be(words_be[0]) >> 22 == 0xfe80_0000_u32 >> 22
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_round_trip() {
        for ip in [
            "10.244.1.7",
            "0.0.0.0",
            "255.255.255.255",
            "::1",
            "fd00:10:244:1::7",
        ] {
            let ip: IpAddr = ip.parse().expect("a literal address");
            assert_eq!(Addr::from(ip).to_ip(), ip);
        }
    }

    #[test]
    fn a_device_has_the_link_local_address_of_its_hardware_address() {
        let address = Addr::link_local([0x0a, 0x11, 0x22, 0x33, 0x44, 0x55]);
        let expected: IpAddr = "fe80::811:22ff:fe33:4455".parse().expect("an address");
        assert_eq!(address.to_ip(), expected);
    }

    #[test]
    fn impossible_sources_are_named() {
        let v4 = |s: &str| {
            v4_source_is_possible(u32::from_ne_bytes(s.parse::<Ipv4Addr>().unwrap().octets()))
        };
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
        ] {
            assert!(!v4(bad), "{bad}");
        }
        for good in [
            "1.1.1.1",
            "10.0.0.1",
            "126.255.255.255",
            "128.0.0.1",
            "223.255.255.255",
        ] {
            assert!(v4(good), "{good}");
        }
        let v6 =
            |s: &str| v6_source_is_possible(&Addr::from(s.parse::<Ipv6Addr>().unwrap()).words_be);
        for bad in ["::", "::1", "ff02::1"] {
            assert!(!v6(bad), "{bad}");
        }
        for good in ["fe80::1", "fd00::1", "2001:db8::1", "::2"] {
            assert!(v6(good), "{good}");
        }
    }
}
