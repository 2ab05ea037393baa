//! The tables of docs/policy.md, "What passes without policy", implemented by an independent parser.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::discovery::solicited;
use super::{ALL_NODES, ALL_ROUTERS, LISTENERS_ROUTERS, Scene};
use crate::packet::{ARP, IPV4, IPV6, transport_checksum};

const ICMPV6: u8 = 58;

/// The expected fate of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Passes under every policy.
    Passes,
    /// Policy decides.
    Judged,
    /// Never passes.
    Dropped,
    /// Does not pass under an enforcing policy, and may or may not pass without one.
    Odd,
    /// The datapath answers the frame, which goes no further.
    Answered,
}

/// The fate of a frame that the scene's sender, an endpoint, sends on its wire.
pub fn fate_of_sent(scene: &Scene, frame: &[u8]) -> Fate {
    match ethertype(frame) {
        ARP => sent_arp(scene, frame),
        IPV4 => match frame.get(26..30) {
            Some(source) if frame.len() >= 34 && *source == scene.own.v4.octets() => {
                let offset = u16::from_be_bytes([frame[20], frame[21]]) & 0x1fff;
                or_waits(offset != 0)
            }
            _ => Fate::Dropped,
        },
        IPV6 => match Six::read(frame) {
            Some(packet) => sent_ipv6(scene, &packet),
            None => Fate::Dropped,
        },
        _ => Fate::Dropped,
    }
}

/// The fate of a packet that policy decides about, except that later fragments wait for the first one, which may never
/// arrive.
fn or_waits(is_later: bool) -> Fate {
    if is_later { Fate::Odd } else { Fate::Judged }
}

/// The fate of a frame that the scene's sender, a host, sends on the wire of its peer, an endpoint.
pub fn fate_of_received(scene: &Scene, frame: &[u8]) -> Fate {
    match ethertype(frame) {
        ARP if is_question(frame) && arp_address(frame, 38) == Some(scene.peer.v4) => {
            let is_for_peer = frame[0] & 1 != 0 || frame[..6] == scene.peer.mac;
            if is_for_peer {
                Fate::Answered
            } else {
                Fate::Passes
            }
        }
        IPV4 if frame.len() >= 34 && frame[30..34] == scene.peer.v4.octets() => Fate::Judged,
        IPV6 => {
            let Some(packet) = Six::read(frame) else {
                return Fate::Passes;
            };
            if packet.has_mapped_end() {
                return Fate::Dropped;
            }
            let party = scene.peer;
            if [party.v6, party.link]
                .iter()
                .any(|&own| packet.is_answered(own, party.mac))
            {
                return Fate::Answered;
            }
            if packet.is_strict_question() && packet.target() == Some(scene.peer.v6) {
                return Fate::Passes;
            }
            if packet.destination != scene.peer.v6 {
                return Fate::Passes;
            }
            match packet.walk() {
                Walk::Icmp(message)
                    if packet.hop_limit == 255
                        && message.len() >= 8
                        && (133..=137).contains(&message[0])
                        && message[1] == 0 =>
                {
                    Fate::Passes
                }
                _ => Fate::Judged,
            }
        }
        _ => Fate::Passes,
    }
}

fn ethertype(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[12], frame[13]])
}

/// The frame without its first tag, without its first two tags and so on, as the kernel's receive path strips them.
pub fn without_tags(frame: &[u8]) -> Vec<Vec<u8>> {
    let mut shorter = Vec::new();
    let mut at = 12;
    while let Some([0x81, 0] | [0x88, 0xa8]) = frame.get(at..at + 2)
        && frame.len() >= at + 6
    {
        at += 4;
        shorter.push([&frame[..12], &frame[at..]].concat());
    }
    shorter
}

/// Whether a frame received by an endpoint is one that the host sends by itself: neighbour discovery or multicast
/// traffic, or a packet to the endpoint's link-local address.
pub fn is_of_host(frame: &[u8]) -> bool {
    match ethertype(frame) {
        ARP => true,
        IPV4 => frame.get(30).is_some_and(|first| first >> 4 == 0xe),
        IPV6 => Six::read(frame).is_some_and(|packet| {
            let is_discovery = packet.hop_limit == 255
                && packet.next_header == ICMPV6
                && matches!(packet.rest.first(), Some(133..=137));
            let to = packet.destination;
            is_discovery || to.is_multicast() || to.is_unicast_link_local()
        }),
        _ => false,
    }
}

/// Whether the outermost packet of a frame, IP or ARP, has this source or destination address.
pub fn names_address(frame: &[u8], address: IpAddr) -> bool {
    let (places, octets) = match (ethertype(frame), address) {
        (IPV4, IpAddr::V4(v4)) => ([26, 30], v4.octets().to_vec()),
        (ARP, IpAddr::V4(v4)) => ([28, 38], v4.octets().to_vec()),
        (IPV6, IpAddr::V6(v6)) => ([22, 38], v6.octets().to_vec()),
        _ => return false,
    };
    places
        .iter()
        .any(|at| frame.get(*at..at + octets.len()) == Some(&octets))
}

fn sent_arp(scene: &Scene, frame: &[u8]) -> Fate {
    let Some(sender) = arp_address(frame, 28).filter(|_| frame.len() >= 42) else {
        return Fate::Dropped;
    };
    if sender.is_unspecified() {
        return Fate::Passes;
    }
    if sender != scene.own.v4 {
        return Fate::Dropped;
    }
    let is_for_peer = frame[0] & 1 != 0 || frame[..6] == scene.peer.mac;
    if is_for_peer && is_question(frame) && arp_address(frame, 38) == Some(scene.gateway.0) {
        Fate::Answered
    } else {
        Fate::Passes
    }
}

/// Whether the frame is an ARP request whose sender asks on its own behalf.
fn is_question(frame: &[u8]) -> bool {
    frame.len() >= 42
        && frame[14..22] == [0, 1, 8, 0, 6, 4, 0, 1]
        && frame[22..28] == frame[6..12]
        && frame[22] & 1 == 0
        && frame[28..32] != [0; 4]
        && frame[28..32] != frame[38..42]
}

fn arp_address(frame: &[u8], at: usize) -> Option<Ipv4Addr> {
    let bytes: [u8; 4] = frame.get(at..at + 4)?.try_into().ok()?;
    Some(bytes.into())
}

fn sent_ipv6(scene: &Scene, packet: &Six) -> Fate {
    if packet.has_mapped_end() {
        return Fate::Dropped;
    }
    let is_own = packet.source == scene.own.v6;
    let is_own_link = packet.source == scene.own.link;
    if (is_own || is_own_link) && packet.is_answered(scene.gateway.1, scene.peer.mac) {
        return Fate::Answered;
    }
    let is_of_link = packet.source.is_unspecified() || is_own_link;
    if !is_own && !is_of_link {
        return Fate::Dropped;
    }
    let is_needed = packet.discovers(scene, is_own) || !is_own && packet.is_listeners();
    match packet.walk() {
        // The payload length in the header is too short.
        walk if is_needed && is_own && !matches!(walk, Walk::Icmp(_)) => Fate::Odd,
        _ if is_needed => Fate::Passes,
        _ if !is_own => Fate::Dropped,
        Walk::Icmp([134 | 137, ..]) => Fate::Dropped,
        // A first fragment or a truncated packet, which may be a router's message.
        Walk::Unclear => Fate::Odd,
        _ => or_waits(packet.is_later_fragment()),
    }
}

/// The content after the extension headers.
enum Walk<'a> {
    /// An ICMPv6 message of at least eight bytes.
    Icmp(&'a [u8]),
    Other,
    Unclear,
}

/// An IPv6 packet in a frame.
struct Six<'a> {
    frame: &'a [u8],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    next_header: u8,
    hop_limit: u8,
    /// All bytes after the fixed header, regardless of the payload length in the header.
    rest: &'a [u8],
}

impl<'a> Six<'a> {
    fn read(frame: &'a [u8]) -> Option<Self> {
        let address = |at: usize| -> Option<Ipv6Addr> {
            let bytes: [u8; 16] = frame.get(at..at + 16)?.try_into().ok()?;
            Some(bytes.into())
        };
        Some(Self {
            frame,
            source: address(22)?,
            destination: address(38)?,
            next_header: frame[20],
            hop_limit: frame[21],
            rest: &frame[54..],
        })
    }

    /// Whether the source or destination address is IPv4-mapped.
    fn has_mapped_end(&self) -> bool {
        let ends = [self.source, self.destination];
        ends.iter().any(|end| end.to_ipv4_mapped().is_some())
    }

    /// Whether the fixed header is followed by the fragment header of a later fragment.
    fn is_later_fragment(&self) -> bool {
        const FRAGMENT: u8 = 44;
        let offset = self.rest.get(2..4);
        self.next_header == FRAGMENT
            && offset.is_some_and(|bytes| bytes[0] != 0 || bytes[1] & 0xf8 != 0)
    }

    /// The payload length in the header.
    fn claimed(&self) -> usize {
        usize::from(u16::from_be_bytes([self.frame[18], self.frame[19]]))
    }

    fn target(&self) -> Option<Ipv6Addr> {
        let bytes: [u8; 16] = self.rest.get(8..24)?.try_into().ok()?;
        Some(bytes.into())
    }

    /// Whether this is a valid neighbour solicitation with the sender's hardware address as its only option.
    fn is_strict_question(&self) -> bool {
        self.frame[14] >> 4 == 6
            && self.next_header == ICMPV6
            && self.hop_limit == 255
            && self.rest.len() == 32
            && self.claimed() == 32
            && self.rest[..2] == [135, 0]
            && self.rest[24..26] == [1, 1]
            && !self.source.is_unspecified()
            && !self.source.is_loopback()
            && !self.source.is_multicast()
            && transport_checksum(
                self.source.into(),
                self.destination.into(),
                ICMPV6,
                self.rest,
            ) == 0
    }

    /// Whether the datapath answers the packet on behalf of the owner of this address and hardware address.
    fn is_answered(&self, target: Ipv6Addr, mac: [u8; 6]) -> bool {
        self.is_strict_question()
            && self.target() == Some(target)
            && (self.frame[0] & 1 != 0 || self.frame[..6] == mac)
    }

    /// Implements the table's rows for router and neighbour solicitations and neighbour advertisements. `is_own`: the
    /// source is the sender's own address, from which routers forward packets.
    fn discovers(&self, scene: &Scene, is_own: bool) -> bool {
        let long_enough = self.rest.len() >= 8;
        if self.next_header != ICMPV6 || self.hop_limit != 255 || !long_enough {
            return false;
        }
        let to = self.destination;
        // Packets from a link-local address are never routed, so they do not get beyond the host.
        let is_host =
            !is_own || to.is_unicast_link_local() || to.is_loopback() || to == scene.peer.v6;
        let has_source = !self.source.is_unspecified();
        let to_neighbour = has_source && !to.is_multicast() && is_host;
        match (self.rest[0], self.rest[1], self.target()) {
            (133, 0, _) => to == ALL_ROUTERS,
            (135, 0, Some(target)) => to == solicited(target) || to_neighbour && to == target,
            (136, 0, Some(_)) => has_source && (to == ALL_NODES || to_neighbour),
            _ => false,
        }
    }

    /// Implements the table's row for multicast listeners.
    fn is_listeners(&self) -> bool {
        const ALERT: [u8; 4] = [5, 2, 0, 0];
        let Some((header, message)) = self.rest.split_at_checked(8) else {
            return false;
        };
        let is_alert = header[..2] == [ICMPV6, 0]
            && (header[2..6] == ALERT && matches!(header[6..], [0 | 1, 0])
                || header[4..] == ALERT && matches!(header[2..4], [0 | 1, 0]));
        let group = message
            .get(8..24)
            .and_then(|bytes| <[u8; 16]>::try_from(bytes).ok())
            .map(Ipv6Addr::from);
        let to = self.destination;
        let is_to_group = match message.first() {
            Some(131) => group == Some(to) && to.is_multicast(),
            Some(132) => group.is_some() && to == ALL_ROUTERS,
            Some(143) => message.len() >= 8 && to == LISTENERS_ROUTERS,
            _ => false,
        };
        self.next_header == 0 && self.hop_limit == 1 && is_alert && is_to_group
    }

    fn walk(&self) -> Walk<'a> {
        if self.frame[14] >> 4 != 6 {
            return Walk::Unclear;
        }
        let mut kind = self.next_header;
        let mut rest = &self.rest[..self.rest.len().min(self.claimed())];
        for _ in 0..6 {
            let len = match (kind, rest) {
                (0 | 43 | 60, [_, units, ..]) => (usize::from(*units) + 1) * 8,
                (51, [_, units, ..]) => (usize::from(*units) + 2) * 4,
                (44, [_, _, high, low, ..]) => {
                    if u16::from_be_bytes([*high, *low]) >> 3 != 0 {
                        return Walk::Other;
                    }
                    8
                }
                (0 | 43 | 44 | 51 | 60, _) => return Walk::Unclear,
                _ => break,
            };
            let Some(behind) = rest.get(len..) else {
                return Walk::Unclear;
            };
            kind = rest[0];
            rest = behind;
        }
        match kind {
            0 | 43 | 44 | 51 | 60 => Walk::Unclear,
            ICMPV6 if rest.len() < 8 => Walk::Unclear,
            ICMPV6 => Walk::Icmp(rest),
            _ => Walk::Other,
        }
    }
}
