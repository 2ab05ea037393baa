//! Builds packets byte by byte. Shares no code with the code under test.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// EtherType of IPv4.
pub const IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const IPV6: u16 = 0x86dd;
/// EtherType of ARP.
pub const ARP: u16 = 0x0806;

/// Computes the checksum of a transport header and its payload, including the pseudo-header of the IP version.
pub fn transport_checksum(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    content: &[u8],
) -> u16 {
    let octets = |address| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    checksum(&[
        &octets(source),
        &octets(destination),
        &(content.len() as u32).to_be_bytes(),
        &[0, 0, 0, protocol],
        content,
    ])
}

/// Computes the Internet checksum of RFC 1071 over the concatenated parts.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes: Vec<u8> = parts.concat();
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Builds an ARP packet from the operation and the hardware and protocol addresses of sender and target (RFC 826).
pub fn arp(operation: u16, sender: ([u8; 6], Ipv4Addr), target: ([u8; 6], Ipv4Addr)) -> Vec<u8> {
    let mut bytes = vec![0, 1, 8, 0, 6, 4];
    bytes.extend(operation.to_be_bytes());
    bytes.extend(sender.0);
    bytes.extend(sender.1.octets());
    bytes.extend(target.0);
    bytes.extend(target.1.octets());
    bytes
}

/// Builds an Ethernet frame.
pub fn ethernet(destination: [u8; 6], source: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&destination[..], &source, &ethertype.to_be_bytes(), payload].concat()
}

/// An IPv4 packet to build.
#[derive(Clone, Debug)]
pub struct Ipv4 {
    /// Type of service.
    pub tos: u8,
    /// Identification.
    pub id: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol.
    pub protocol: u8,
    /// Source.
    pub source: Ipv4Addr,
    /// Destination.
    pub destination: Ipv4Addr,
    /// Options, a multiple of four bytes.
    pub options: Vec<u8>,
}

impl Ipv4 {
    /// An ICMP packet from `source` to `destination` with the header that `ping` normally sends.
    pub fn icmp(source: Ipv4Addr, destination: Ipv4Addr) -> Self {
        Self {
            tos: 0,
            id: 0,
            fragment: 0x4000,
            ttl: 64,
            protocol: 1,
            source,
            destination,
            options: Vec::new(),
        }
    }

    /// Builds the packet from header and payload, with the checksum filled in.
    pub fn packet(&self, payload: &[u8]) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let mut header = vec![0x40 | (header_len / 4) as u8, self.tos];
        header.extend(((header_len + payload.len()) as u16).to_be_bytes());
        header.extend(self.id.to_be_bytes());
        header.extend(self.fragment.to_be_bytes());
        header.extend([self.ttl, self.protocol, 0, 0]);
        header.extend(self.source.octets());
        header.extend(self.destination.octets());
        header.extend(&self.options);
        let check = checksum(&[&header]);
        header[10..12].copy_from_slice(&check.to_be_bytes());
        header.extend(payload);
        header
    }
}

/// An IPv6 packet to build.
#[derive(Clone, Debug)]
pub struct Ipv6 {
    /// Traffic class.
    pub class: u8,
    /// Flow label.
    pub flow: u32,
    /// Type of the next header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub source: Ipv6Addr,
    /// Destination.
    pub destination: Ipv6Addr,
}

impl Ipv6 {
    /// An ICMPv6 packet from `source` to `destination`.
    pub fn icmp(source: Ipv6Addr, destination: Ipv6Addr) -> Self {
        Self {
            class: 0,
            flow: 0,
            next_header: 58,
            hop_limit: 64,
            source,
            destination,
        }
    }

    /// Builds the packet from header and payload.
    pub fn packet(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = (6 << 28 | u32::from(self.class) << 20 | self.flow)
            .to_be_bytes()
            .to_vec();
        bytes.extend((payload.len() as u16).to_be_bytes());
        bytes.extend([self.next_header, self.hop_limit]);
        bytes.extend(self.source.octets());
        bytes.extend(self.destination.octets());
        bytes.extend(payload);
        bytes
    }

    /// Fills in the checksum of an ICMPv6 message.
    pub fn with_checksum(&self, mut message: Vec<u8>) -> Vec<u8> {
        message[2..4].fill(0);
        let check = transport_checksum(self.source.into(), self.destination.into(), 58, &message);
        message[2..4].copy_from_slice(&check.to_be_bytes());
        message
    }
}

/// A TCP segment to build.
#[derive(Clone, Debug, Default)]
pub struct Tcp {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// FIN 1, SYN 2, RST 4, ACK 16.
    pub flags: u8,
    /// Options, a multiple of four bytes, 40 at most.
    pub options: Vec<u8>,
    /// Data.
    pub data: Vec<u8>,
}

impl Tcp {
    /// A segment with these ports, source first, and these flags, without options or data.
    pub fn between(ports: (u16, u16), flags: u8) -> Self {
        Self {
            source: ports.0,
            destination: ports.1,
            flags,
            ..Self::default()
        }
    }

    /// Builds the segment, with the checksum filled in.
    pub fn segment(&self, source: IpAddr, destination: IpAddr) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let mut segment = self.source.to_be_bytes().to_vec();
        segment.extend(self.destination.to_be_bytes());
        segment.extend(self.sequence.to_be_bytes());
        segment.extend(self.acknowledgement.to_be_bytes());
        segment.extend([
            ((header_len / 4) << 4) as u8,
            self.flags,
            0xff,
            0xff,
            0,
            0,
            0,
            0,
        ]);
        segment.extend(&self.options);
        segment.extend(&self.data);
        let check = transport_checksum(source, destination, 6, &segment);
        segment[16..18].copy_from_slice(&check.to_be_bytes());
        segment
    }

    /// Builds an Ethernet frame with the segment in an IP packet.
    pub fn frame(&self, source: IpAddr, destination: IpAddr) -> Vec<u8> {
        let segment = self.segment(source, destination);
        let (ethertype, packet) = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip = Ipv4 {
                    protocol: 6,
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, ip.packet(&segment))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let ip = Ipv6 {
                    next_header: 6,
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, ip.packet(&segment))
            }
            _ => panic!("{source} and {destination} are of two IP versions"),
        };
        ethernet([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], ethertype, &packet)
    }
}

/// The options that most segments carry: two NOPs and the timestamps.
pub fn timestamps(value: u32, echo: u32) -> Vec<u8> {
    let mut options = vec![1, 1, 8, 10];
    options.extend(value.to_be_bytes());
    options.extend(echo.to_be_bytes());
    options
}

/// Builds an ICMP message without its checksum, from type, code, identifier, sequence number and payload.
pub fn echo(kind: u8, code: u8, id: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(id.to_be_bytes());
    message.extend(sequence.to_be_bytes());
    message.extend(payload);
    message
}

/// Like [`echo`], for IPv4 and with the checksum filled in.
pub fn echo4(kind: u8, code: u8, id: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
    let mut message = echo(kind, code, id, sequence, payload);
    let check = checksum(&[&message]);
    message[2..4].copy_from_slice(&check.to_be_bytes());
    message
}

/// Generates a payload in which neighbouring bytes differ.
pub fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

/// The payload of an agent's echo probe.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// The mesh's key.
    pub key: [u64; 2],
    /// ICMP identifier.
    pub id: u16,
    /// ICMP sequence number.
    pub sequence: u16,
    /// The agent's session.
    pub session: u32,
    /// Number of times that the session's sequence numbers have wrapped.
    pub round: u16,
    /// Path: 1 for the host, 2 for the endpoint.
    pub path: u8,
    /// Flags. 1: asks for the arrival time.
    pub flags: u8,
    /// Turnaround time in the responding host, or the arrival time there.
    pub turnround: u64,
    /// Wall-clock time of the arrival.
    pub arrived: u64,
}

impl Probe {
    /// The payload on the wire.
    pub fn payload(&self) -> Vec<u8> {
        let mut named = self.id.to_be_bytes().to_vec();
        named.extend(self.sequence.to_be_bytes());
        named.extend(self.session.to_be_bytes());
        named.extend(self.round.to_be_bytes());
        named.extend([self.path, self.flags]);
        [
            b"hlt\x02",
            &self.session.to_be_bytes()[..],
            &siphash(self.key, &named).to_le_bytes(),
            &self.round.to_be_bytes(),
            &[self.path, self.flags, 0, 0, 0, 0],
            &self.turnround.to_be_bytes(),
            &self.arrived.to_be_bytes(),
        ]
        .concat()
    }

    /// The request or reply as an ICMP message for IPv4.
    pub fn message4(&self, kind: u8) -> Vec<u8> {
        echo4(kind, 0, self.id, self.sequence, &self.payload())
    }

    /// The request or reply as an ICMPv6 message for a packet with this header.
    pub fn message6(&self, kind: u8, ip: &Ipv6) -> Vec<u8> {
        ip.with_checksum(echo(kind, 0, self.id, self.sequence, &self.payload()))
    }
}

/// SipHash-2-4, from the standard library.
#[allow(deprecated, reason = "its successor is not SipHash-2-4")]
pub fn siphash(key: [u64; 2], bytes: &[u8]) -> u64 {
    use std::hash::{Hasher as _, SipHasher};
    let mut hasher = SipHasher::new_with_keys(key[0], key[1]);
    hasher.write(bytes);
    hasher.finish()
}

/// The frame with VLAN tags after its addresses, outermost first: EtherType and VLAN per tag.
pub fn tagged(frame: &[u8], tags: &[(u16, u16)]) -> Vec<u8> {
    let tags: Vec<u8> = tags
        .iter()
        .flat_map(|(ethertype, vlan)| [ethertype.to_be_bytes(), vlan.to_be_bytes()].concat())
        .collect();
    [&frame[..12], &tags, &frame[12..]].concat()
}
