//! Packets that pass without a policy check because an endpoint's link needs them: see [`health_common::link`].

use health_common::addr::{Addr, v6_is_link_local};
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN, Tuple4, Tuple6};
use health_common::echo::{Ipv4Header, Ipv6Header, PROTOCOL_ICMPV6};
use health_common::identity;
use health_common::link::{
    ALERT_LEN, LinkMessage, LinkTarget, asks_by_dhcp, discovery, is_alert, is_link_source,
    is_listener, is_of_neighbour,
};
use health_common::neighbour::is_neighbour_discovery;
use health_common::packet::EXTENSION_HOP_BY_HOP;

use crate::frame::{Frame, IP_AT, L4_AT6};
use crate::ip_version::Version;
use crate::ipcache::identity_of;
use crate::maps::HEALTH_CONFIG;
use crate::packet::load;
use crate::subprogram::{Stage, subprogram};

/// A link-local packet.
#[repr(u32)]
#[derive(Clone, Copy)]
enum LinkPacket {
    /// Not needed by the link.
    Other,
    /// Discovery by multicast.
    ToGroup,
    /// Discovery of one neighbour.
    ToNeighbour,
    /// A multicast listener message.
    OfListener,
    /// A DHCPv6 request.
    OfDhcp,
}

// SAFETY: `repr(u32)`, five variants without fields.
unsafe impl Stage for LinkPacket {}

/// How the IP versions differ in link-local packets: IPv4 does neighbour discovery outside IP.
pub trait Link: Version {
    /// Whether the source is link-local or unspecified.
    fn has_link_source(ip: &Self::Header) -> bool;
    /// Whether the destination is link-local.
    fn has_link_destination(ip: &Self::Header) -> bool;
    /// Whether a link-local packet must pass. With `may_ask`, DHCPv6 requests pass too.
    fn is_needed(frame: &Frame, may_ask: bool) -> bool;
    /// Whether an ICMP message with this type and code is neighbour discovery and travels in `direction` (as in a
    /// tuple) from or to a neighbour: the host, which is then `peer`.
    fn is_discovery(frame: &Frame, direction: u8, start: [u8; 2], peer: Self::Address) -> bool;
}

impl Link for Tuple4 {
    #[inline(always)]
    fn has_link_source(_ip: &Ipv4Header) -> bool {
        false
    }

    #[inline(always)]
    fn has_link_destination(_ip: &Ipv4Header) -> bool {
        false
    }

    #[inline(always)]
    fn is_needed(_frame: &Frame, _may_ask: bool) -> bool {
        false
    }

    #[inline(always)]
    fn is_discovery(_frame: &Frame, _direction: u8, _start: [u8; 2], _peer: u32) -> bool {
        false
    }
}

impl Link for Tuple6 {
    #[inline(always)]
    fn has_link_source(ip: &Ipv6Header) -> bool {
        is_link_source(&ip.saddr_be)
    }

    #[inline(always)]
    fn has_link_destination(ip: &Ipv6Header) -> bool {
        v6_is_link_local(&ip.daddr_be)
    }

    #[inline(always)]
    fn is_needed(frame: &Frame, may_ask: bool) -> bool {
        match link_packet(frame) {
            LinkPacket::Other => false,
            LinkPacket::OfDhcp => may_ask,
            LinkPacket::ToGroup | LinkPacket::ToNeighbour | LinkPacket::OfListener => true,
        }
    }

    #[inline(always)]
    fn is_discovery(frame: &Frame, direction: u8, start: [u8; 2], peer: [u32; 4]) -> bool {
        let [kind, code] = start;
        if !is_neighbour_discovery(kind) {
            return false;
        }
        if direction == TUPLE_IN {
            return match frame.at::<Ipv6Header>(IP_AT) {
                Some(ip) => is_of_neighbour(ip, code),
                None => false,
            };
        }
        match link_packet(frame) {
            LinkPacket::ToGroup => true,
            // All other addresses are behind the host.
            LinkPacket::ToNeighbour => v6_is_link_local(&peer) || is_of_host(peer),
            LinkPacket::Other | LinkPacket::OfListener | LinkPacket::OfDhcp => false,
        }
    }
}

/// Whether this is an address of the host. The gateway's address is excluded: the programs handle it themselves, and
/// the host would route to it.
#[inline(always)]
fn is_of_host(address: [u32; 4]) -> bool {
    let config = HEALTH_CONFIG.get(0);
    let is_gateway = config.is_some_and(|config| config.gateway6 == Addr::v6(address));
    !is_gateway && identity_of(address) == identity::HOST
}

#[subprogram(link_packet)]
fn link_packet(frame: &Frame) -> LinkPacket {
    read(frame).unwrap_or(LinkPacket::Other)
}

#[inline(always)]
fn read(frame: &Frame) -> Option<LinkPacket> {
    let ip = frame.at::<Ipv6Header>(IP_AT)?;
    match ip.next_header {
        PROTOCOL_ICMPV6 => {
            let message = message(frame, L4_AT6)?;
            discovery(ip, &message).map(|target| match target {
                LinkTarget::Group => LinkPacket::ToGroup,
                LinkTarget::Neighbour => LinkPacket::ToNeighbour,
            })
        }
        EXTENSION_HOP_BY_HOP => {
            let mut header = [0; ALERT_LEN / 4];
            load(frame, L4_AT6 as u32, &mut header, ALERT_LEN as u32)?;
            if !is_alert(&header) {
                return None;
            }
            let message = message(frame, L4_AT6 + ALERT_LEN)?;
            is_listener(ip, &message).then_some(LinkPacket::OfListener)
        }
        IP_PROTOCOL_UDP => {
            let mut ports_be = [0_u16; 2];
            let len = size_of_val(&ports_be) as u32;
            load(frame, L4_AT6 as u32, &mut ports_be, len)?;
            asks_by_dhcp(ip, ports_be).then_some(LinkPacket::OfDhcp)
        }
        _ => None,
    }
}

#[inline(always)]
fn message(frame: &Frame, at: usize) -> Option<LinkMessage> {
    let mut message = LinkMessage::default();
    load(frame, at as u32, &mut message, LinkMessage::SHORT as u32)?;
    if message.has_address() {
        let len = size_of::<LinkMessage>() as u32;
        load(frame, at as u32, &mut message, len)?;
    }
    Some(message)
}
