//! Parsing of addresses and networks. All parts of the agent use these functions, so a string means the same thing
//! everywhere: in settings, manifests, registries, policies, API requests and command arguments.
//!
//! | string | means | as |
//! | --- | --- | --- |
//! | `::ffff:192.0.2.1` | 192.0.2.1 | RFC 4291, 2.5.5.2: an IPv4 address in IPv6 form |
//! | `::ffff:203.0.113.0/120` | 203.0.113.0/24 | the same for networks |
//! | `010.244.1.5`, `10.0.0.0/08` | 10.244.1.5, 10.0.0.0/8 | decimal: Kubernetes' `ParseIPSloppy`, `ParseCIDRSloppy` |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;

/// Number of bits before the IPv4 address in an IPv4-mapped IPv6 address.
const MAPPED_BITS: u8 = 96;
/// Maximum number of digits in an IPv6 address group, not counting extra leading zeros.
const GROUP_DIGITS: usize = 4;

/// Why a string is not an address or network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not an address.
    #[error("must be an IP address, such as 10.9.8.7 or 2001:db8::7")]
    NoAddress,
    /// Not a network.
    #[error("must be a network, such as 10.0.0.0/8 or fd00::/8")]
    NoNetwork,
    /// Not an address with a port.
    #[error("must be an address with a port, such as 10.9.8.7:80 or [2001:db8::7]:80")]
    NoSocketAddress,
    /// An IPv4 address in IPv6 form with so short a prefix that the network would contain all IPv4 addresses and more.
    #[error("an IPv4-mapped IPv6 address needs a prefix of at least 96 bits")]
    ShortMapped,
}

/// Parses an address.
pub fn parse_ip(text: &str) -> Result<IpAddr, AddressError> {
    written_ip(text)
        .map(|ip| ip.to_canonical())
        .ok_or(AddressError::NoAddress)
}

/// Parses an address with a prefix length. Host bits are kept.
pub fn parse_network(text: &str) -> Result<IpNet, AddressError> {
    const NO: AddressError = AddressError::NoNetwork;
    let (address, bits) = text.split_once('/').ok_or(NO)?;
    let written = written_ip(address).ok_or(NO)?;
    let bits: u8 = decimal(bits).ok_or(NO)?;
    let network = IpNet::new(written, bits).map_err(|_| NO)?;
    let canonical = written.to_canonical();
    if canonical == written {
        return Ok(network);
    }
    let bits = bits.checked_sub(MAPPED_BITS);
    let bits = bits.ok_or(AddressError::ShortMapped)?;
    IpNet::new(canonical, bits).map_err(|_| NO)
}

/// Parses a network. A bare address means the network that contains only that address.
pub fn parse_network_or_ip(text: &str) -> Result<IpNet, AddressError> {
    if text.contains('/') {
        return parse_network(text);
    }
    let ip = parse_ip(text).map_err(|_| AddressError::NoNetwork)?;
    Ok(ip.into())
}

/// Parses an address with a port: `ADDRESS:PORT`, with IPv6 addresses in brackets.
pub fn parse_socket_address(text: &str) -> Result<SocketAddr, AddressError> {
    const NO: AddressError = AddressError::NoSocketAddress;
    let (host, port) = text.rsplit_once(':').ok_or(NO)?;
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let ip = match bare {
        Some(bare) => written_ip(bare).filter(IpAddr::is_ipv6),
        None => written_ip(host).filter(IpAddr::is_ipv4),
    };
    let ip = ip.ok_or(NO)?.to_canonical();
    let port = decimal(port).ok_or(NO)?;
    Ok(SocketAddr::new(ip, port))
}

/// Parses an address and keeps the form in which it is written.
fn written_ip(text: &str) -> Option<IpAddr> {
    if !text.contains(':') {
        return written_v4(text).map(IpAddr::V4);
    }
    let mut groups: Vec<String> = Vec::new();
    for group in text.split(':') {
        let is_hex = group.bytes().all(|byte| byte.is_ascii_hexdigit());
        groups.push(if group.contains('.') {
            written_v4(group)?.to_string()
        } else if group.len() > GROUP_DIGITS && is_hex {
            let short = group.trim_start_matches('0');
            if short.is_empty() { "0" } else { short }.to_owned()
        } else {
            group.to_owned()
        });
    }
    let v6: Ipv6Addr = groups.join(":").parse().ok()?;
    Some(v6.into())
}

fn written_v4(text: &str) -> Option<Ipv4Addr> {
    let mut numbers = text.split('.');
    let mut octets = [0; 4];
    for octet in &mut octets {
        *octet = decimal(numbers.next()?)?;
    }
    numbers.next().is_none().then(|| octets.into())
}

/// Parses a number that consists of decimal digits only; leading zeros are allowed.
fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn leading_zeros_are_decimal_and_ipv4_in_ipv6_form_is_ipv4() {
        // Same cases as in the tests of the parser that the API server uses.
        for (text, expected) in [
            ("127.0.1.2", "127.0.1.2"),
            ("127.001.002.003", "127.1.2.3"),
            ("127.010.020.030", "127.10.20.30"),
            ("010.244.1.5", "10.244.1.5"),
            ("0000010.0.0.0255", "10.0.0.255"),
            ("::ffff:127.1.2.3", "127.1.2.3"),
            ("::ffff:127.001.002.003", "127.1.2.3"),
            ("::FFFF:7f01:0203", "127.1.2.3"),
            ("0:0:0:0:000000:ffff:127.1.2.3", "127.1.2.3"),
            ("::1.2.3.4", "::102:304"),
            ("2001:4860:0000:2001::0068", "2001:4860:0:2001::68"),
            ("::", "::"),
            ("000000::1", "::1"),
        ] {
            let address = parse_ip(text).map(|ip| ip.to_string());
            assert_eq!(address, Ok(expected.to_owned()), "{text}");
        }
        for bad in [
            "",
            "abc",
            "123:",
            "127.0.0.256",
            "-0.0.0.0",
            "0.0.0.-3",
            "+1.0.0.0",
            "1.2.3",
            "1.2.3.4.5",
            "1..2.3",
            "0x7f.0.0.1",
            "127.1",
            "fe80::1%lo",
            "10.0.0.1 ",
            " 10.0.0.1",
            "10.0.0.0/8",
            "::ffff:256.0.0.1",
            "1.2.3.4:",
            "1:2:3:4:5:6:7:8:9",
            "10000::",
            "1.2.3.4::",
            ":::",
            "\u{0661}.0.0.1",
        ] {
            assert_eq!(parse_ip(bad), Err(AddressError::NoAddress), "{bad:?}");
        }
    }

    #[test]
    fn networks_keep_their_bits_and_those_in_ipv6_form_are_ipv4() {
        for (text, expected) in [
            ("10.1.2.3/8", "10.1.2.3/8"),
            ("010.0.0.0/08", "10.0.0.0/8"),
            ("fd00::1/64", "fd00::1/64"),
            ("::ffff:203.0.113.0/120", "203.0.113.0/24"),
            ("::ffff:cb00:7100/120", "203.0.113.0/24"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::ffff:192.0.2.1/128", "192.0.2.1/32"),
            ("::/0", "::/0"),
        ] {
            let network = parse_network(text).map(|network| network.to_string());
            assert_eq!(network, Ok(expected.to_owned()), "{text}");
        }
        for bad in [
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "fd00::/129",
            "/8",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "a/8",
            "10.0.0.0/8/8",
        ] {
            assert_eq!(parse_network(bad), Err(AddressError::NoNetwork), "{bad:?}");
        }
        for short in ["::ffff:10.0.0.0/95", "::ffff:10.0.0.0/8"] {
            assert_eq!(parse_network(short), Err(AddressError::ShortMapped));
        }
        let alone = parse_network_or_ip("::ffff:192.0.2.01").map(|network| network.to_string());
        assert_eq!(alone, Ok("192.0.2.1/32".to_owned()));
        assert_eq!(parse_network_or_ip("host"), Err(AddressError::NoNetwork));
    }

    #[test]
    fn addresses_with_a_port_are_read_the_same_way() {
        for (text, expected) in [
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("127.000.0.01:080", "127.0.0.1:80"),
            ("[::1]:9962", "[::1]:9962"),
            ("[::ffff:10.0.0.1]:53", "10.0.0.1:53"),
        ] {
            let address = parse_socket_address(text).map(|address| address.to_string());
            assert_eq!(address, Ok(expected.to_owned()), "{text}");
        }
        for bad in [
            "",
            "80",
            ":80",
            "127.0.0.1",
            "::1:80",
            "[127.0.0.1]:80",
            "[::1]",
            "1.2.3.4:65536",
            "1.2.3.4:+1",
        ] {
            assert_eq!(
                parse_socket_address(bad),
                Err(AddressError::NoSocketAddress),
                "{bad:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn what_the_standard_library_reads_means_the_same(bits in any::<u128>(), v4 in any::<u32>(), prefix in 0_u8..=128) {
            let addresses: [IpAddr; 3] = [
                Ipv4Addr::from_bits(v4).into(),
                Ipv6Addr::from_bits(bits).into(),
                Ipv4Addr::from_bits(v4).to_ipv6_mapped().into(),
            ];
            for address in addresses {
                prop_assert_eq!(parse_ip(&address.to_string()), Ok(address.to_canonical()));
                let Ok(network) = IpNet::new(address, prefix) else { continue };
                let read = parse_network(&network.to_string());
                if address.to_canonical() == address {
                    prop_assert_eq!(read, Ok(network));
                } else {
                    let v4 = prefix.checked_sub(MAPPED_BITS);
                    let v4 = v4.and_then(|bits| IpNet::new(address.to_canonical(), bits).ok());
                    prop_assert_eq!(read.ok(), v4);
                }
            }
        }

        #[test]
        fn no_text_is_read_otherwise_than_by_the_standard_library(text in "[0-9a-f:./]{0,24}") {
            if let Ok(ip) = text.parse::<IpAddr>() {
                prop_assert_eq!(parse_ip(&text), Ok(ip.to_canonical()));
            }
            if let Ok(ip) = parse_ip(&text) {
                prop_assert_eq!(parse_ip(&ip.to_string()), Ok(ip));
            }
        }
    }
}
