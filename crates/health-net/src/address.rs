//! Scopes of addresses.

use std::net::IpAddr;

/// Whether an address is valid on one link only (RFC 3927, RFC 4291 section 2.5.6).
pub const fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Whether other hosts can reach this address of the host without naming a device.
pub const fn is_for_others(address: &IpAddr) -> bool {
    !address.is_loopback() && !is_link_local(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_reach_neither_a_loopback_nor_an_address_of_one_link() {
        for (text, expected) in [
            ("192.0.2.1", true),
            ("2001:db8::1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("::1", false),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("febf::1", false),
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(is_for_others(&address), expected, "{text}");
        }
    }
}
