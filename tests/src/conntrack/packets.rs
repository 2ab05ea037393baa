//! Builds IP packets, byte by byte, for the protocols that conntrack distinguishes.

use std::net::IpAddr;

use crate::packet::{Ipv4, Ipv6, Tcp, checksum, echo, transport_checksum};

/// IP protocol number of UDP.
pub const IP_PROTOCOL_UDP: u8 = 17;
/// IP protocol number of SCTP.
pub const IP_PROTOCOL_SCTP: u8 = 132;
/// IP protocol number of UDP-Lite.
pub const IP_PROTOCOL_UDPLITE: u8 = 136;
/// Next-header value of the IPv6 fragment header.
const FRAGMENT: u8 = 44;
/// IPv4 flags: don't fragment, more fragments.
const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;

/// Source and destination.
pub type Hosts = (IpAddr, IpAddr);

/// Builds an IP packet between two hosts.
///
/// # Panics
/// If the hosts have different IP versions.
pub fn packet(hosts: Hosts, protocol: u8, content: &[u8]) -> Vec<u8> {
    part(hosts, protocol, content, None)
}

/// Like [`packet`], but `fragment` makes it a fragment: identification, offset in bytes, and whether more fragments
/// follow.
fn part(
    hosts: Hosts,
    protocol: u8,
    content: &[u8],
    fragment: Option<(u16, usize, bool)>,
) -> Vec<u8> {
    match hosts {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let (id, bits) = match fragment {
                Some((id, at, more)) => {
                    let more = if more { MORE_FRAGMENTS } else { 0 };
                    (id, (at / 8) as u16 | more)
                }
                None => (0, DONT_FRAGMENT),
            };
            let ip = Ipv4 {
                protocol,
                id,
                fragment: bits,
                ..Ipv4::icmp(source, destination)
            };
            ip.packet(content)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: if fragment.is_some() {
                    FRAGMENT
                } else {
                    protocol
                },
                ..Ipv6::icmp(source, destination)
            };
            let header = fragment.map(|(id, at, more)| {
                let bits = at as u16 | u16::from(more);
                [
                    &[protocol, 0][..],
                    &bits.to_be_bytes(),
                    &u32::from(id).to_be_bytes(),
                ]
                .concat()
            });
            ip.packet(&[&header.unwrap_or_default(), content].concat())
        }
        _ => panic!("{hosts:?} are of two IP versions"),
    }
}

/// Splits the content into fragments of `size` bytes each. `size` must be a multiple of eight.
pub fn fragments(hosts: Hosts, protocol: u8, content: &[u8], id: u16, size: usize) -> Vec<Vec<u8>> {
    let last = content.len().div_ceil(size) - 1;
    content
        .chunks(size)
        .enumerate()
        .map(|(index, chunk)| {
            let fragment = (id, index * size, index < last);
            part(hosts, protocol, chunk, Some(fragment))
        })
        .collect()
}

/// Builds a TCP segment with this window.
pub fn tcp(hosts: Hosts, segment: &Tcp, window: u16) -> Vec<u8> {
    let mut bytes = segment.segment(hosts.0, hosts.1);
    bytes[14..16].copy_from_slice(&window.to_be_bytes());
    bytes[16..18].fill(0);
    let check = transport_checksum(hosts.0, hosts.1, 6, &bytes);
    bytes[16..18].copy_from_slice(&check.to_be_bytes());
    bytes
}

/// Builds a UDP datagram.
pub fn udp(hosts: Hosts, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let len = (8 + data.len()) as u16;
    datagram(hosts, IP_PROTOCOL_UDP, ports, len, data)
}

/// Builds a UDP-Lite datagram whose checksum covers all of it (RFC 3828).
pub fn udplite(hosts: Hosts, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let len = (8 + data.len()) as u16;
    datagram(hosts, IP_PROTOCOL_UDPLITE, ports, len, data)
}

fn datagram(hosts: Hosts, protocol: u8, ports: (u16, u16), len: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = [ports.0, ports.1, len, 0].map(u16::to_be_bytes).concat();
    bytes.extend(data);
    let check = transport_checksum(hosts.0, hosts.1, protocol, &bytes);
    bytes[6..8].copy_from_slice(&check.to_be_bytes());
    bytes
}

/// Builds an SCTP packet with one chunk (RFC 9260 section 3).
pub fn sctp(ports: (u16, u16), tag: u32, chunk: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = [ports.0, ports.1].map(u16::to_be_bytes).concat();
    bytes.extend(tag.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend([chunk, 0]);
    bytes.extend(((4 + value.len()) as u16).to_be_bytes());
    bytes.extend(value);
    let check = crc32c(&bytes);
    bytes[8..12].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// Computes CRC32c as in RFC 9260 appendix A.
fn crc32c(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    });
    !crc
}

/// Fills in the checksum of an ICMP or ICMPv6 message.
pub fn icmp(hosts: Hosts, mut message: Vec<u8>) -> Vec<u8> {
    message[2..4].fill(0);
    let check = match hosts.0 {
        IpAddr::V4(_) => checksum(&[&message]),
        IpAddr::V6(_) => transport_checksum(hosts.0, hosts.1, 58, &message),
    };
    message[2..4].copy_from_slice(&check.to_be_bytes());
    message
}

/// IP protocol number of ICMP or ICMPv6.
pub fn icmp_protocol(hosts: Hosts) -> u8 {
    if hosts.0.is_ipv4() { 1 } else { 58 }
}

/// Builds an echo request or reply.
pub fn echo_message(hosts: Hosts, is_reply: bool, id: u16, data: &[u8]) -> Vec<u8> {
    let kind = match (hosts.0.is_ipv4(), is_reply) {
        (true, false) => 8,
        (true, true) => 0,
        (false, false) => 128,
        (false, true) => 129,
    };
    icmp(hosts, echo(kind, 0, id, 1, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_sctp_is_the_known_one() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn fragments_hold_all() {
        let hosts = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let content: Vec<u8> = (0..100).collect();
        let parts = fragments(hosts, 17, &content, 7, 48);
        let all: Vec<u8> = parts.iter().flat_map(|part| part[20..].to_vec()).collect();
        assert_eq!(all, content);
        assert_eq!(parts[0][6..8], [0x20, 0]);
        assert_eq!(parts[1][6..8], [0x20, 6]);
        assert_eq!(parts[2][6..8], [0, 12]);
    }
}
