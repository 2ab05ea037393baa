//! Constant prefixes.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub(crate) const fn v4(octets: [u8; 4], len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from_octets(octets), len))
}

pub(crate) const fn v6(segments: [u16; 8], len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from_segments(segments), len))
}
