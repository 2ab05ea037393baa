//! Builds IP packets with the sender's own and other addresses, and with options, extension headers, fragments, tunnels
//! and errors.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::maker::{Content, Maker};
use crate::packet::{IPV4, IPV6, Ipv4, Ipv6, checksum, ethernet, transport_checksum};

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// Ports for all flows: few, so that frames hit existing flows.
const PORTS: [u16; 10] = [53, 67, 80, 443, 547, 4240, 4789, 5353, 6081, 40_000];
/// Unspecified, loopback, link-local, broadcast, multicast and similar addresses.
const ODD4: [[u8; 4]; 13] = [
    [0, 0, 0, 0],
    [0, 0, 0, 1],
    [127, 0, 0, 1],
    [127, 1, 2, 3],
    [255, 255, 255, 255],
    [10, 244, 1, 255],
    [10, 244, 1, 0],
    [172, 30, 0, 255],
    [169, 254, 169, 254],
    [224, 0, 0, 1],
    [224, 0, 0, 251],
    [239, 1, 2, 3],
    [240, 0, 0, 1],
];
const ODD6: [&str; 16] = [
    "::",
    "::1",
    "::ffff:172.30.0.1",
    "::ffff:127.0.0.1",
    "64:ff9b::ac1e:1",
    "2002:ac1e:1::1",
    "fe80::1",
    "fe80::",
    "fec0::1",
    "ff01::1",
    "ff02::1",
    "ff02::2",
    "ff02::16",
    "ff02::fb",
    "ff05::2",
    "ff0e::1",
];

impl Maker<'_> {
    /// Builds an IP packet of a random protocol.
    pub(super) fn packet(&mut self) -> Content {
        let is_v4 = self.rng.bool();
        let ends = self.ends(is_v4);
        let (protocol, content) = self.content(ends, 0);
        self.wrapped(ends, protocol, &content)
            .unwrap_or((IPV4, Vec::new()))
    }

    /// Picks source and destination addresses.
    pub(super) fn ends(&mut self, is_v4: bool) -> (IpAddr, IpAddr) {
        let scene = self.scene;
        let of = |party: &super::Party| -> IpAddr {
            if is_v4 {
                party.v4.into()
            } else {
                party.v6.into()
            }
        };
        let other = of(&self.pick(&scene.others));
        let source = match self.rng.u8(0..20) {
            0..15 => of(&scene.own),
            15 => other,
            16 if !is_v4 => scene.own.link.into(),
            16 | 17 => of(&scene.peer),
            _ => self.odd(is_v4),
        };
        let other = of(&self.pick(&scene.others));
        let destination = match self.rng.u8(0..20) {
            0..5 => of(&scene.others[0]),
            5..8 => other,
            8..12 => of(&scene.peer),
            12 | 13 if is_v4 => scene.gateway.0.into(),
            12 | 13 => scene.gateway.1.into(),
            14 => of(&scene.own),
            15 if !is_v4 => scene.peer.link.into(),
            _ => self.odd(is_v4),
        };
        (source, destination)
    }

    /// Picks an address that no host in the scene should have.
    fn odd(&mut self, is_v4: bool) -> IpAddr {
        if self.one_in(3) {
            return if is_v4 {
                Ipv4Addr::new(198, 51, 100, self.rng.u8(..)).into()
            } else {
                Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, self.rng.u16(..)).into()
            };
        }
        if is_v4 {
            Ipv4Addr::from(self.pick(&ODD4)).into()
        } else {
            let text = self.pick(&ODD6);
            text.parse().unwrap_or(IpAddr::from(Ipv6Addr::UNSPECIFIED))
        }
    }

    /// Builds a TCP or UDP header, except for checksum and length.
    pub(super) fn ports(&mut self, protocol: u8) -> Vec<u8> {
        let port = |maker: &mut Self| maker.pick(&PORTS).to_be_bytes();
        let mut header = [port(self), port(self)].concat();
        if protocol == TCP {
            let flags = self.pick(&[2, 0x12, 0x10, 0x18, 0x11, 4, 0x14, 0, 0xff]);
            header.extend(self.rng.u32(..).to_be_bytes());
            header.extend(self.rng.u32(..).to_be_bytes());
            header.extend([0x50, flags, 0x20, 0, 0, 0, 0, 0]);
        } else {
            header.extend([0; 4]);
        }
        header
    }

    /// Picks the protocol and builds the content of a packet, including its checksum.
    fn content(&mut self, ends: (IpAddr, IpAddr), depth: u8) -> (u8, Vec<u8>) {
        let icmp = if ends.0.is_ipv4() { ICMP } else { ICMPV6 };
        let kind = self.rng.u8(0..if depth == 0 { 20 } else { 9 });
        let (protocol, mut content) = match kind {
            0..4 => (UDP, self.ports(UDP)),
            4..7 => (TCP, self.ports(TCP)),
            7 | 8 => {
                // Echoes and all other types.
                let kind = match self.rng.u8(0..4) {
                    0 if icmp == ICMP => self.pick(&[0, 8]),
                    0 => self.pick(&[128, 129]),
                    _ => self.rng.u8(..),
                };
                let code = if self.one_in(4) { self.rng.u8(..) } else { 0 };
                let id = self.pick(&PORTS).to_be_bytes();
                (icmp, vec![kind, code, 0, 0, id[0], id[1], 0, 1])
            }
            9..12 => (icmp, self.error(ends)),
            12 => {
                // An IPv4 or IPv6 packet in an IP tunnel, sometimes with the wrong protocol number.
                let (ethertype, inner) = self.inner();
                let right = if ethertype == IPV4 { 4 } else { 41 };
                let protocol = if self.one_in(4) {
                    self.pick(&[4, 41, 94, 137])
                } else {
                    right
                };
                (protocol, inner)
            }
            13 => {
                let (ethertype, inner) = self.inner();
                (47, [&[0, 0][..], &ethertype.to_be_bytes(), &inner].concat())
            }
            14 => {
                // VXLAN (RFC 7348) or Geneve.
                let (ethertype, inner) = self.inner();
                let frame = ethernet([0xff; 6], self.scene.own.mac, ethertype, &inner);
                let port: u16 = self.pick(&[4789, 8472, 6081]);
                let ports = [40_000_u16.to_be_bytes(), port.to_be_bytes()].concat();
                (
                    UDP,
                    [&ports[..], &[0; 4], &[8, 0, 0, 0, 0, 0, 7, 0], &frame].concat(),
                )
            }
            15 => (132, [&self.ports(UDP)[..4], &[0; 8]].concat()),
            16 => {
                // An authentication header before another header, or an ESP packet.
                let inner = self.ports(UDP);
                let header = [UDP, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1];
                if self.rng.bool() {
                    (51, [&header[..], &inner].concat())
                } else {
                    (50, inner)
                }
            }
            17 => {
                // Multicast management, routing or gateway redundancy.
                let protocol = self.pick(&[2, 89, 103, 112, 88, 9]);
                let kind = self.pick(&[0x11, 0x16, 0x17, 0x22, 0x21]);
                (protocol, vec![kind, 0, 0, 0, 224, 0, 0, 251])
            }
            _ => (self.rng.u8(..), self.rng.u64(..).to_be_bytes().into()),
        };
        let room: usize = self.pick(&[0, 0, 0, 1, 40, 400, 1300, 1452]);
        content.resize(content.len() + room, 0x5a);
        if !self.one_in(40) {
            content.extend(self.marker);
        }
        if protocol == UDP && content.len() >= 8 {
            let len = (content.len() as u16).to_be_bytes();
            content[4..6].copy_from_slice(&len);
        }
        if !self.one_in(10) {
            seal(protocol, ends, &mut content);
        }
        (protocol, content)
    }

    /// Builds a packet for a tunnel: from the sender or other hosts, to any host, which might trust the tunnel.
    pub(super) fn inner(&mut self) -> Content {
        let is_v4 = self.rng.bool();
        let ends = self.ends(is_v4);
        let (protocol, content) = self.content(ends, 1);
        self.plain(ends, protocol, &content)
    }

    /// Builds an ICMP error without its checksum, about a packet in the other direction or between other hosts.
    fn error(&mut self, ends: (IpAddr, IpAddr)) -> Vec<u8> {
        let is_v4 = ends.0.is_ipv4();
        let (kind, code) = if is_v4 {
            (self.pick(&[3, 3, 11, 12, 4, 5]), self.rng.u8(0..16))
        } else {
            (self.pick(&[1, 2, 3, 4]), self.rng.u8(0..8))
        };
        let quoted = match self.rng.u8(0..4) {
            0 => self.ends(is_v4),
            1 => ends,
            _ => (ends.1, ends.0),
        };
        let protocol = self.pick(&[UDP, UDP, TCP, if is_v4 { ICMP } else { ICMPV6 }]);
        let content = if protocol == UDP || protocol == TCP {
            self.ports(protocol)
        } else {
            vec![if is_v4 { 8 } else { 128 }, 0, 0, 0, 0, 53, 0, 1]
        };
        let (_, packet) = self.plain(quoted, protocol, &content);
        let rest: u32 = self.pick(&[0, 576, 1280, 68]);
        [&[kind, code, 0, 0][..], &rest.to_be_bytes(), &packet].concat()
    }

    /// Builds a packet without options or extension headers.
    fn plain(&mut self, ends: (IpAddr, IpAddr), protocol: u8, content: &[u8]) -> Content {
        match ends {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip = Ipv4 {
                    protocol,
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, ip.packet(content))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let ip = Ipv6 {
                    next_header: protocol,
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, ip.packet(content))
            }
            _ => (0, Vec::new()),
        }
    }

    /// Builds a packet, possibly with options or extension headers. Returns `None` if the ends have different IP
    /// versions.
    pub(super) fn wrapped(
        &mut self,
        ends: (IpAddr, IpAddr),
        protocol: u8,
        content: &[u8],
    ) -> Option<Content> {
        let hop_limit = self.pick(&[64, 64, 64, 255, 1, 2, 0, 254]);
        Some(match ends {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let options = if self.one_in(6) {
                    self.options()
                } else {
                    Vec::new()
                };
                let ip = Ipv4 {
                    protocol,
                    ttl: hop_limit,
                    options,
                    tos: if self.one_in(10) { self.rng.u8(..) } else { 0 },
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, ip.packet(content))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (next_header, chain) = if self.one_in(4) {
                    self.extensions(protocol)
                } else {
                    (protocol, Vec::new())
                };
                let ip = Ipv6 {
                    next_header,
                    hop_limit,
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, ip.packet(&[&chain, content].concat()))
            }
            _ => return None,
        })
    }

    /// Builds IPv4 options: source and recorded routes, timestamps, router alerts, security, and invalid options.
    fn options(&mut self) -> Vec<u8> {
        let via = self.pick(&self.scene.others).v4.octets();
        let route = |kind: u8| [&[kind, 7, 4][..], &via, &[0]].concat();
        let mut options = match self.rng.u8(0..9) {
            0 => vec![1, 1, 1, 1],
            1 => route(7),
            2 | 3 => route(131),
            4 => route(137),
            5 => vec![68, 8, 5, 0, 0, 0, 0, 0],
            6 => vec![148, 4, 0, 0],
            7 => vec![134, 8, 0, 0, 0, 1, 1, 2],
            _ => (0..8).map(|_| self.rng.u8(..)).collect(),
        };
        if self.one_in(4) {
            // Sets a wrong pointer, length or other byte.
            let at = self.rng.usize(0..options.len());
            options[at] = self.rng.u8(..);
        }
        options
    }

    /// Builds a chain of extension headers before a protocol. Returns the type of the first header and the chain.
    fn extensions(&mut self, protocol: u8) -> (u8, Vec<u8>) {
        let count = if self.one_in(12) {
            8
        } else {
            self.rng.usize(1..4)
        };
        let kinds: Vec<u8> = (0..count)
            .map(|_| self.pick(&[0, 0, 43, 44, 51, 60, 60, 135, 139, 140]))
            .collect();
        let mut chain = Vec::new();
        for (at, kind) in kinds.iter().enumerate() {
            let next = kinds.get(at + 1).copied().unwrap_or(protocol);
            let via = self.pick(&self.scene.others).v6.octets();
            match kind {
                // A router alert, padding, a jumbo payload length, or an unknown option.
                0 | 60 => {
                    let option = self.pick(&[
                        [5, 2, 0, 0, 1, 0],
                        [1, 4, 0, 0, 0, 0],
                        [0xc2, 4, 0, 1, 0, 0],
                        [0x3e, 4, 0, 0, 0, 0],
                    ]);
                    chain.extend([&[next, 0][..], &option].concat());
                }
                // A routing header via another host, of type 0, 2, 3 or 4.
                43 => {
                    let kind = self.pick(&[0, 2, 3, 4]);
                    chain.extend([&[next, 2, kind, 1, 0, 0, 0, 0][..], &via].concat());
                }
                44 => chain.extend([next, 0, 0, self.rng.u8(0..2), 0, 0, 0, 7]),
                51 => chain.extend([next, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]),
                _ => chain.extend([next, 0, 0, 0, 0, 0, 0, 0]),
            }
        }
        (kinds[0], chain)
    }

    /// Builds a fragment of the group's packet: complete, tiny, overlapping or beyond the end.
    pub(super) fn fragment(&mut self) -> Content {
        let is_v4 = self.group.bool();
        let id = self.group.u16(..);
        // Use the group's random numbers, so that all fragments have the same ends and protocol.
        let own = std::mem::replace(&mut self.rng, self.group.clone());
        let ends = self.ends(is_v4);
        let protocol = self.pick(&[UDP, TCP, if is_v4 { ICMP } else { ICMPV6 }]);
        self.rng = own;
        let mut whole = if protocol == UDP || protocol == TCP {
            self.ports(protocol)
        } else {
            let kinds: [u8; 4] = if is_v4 {
                [8, 3, 5, 9]
            } else {
                [128, 1, 134, 137]
            };
            vec![self.pick(&kinds), 0, 0, 0, 0, 53, 0, 1]
        };
        whole.extend(self.marker);
        let offset: u16 = self.pick(&[0, 0, 0, 1, 1, 2, 3, 100, 0x1ff0, 0x1fff]);
        let is_last = self.one_in(3);
        let len = self.pick(&[8, 16, 24, 32]).min(whole.len());
        let mut part = whole;
        if offset == 0 {
            part.truncate(len);
        }
        match ends {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let more = if is_last { 0 } else { 0x2000 };
                let ip = Ipv4 {
                    id,
                    protocol,
                    fragment: more | offset & 0x1fff,
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, ip.packet(&part))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let [high, low] = (offset << 3 | u16::from(!is_last)).to_be_bytes();
                let id = id.to_be_bytes();
                let header = [protocol, 0, high, low, 0, 0, id[0], id[1]];
                let ip = Ipv6 {
                    next_header: 44,
                    hop_limit: self.pick(&[64, 255]),
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, ip.packet(&[&header, &part[..]].concat()))
            }
            _ => (IPV4, Vec::new()),
        }
    }
}

/// Fills in the checksum if the protocol has one.
fn seal(protocol: u8, ends: (IpAddr, IpAddr), content: &mut [u8]) {
    let at = match protocol {
        ICMP | ICMPV6 => 2,
        TCP => 16,
        UDP => 6,
        _ => return,
    };
    if content.len() < at + 2 {
        return;
    }
    content[at..at + 2].fill(0);
    let check = if protocol == ICMP {
        checksum(&[content])
    } else {
        transport_checksum(ends.0, ends.1, protocol, content)
    };
    content[at..at + 2].copy_from_slice(&check.to_be_bytes());
}
