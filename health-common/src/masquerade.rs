//! Which packets are masqueraded: the single entry of `HEALTH_MASQUERADE`.

use crate::addr::{Addr, words};
use crate::nat::{Ports, can_change_port};

/// Maximum number of prefixes per IP version that are reached without translation.
pub const NATIVE_MAX: usize = 16;
/// Maximum number of prefixes per IP version for which this host is the gateway.
pub const GATEWAY_MAX: usize = 8;

/// An address of one IP version in network byte order: a `u32` or four of them.
pub trait Address: Copy + PartialEq {
    /// Whether the prefix contains the address.
    fn is_in(&self, prefix: &Prefix<Self>) -> bool;
    /// The address as stored in maps shared by both IP versions.
    fn to_addr(self) -> Addr;
    /// The inverse of `to_addr`; the address must be of this IP version.
    fn of_addr(addr: &Addr) -> Self;
    /// Copies the address word by word; see [`words`].
    fn by_words(self) -> Self;
    /// Whether routers do not forward packets to this address: multicast, broadcast, link-local (RFC 3927, RFC 4291).
    fn stays_on_link(&self) -> bool;
}

impl Address for u32 {
    #[inline(always)]
    fn is_in(&self, prefix: &Prefix<Self>) -> bool {
        (self ^ prefix.addr_be) & prefix.mask_be == 0
    }

    #[inline(always)]
    fn to_addr(self) -> Addr {
        Addr::v4(self)
    }

    #[inline(always)]
    fn of_addr(addr: &Addr) -> Self {
        addr.words_be[3]
    }

    #[inline(always)]
    fn by_words(self) -> Self {
        self
    }

    #[inline(always)]
    fn stays_on_link(&self) -> bool {
        let [first, second, ..] = self.to_ne_bytes();
        (224..240).contains(&first) || *self == u32::MAX || first == 169 && second == 254
    }
}

impl Address for [u32; 4] {
    #[inline(always)]
    fn is_in(&self, prefix: &Prefix<Self>) -> bool {
        let ([a, b, c, d], of, mask) = (self, &prefix.addr_be, &prefix.mask_be);
        (a ^ of[0]) & mask[0]
            | (b ^ of[1]) & mask[1]
            | (c ^ of[2]) & mask[2]
            | (d ^ of[3]) & mask[3]
            == 0
    }

    #[inline(always)]
    fn to_addr(self) -> Addr {
        Addr::v6(self)
    }

    #[inline(always)]
    fn of_addr(addr: &Addr) -> Self {
        words(addr.words_be)
    }

    #[inline(always)]
    fn by_words(self) -> Self {
        words(self)
    }

    #[inline(always)]
    fn stays_on_link(&self) -> bool {
        let [first, second, ..] = self[0].to_ne_bytes();
        first == 0xff || first == 0xfe && second & 0xc0 == 0x80
    }
}

/// A prefix, network byte order. Address bits outside the mask are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefix<A> {
    /// The address.
    pub addr_be: A,
    /// The network mask: one bits for the length of the prefix.
    pub mask_be: A,
}

/// Masquerading settings of one IP version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Masquerade<A> {
    /// The address that sources are rewritten to: this node's own.
    pub node_be: A,
    /// The ports for translated flows. All zero: nothing is masqueraded.
    pub ports: Ports,
    /// Number of `native` entries in use.
    pub native_count: u32,
    /// Number of `gateway` entries in use.
    pub gateway_count: u32,
    /// Destinations that are reached without translation.
    pub native: [Prefix<A>; NATIVE_MAX],
    /// Sources that are masqueraded in addition to this node's endpoints.
    pub gateway: [Prefix<A>; GATEWAY_MAX],
}

/// The single value of `HEALTH_MASQUERADE`, at index 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasqueradeConfig {
    /// IPv4.
    pub v4: Masquerade<u32>,
    /// IPv6.
    pub v6: Masquerade<[u32; 4]>,
}

crate::map_types!(MasqueradeConfig = 1004);

impl MasqueradeConfig {
    /// Whether anything is masqueraded for either IP version.
    pub const fn is_on(&self) -> bool {
        self.v4.is_on() || self.v6.is_on()
    }
}

impl<A: Address> Masquerade<A> {
    /// Whether anything is masqueraded.
    #[inline(always)]
    pub const fn is_on(&self) -> bool {
        self.ports.max != 0
    }

    /// Whether packets to this address keep their source, regardless of sender.
    #[inline(always)]
    pub fn is_native(&self, destination: &A) -> bool {
        destination.stays_on_link() || is_in_any(destination, &self.native, self.native_count)
    }

    /// Whether this host is the gateway for this source.
    #[inline(always)]
    pub fn is_behind(&self, source: &A) -> bool {
        is_in_any(source, &self.gateway, self.gateway_count)
    }

    /// Whether a translated flow may use the same port or identifier (network byte order) as this packet from the
    /// node's own address.
    #[inline(always)]
    pub const fn is_shared(&self, protocol: u8, port_be: u16) -> bool {
        !can_change_port(protocol) || self.ports.contains(u16::from_be(port_be))
    }
}

#[inline(always)]
fn is_in_any<A: Address>(address: &A, prefixes: &[Prefix<A>], count: u32) -> bool {
    for (place, prefix) in prefixes.iter().enumerate() {
        if place as u32 >= count {
            break;
        }
        if address.is_in(prefix) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};
    use proptest::prelude::*;

    fn word(addr: u32) -> u32 {
        addr.to_be()
    }

    fn words(addr: u128) -> [u32; 4] {
        Addr::from(Ipv6Addr::from(addr)).words_be
    }

    fn is_local(text: &str) -> bool {
        match text.parse().expect(text) {
            core::net::IpAddr::V4(v4) => word(v4.to_bits()).stays_on_link(),
            core::net::IpAddr::V6(v6) => words(v6.to_bits()).stays_on_link(),
        }
    }

    #[test]
    fn what_no_router_sends_on_is_never_masqueraded() {
        for local in [
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "169.254.9.9",
            "ff02::1",
            "ff0e::1",
            "fe80::1",
            "febf::1",
        ] {
            assert!(is_local(local), "{local}");
        }
        for far in [
            "223.255.255.255",
            "240.0.0.1",
            "169.253.0.1",
            "198.51.100.9",
            "2001:db8::1",
            "fec0::1",
            "fd00::1",
        ] {
            assert!(!is_local(far), "{far}");
        }
    }

    #[test]
    fn only_prefixes_that_are_set_count() {
        let mut masquerade = Masquerade::<u32>::default();
        assert!(!masquerade.is_on());
        let far = word(Ipv4Addr::new(198, 51, 100, 9).to_bits());
        // If unset prefixes counted, they would match every address.
        assert!(!masquerade.is_native(&far) && !masquerade.is_behind(&far));
        masquerade.native_count = 1;
        assert!(masquerade.is_native(&far));
        masquerade.gateway_count = GATEWAY_MAX as u32;
        assert!(masquerade.is_behind(&far));
    }

    #[test]
    fn ports_outside_the_range_are_shared_by_none_but_protocols_that_keep_them() {
        let masquerade = Masquerade::<u32> {
            ports: Ports {
                min: 40_000,
                max: 40_001,
            },
            ..Masquerade::default()
        };
        for protocol in [6, 17, 1, 58] {
            assert!(masquerade.is_shared(protocol, 40_001_u16.to_be()));
            assert!(!masquerade.is_shared(protocol, 40_002_u16.to_be()));
            assert!(!masquerade.is_shared(protocol, 0));
        }
        for protocol in [132, 47] {
            assert!(masquerade.is_shared(protocol, 7));
        }
    }

    proptest! {
        #[test]
        fn an_address_is_in_a_prefix_as_its_first_bits_are(a: u128, b: u128, len in 0_u32..=128, alike: bool) {
            let mask = u128::MAX.checked_shl(128 - len).unwrap_or(0);
            let a = if alike { a & !mask | b & mask } else { a };
            let prefix = Prefix { addr_be: words(b & mask), mask_be: words(mask) };
            prop_assert_eq!(words(a).is_in(&prefix), (a ^ b) & mask == 0);
            let (a, b, mask) = ((a >> 96) as u32, (b >> 96) as u32, (mask >> 96) as u32);
            let prefix = Prefix { addr_be: word(b & mask), mask_be: word(mask) };
            prop_assert_eq!(word(a).is_in(&prefix), (a ^ b) & mask == 0);
        }
    }
}
