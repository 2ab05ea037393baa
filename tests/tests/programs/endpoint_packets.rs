//! Packets between an endpoint and its peers, for tests of the endpoint's programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, ethernet, payload};

pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
pub(crate) const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 9);
pub(crate) const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 9);

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const GRE: u8 = 47;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const SCTP: u8 = 132;

pub(crate) const MORE_FRAGMENTS: u16 = 0x2000;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Sent by the endpoint.
    Out,
    /// Received by the endpoint.
    In,
}
use Way::{In, Out};

impl Way {
    /// The program that sees the packet.
    pub(crate) fn program(self) -> &'static str {
        match self {
            In => "to_endpoint",
            Out => "from_endpoint",
        }
    }

    pub(crate) fn back(self) -> Self {
        match self {
            In => Out,
            Out => In,
        }
    }
}

/// The source and destination address of a packet between the endpoint and its peer.
pub(crate) fn hosts(way: Way, peer: IpAddr) -> (IpAddr, IpAddr) {
    let endpoint: IpAddr = match peer {
        IpAddr::V4(_) => ENDPOINT4.into(),
        IpAddr::V6(_) => ENDPOINT6.into(),
    };
    match way {
        Out => (endpoint, peer),
        In => (peer, endpoint),
    }
}

/// An IP packet in an Ethernet frame.
pub(crate) fn framed(way: Way, packet: &[u8]) -> Vec<u8> {
    let (to, from) = match way {
        Out => (HOST_MAC, MAC),
        In => (MAC, HOST_MAC),
    };
    let ethertype = if packet[0] >> 4 == 4 { IPV4 } else { IPV6 };
    ethernet(to, from, ethertype, packet)
}

/// An IP packet between the endpoint and its peer.
pub(crate) fn packet(way: Way, peer: IpAddr, protocol: u8, content: &[u8]) -> Vec<u8> {
    match hosts(way, peer) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                protocol,
                ..Ipv4::icmp(source, destination)
            };
            ip.packet(content)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: protocol,
                ..Ipv6::icmp(source, destination)
            };
            ip.packet(content)
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// An IP packet between the endpoint and its peer, in an Ethernet frame.
pub(crate) fn frame(way: Way, peer: IpAddr, protocol: u8, content: &[u8]) -> Vec<u8> {
    framed(way, &packet(way, peer, protocol, content))
}

/// The ports of a transport header, followed by data.
pub(crate) fn with_ports(source: u16, destination: u16) -> Vec<u8> {
    let mut bytes = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    bytes.extend(payload(36));
    bytes
}

/// A TCP segment in an Ethernet frame.
pub(crate) fn segment(way: Way, peer: IpAddr, ports: (u16, u16), flags: u8) -> Vec<u8> {
    let (source, destination) = hosts(way, peer);
    Tcp::between(ports, flags).frame(source, destination)
}
