//! Traffic that a host needs on its link regardless of policy: neighbour discovery (RFC 4861) and multicast listener
//! discovery (RFC 2710, RFC 3810). Also DHCPv6 (RFC 8415), which needs a permission of its own.

use crate::addr::{Addr, v6_is_group, v6_is_link_local};
use crate::echo::{Ipv6Header, PROTOCOL_ICMPV6};
use crate::neighbour::{NEIGHBOUR_ADVERTISEMENT, NEIGHBOUR_SOLICITATION, ROUTER_SOLICITATION};

/// ICMPv6 type of a multicast listener report, version 1 (RFC 2710).
const LISTENER_REPORT: u8 = 131;
/// ICMPv6 type of a multicast listener done message.
const LISTENER_DONE: u8 = 132;
/// ICMPv6 type of a multicast listener report, version 2 (RFC 3810).
const LISTENER_REPORT_2: u8 = 143;

/// Hop limit of neighbour discovery: routed packets have a lower one (RFC 4861 section 7.1).
const NEIGHBOURS_HOP_LIMIT: u8 = 255;
/// Hop limit of multicast listener discovery (RFC 3810 section 5).
const LISTENERS_HOP_LIMIT: u8 = 1;

/// Length of a hop-by-hop header with a router alert, in bytes.
pub const ALERT_LEN: usize = 8;
/// A router alert for multicast listener discovery (RFC 2711), in memory order.
const ROUTER_ALERT: u32 = u32::from_ne_bytes([5, 2, 0, 0]);

const ALL_NODES: [u32; 4] = group(1);
const ALL_ROUTERS: [u32; 4] = group(2);
const LISTENERS_ROUTERS: [u32; 4] = group(0x16);

/// All DHCPv6 servers and relay agents, `ff02::1:2`.
const DHCP_SERVERS: [u32; 4] = group(0x1_0002);
const DHCP_CLIENT: u16 = 546;
const DHCP_SERVER: u16 = 547;

/// The link-local multicast group with this number, `ff02::/16`.
const fn group(number: u32) -> [u32; 4] {
    [0xff02_0000_u32.to_be(), 0, 0, number.to_be()]
}

/// The solicited-node multicast address of a target (RFC 4291 section 2.7.1).
#[inline(always)]
const fn solicited_node(target: &[u32; 4]) -> [u32; 4] {
    [
        0xff02_0000_u32.to_be(),
        0,
        1_u32.to_be(),
        target[3] | 0xff00_0000_u32.to_be(),
    ]
}

/// The first bytes of an ICMPv6 message about an address (RFC 4861 sections 4.3 and 4.4, RFC 2710 section 3). Other
/// messages may be shorter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkMessage {
    /// ICMPv6 type.
    pub kind: u8,
    /// ICMPv6 code.
    pub code: u8,
    /// Checksum.
    pub check: u16,
    /// Flags, a delay or a reserved field, depending on the type.
    pub rest_be: u32,
    /// The address; zero in messages without one.
    pub address_be: [u32; 4],
}

impl LinkMessage {
    /// Length of a message without an address, in bytes.
    pub const SHORT: usize = 8;

    /// Whether a message that starts like this is about an address.
    #[inline(always)]
    pub const fn has_address(&self) -> bool {
        matches!(
            self.kind,
            NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT | LISTENER_REPORT | LISTENER_DONE
        )
    }
}

/// The kind of destination of a packet that the link needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkTarget {
    /// To a multicast group on the link.
    Group,
    /// To one neighbour.
    Neighbour,
}

/// Whether this hop-by-hop header of [`ALERT_LEN`] bytes contains a router alert for multicast listener discovery and
/// otherwise only padding, and is followed by ICMPv6.
#[inline(always)]
pub const fn is_alert(header: &[u32; ALERT_LEN / 4]) -> bool {
    let [next_header, units, a, b] = header[0].to_ne_bytes();
    let [c, d, e, f] = header[1].to_ne_bytes();
    let (alert, padding) = if a == 5 {
        ([a, b, c, d], [e, f])
    } else {
        ([c, d, e, f], [a, b])
    };
    next_header == PROTOCOL_ICMPV6
        && units == 0
        && u32::from_ne_bytes(alert) == ROUTER_ALERT
        && matches!(padding, [0 | 1, 0])
}

/// Whether this source address identifies a host only on its link, if at all: it is link-local or unset.
#[inline(always)]
pub const fn is_link_source(source: &[u32; 4]) -> bool {
    v6_is_link_local(source) || Addr::v6(*source).is_unset()
}

/// The kind of destination of a neighbour or router discovery message that directly follows the IPv6 header; `None` for
/// any other message.
#[inline(always)]
pub fn discovery(ip: &Ipv6Header, message: &LinkMessage) -> Option<LinkTarget> {
    if ip.hop_limit != NEIGHBOURS_HOP_LIMIT || message.code != 0 {
        return None;
    }
    let has_source = !Addr::v6(ip.saddr_be).is_unset();
    let to_neighbour = has_source && !v6_is_group(&ip.daddr_be);
    let target = &message.address_be;
    let (group, is_neighbour) = match message.kind {
        ROUTER_SOLICITATION => (ALL_ROUTERS, false),
        // Unicast solicitations check that a known neighbour is still reachable.
        NEIGHBOUR_SOLICITATION => (solicited_node(target), ip.daddr_be == *target),
        NEIGHBOUR_ADVERTISEMENT if has_source => (ALL_NODES, true),
        _ => return None,
    };
    if ip.daddr_be == group {
        Some(LinkTarget::Group)
    } else if to_neighbour && is_neighbour {
        Some(LinkTarget::Neighbour)
    } else {
        None
    }
}

/// Whether a host uses this message to report the groups it listens to. The message must follow a header that satisfies
/// [`is_alert`].
#[inline(always)]
pub fn is_listener(ip: &Ipv6Header, message: &LinkMessage) -> bool {
    let group = match message.kind {
        LISTENER_REPORT if v6_is_group(&message.address_be) => message.address_be,
        LISTENER_DONE => ALL_ROUTERS,
        LISTENER_REPORT_2 => LISTENERS_ROUTERS,
        _ => return false,
    };
    ip.hop_limit == LISTENERS_HOP_LIMIT && ip.daddr_be == group
}

/// Whether this is a DHCPv6 datagram from a client to servers and relay agents (RFC 8415 section 7); `ports_be` holds
/// its source and destination ports, network byte order.
#[inline(always)]
pub fn asks_by_dhcp(ip: &Ipv6Header, ports_be: [u16; 2]) -> bool {
    ip.daddr_be == DHCP_SERVERS && ports_be.map(u16::from_be) == [DHCP_CLIENT, DHCP_SERVER]
}

/// Whether a neighbour discovery message comes from a neighbour: no router has forwarded it.
#[inline(always)]
pub const fn is_of_neighbour(ip: &Ipv6Header, code: u8) -> bool {
    ip.hop_limit == NEIGHBOURS_HOP_LIMIT && code == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Addr;
    use core::net::Ipv6Addr;

    fn address(text: &str) -> [u32; 4] {
        let address: Ipv6Addr = text.parse().expect("an address");
        Addr::from(address).words_be
    }

    fn ip(source: &str, destination: &str, hop_limit: u8) -> Ipv6Header {
        Ipv6Header {
            hop_limit,
            saddr_be: address(source),
            daddr_be: address(destination),
            ..Ipv6Header::default()
        }
    }

    fn message(kind: u8, about: &str) -> LinkMessage {
        LinkMessage {
            kind,
            address_be: address(about),
            ..LinkMessage::default()
        }
    }

    #[test]
    fn neighbours_are_asked_by_their_group_or_themselves() {
        let asked = |source, destination, about| {
            let ip = ip(source, destination, 255);
            discovery(&ip, &message(NEIGHBOUR_SOLICITATION, about))
        };
        for source in ["fe80::9", "fd00::9", "::"] {
            let group = asked(source, "ff02::1:ffab:cdef", "fd00::12ab:cdef");
            assert_eq!(group, Some(LinkTarget::Group), "{source}");
            assert_eq!(asked(source, "ff02::1:ffab:cdee", "fd00::12ab:cdef"), None);
            assert_eq!(asked(source, "ff02::1", "ff02::1"), None);
        }
        let itself = Some(LinkTarget::Neighbour);
        assert_eq!(asked("fe80::9", "fd00::1", "fd00::1"), itself);
        assert_eq!(asked("::", "fd00::1", "fd00::1"), None);
        assert_eq!(asked("fe80::9", "fd00::1", "fd00::2"), None);
    }

    #[test]
    fn what_was_routed_discovers_nobody() {
        let about = message(NEIGHBOUR_ADVERTISEMENT, "fd00::9");
        let sent = |hop_limit| ip("fd00::9", "fd00::1", hop_limit);
        assert_eq!(discovery(&sent(255), &about), Some(LinkTarget::Neighbour));
        assert!(is_of_neighbour(&sent(255), 0) && !is_of_neighbour(&sent(255), 1));
        for hop_limit in [0, 1, 64, 254] {
            assert_eq!(discovery(&sent(hop_limit), &about), None);
            assert!(!is_of_neighbour(&sent(hop_limit), 0));
        }
    }

    #[test]
    fn routers_are_asked_and_not_spoken_for() {
        let to = |kind, destination| {
            let about = message(kind, "::");
            discovery(&ip("fe80::9", destination, 255), &about)
        };
        assert_eq!(to(ROUTER_SOLICITATION, "ff02::2"), Some(LinkTarget::Group));
        for destination in ["ff02::1", "fe80::1", "ff05::2"] {
            assert_eq!(to(ROUTER_SOLICITATION, destination), None);
        }
        for kind in [134, 137, 128, LISTENER_REPORT_2] {
            for destination in ["ff02::1", "ff02::2", "fe80::1"] {
                assert_eq!(to(kind, destination), None, "{kind}");
            }
        }
    }

    #[test]
    fn listeners_speak_to_routers_and_to_their_group() {
        let says = |kind, destination, hop_limit| {
            let about = message(kind, "ff05::77");
            is_listener(&ip("fe80::9", destination, hop_limit), &about)
        };
        for (kind, destination) in [
            (LISTENER_REPORT, "ff05::77"),
            (LISTENER_DONE, "ff02::2"),
            (LISTENER_REPORT_2, "ff02::16"),
        ] {
            assert!(says(kind, destination, 1));
            assert!(!says(kind, destination, 255));
            for other in ["ff02::1", "fe80::1"] {
                assert!(!says(kind, other, 1), "{kind} {other}");
            }
        }
        assert!(!says(130, "ff02::1", 1), "a query is a router's");
    }

    #[test]
    fn dhcp_asks_servers_by_their_group_from_port_to_port() {
        let asks = |destination, ports: [u16; 2]| {
            asks_by_dhcp(&ip("fe80::9", destination, 1), ports.map(u16::to_be))
        };
        assert!(asks("ff02::1:2", [546, 547]));
        for destination in ["ff02::2", "ff05::1:3", "fe80::1", "fd00::1"] {
            assert!(!asks(destination, [546, 547]), "{destination}");
        }
        for ports in [[547, 546], [547, 547], [546, 546], [546, 53]] {
            assert!(!asks("ff02::1:2", ports), "{ports:?}");
        }
    }

    #[test]
    fn an_alert_is_the_only_option_but_padding() {
        let header = |bytes: [u8; 8]| {
            let [a, b, c, d, e, f, g, h] = bytes;
            [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes)
        };
        for bytes in [
            [58, 0, 5, 2, 0, 0, 1, 0],
            [58, 0, 5, 2, 0, 0, 0, 0],
            [58, 0, 1, 0, 5, 2, 0, 0],
            [58, 0, 0, 0, 5, 2, 0, 0],
        ] {
            assert!(is_alert(&header(bytes)), "{bytes:?}");
            for (at, wrong) in [(0, 17), (1, 1)] {
                let mut other = bytes;
                other[at] = wrong;
                assert!(!is_alert(&header(other)), "{other:?}");
            }
        }
        for bytes in [
            [58, 0, 1, 4, 0, 0, 0, 0],
            [58, 0, 5, 2, 0, 1, 1, 0],
            [58, 0, 5, 2, 0, 0, 1, 1],
            [58, 0, 5, 2, 0, 0, 5, 2],
            [58, 0, 0, 1, 5, 2, 0, 0],
            [58, 0, 5, 4, 0, 0, 0, 0],
        ] {
            assert!(!is_alert(&header(bytes)), "{bytes:?}");
        }
    }
}
