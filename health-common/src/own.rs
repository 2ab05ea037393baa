//! The host's own addresses: `HEALTH_OWN`, a longest-prefix-match trie. No outside host legitimately sends from them.

use crate::addr::{Addr, v6_is_group, v6_is_link_local};

/// Entries of `HEALTH_OWN`.
pub const OWN_ENTRIES: u32 = 65_536;

/// A prefix of the host's addresses, including the broadcast and anycast addresses of its networks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnPrefix {
    /// The device of a link-local address, since two links may use the same one. 0 for all other addresses.
    pub ifindex: u32,
    /// The address.
    pub address: Addr,
}

/// Number of key bits in front of the address.
pub const OWN_DEVICE_BITS: u32 = 32;

crate::map_types!(OwnPrefix = 20);

impl OwnPrefix {
    /// The key for looking up the source of a packet that came in on a device.
    #[inline(always)]
    pub const fn of_source(address: Addr, ifindex: u32) -> Self {
        Self {
            ifindex: if v6_is_link_local(&address.words_be) {
                ifindex
            } else {
                0
            },
            address,
        }
    }
}

const V4_LIMITED_BROADCAST: u32 = u32::MAX;

/// Whether an IPv4 packet with these addresses may come in from the network: its source must not be a loopback,
/// multicast or the broadcast address (RFC 1122 section 3.2.1.3). The source may be unset only if the destination is
/// broadcast or multicast, as with DHCP (RFC 2131) and IGMP (RFC 4541).
#[inline(always)]
pub const fn v4_may_come(source_be: u32, destination_be: u32) -> bool {
    let source = u32::from_be(source_be);
    match source >> 24 {
        0 => {
            let is_group = u32::from_be(destination_be) >> 28 == 0xe;
            source == 0 && (is_group || destination_be == V4_LIMITED_BROADCAST)
        }
        127 | 224..=239 => false,
        _ => source_be != V4_LIMITED_BROADCAST,
    }
}

/// Like [`v4_may_come`], for IPv6 (RFC 4291 sections 2.5.2, 2.5.3 and 2.7). The source may be unset only if the
/// destination is multicast, as with duplicate address detection (RFC 4862 section 5.4.2). Neither address may be
/// IPv4-mapped: sockets and maps would mistake it for the IPv4 address.
#[inline(always)]
pub const fn v6_may_come(source: &[u32; 4], destination: &[u32; 4]) -> bool {
    if Addr::v6(*source).is_v4() || Addr::v6(*destination).is_v4() || v6_is_group(source) {
        return false;
    }
    if source[0] | source[1] | source[2] != 0 {
        return true;
    }
    match u32::from_be(source[3]) {
        0 => v6_is_group(destination),
        1 => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    fn may_come(source: &str, destination: &str) -> bool {
        let v4 = |text: &str| {
            let address: Ipv4Addr = text.parse().ok()?;
            Some(u32::from_ne_bytes(address.octets()))
        };
        if let (Some(source), Some(destination)) = (v4(source), v4(destination)) {
            return v4_may_come(source, destination);
        }
        let v6 = |text: &str| Addr::from(text.parse::<Ipv6Addr>().expect(text)).words_be;
        v6_may_come(&v6(source), &v6(destination))
    }

    #[test]
    fn some_sources_come_from_nowhere() {
        for source in ["127.0.0.1", "0.1.2.3", "224.0.0.1", "239.255.255.255"] {
            for destination in ["10.244.1.7", "224.0.0.1", "255.255.255.255"] {
                assert!(!may_come(source, destination), "{source} {destination}");
            }
        }
        assert!(!may_come("255.255.255.255", "10.244.1.7"));
        for source in [
            "::1",
            "ff02::1",
            "ff0e::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
        ] {
            for destination in ["fd00::7", "ff02::1"] {
                assert!(!may_come(source, destination), "{source} {destination}");
            }
        }
        assert!(!may_come("fd00::7", "::ffff:10.244.1.7"));
    }

    #[test]
    fn only_everybody_is_asked_without_an_address() {
        for (destination, may) in [
            ("255.255.255.255", true),
            ("224.0.0.22", true),
            ("10.244.1.7", false),
            ("10.244.1.255", false),
        ] {
            assert_eq!(may_come("0.0.0.0", destination), may, "{destination}");
        }
        assert!(may_come("::", "ff02::1:ff00:7"));
        assert!(!may_come("::", "fd00::7"));
    }

    #[test]
    fn all_others_may_come() {
        for source in [
            "1.1.1.1",
            "10.0.0.1",
            "240.0.0.1",
            "255.255.255.254",
            "169.254.1.1",
        ] {
            assert!(may_come(source, "10.244.1.7"), "{source}");
        }
        for source in ["fe80::1", "2001:db8::1", "::2", "::10.0.0.1", "64:ff9b::1"] {
            assert!(may_come(source, "fd00::7"), "{source}");
        }
    }

    #[test]
    fn only_link_local_addresses_belong_to_a_device() {
        let of = |text: &str| {
            let address: IpAddr = text.parse().expect(text);
            OwnPrefix::of_source(address.into(), 7).ifindex
        };
        assert_eq!(of("fe80::1"), 7);
        for text in ["fd00::1", "169.254.1.1", "10.0.0.1"] {
            assert_eq!(of(text), 0, "{text}");
        }
    }
}
