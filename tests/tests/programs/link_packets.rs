//! Packets that pass an endpoint's policy because they concern only its link, and packets that only look like them.

use std::iter;
use std::net::Ipv6Addr;

use health_common::endpoint::{ENDPOINT_DHCPV6, ENDPOINT_HEALTH};
use health_common::metrics::Reason;
use health_common::policy::{ANY_IDENTITY, VERDICT_ALLOW};
use tests::packet::{ARP, Ipv6, arp, ethernet, tagged};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{
    ENDPOINT4, ENDPOINT6, HOST_MAC, ICMPV6, MAC, UDP, framed, with_ports,
};
use crate::policy_packets::{
    APP, BOTH, Bed, GATEWAY6, address, everything, exactly, fresh, opening, set_endpoint,
};

/// Tags of both kinds (802.1Q, 802.1ad), with VLAN 0 (priority tags) and VLAN 7.
const TAGS: [(u16, u16); 4] = [(0x8100, 0), (0x8100, 7), (0x88a8, 0), (0x88a8, 7)];

/// Every stack of up to three tags, outermost first.
fn stacks() -> Vec<Vec<(u16, u16)>> {
    let longer = |stacks: &Vec<Vec<(u16, u16)>>| {
        let with = |tag: &(u16, u16)| {
            let tag = *tag;
            stacks
                .iter()
                .map(move |stack| [&[tag], &stack[..]].concat())
        };
        Some(TAGS.iter().flat_map(with).collect())
    };
    let none = vec![Vec::new()];
    let by_length = iter::successors(longer(&none), longer);
    by_length.take(3).flatten().collect()
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_sends_arp_and_ip_without_tags_and_nothing_else() {
    let mut bed = Bed::new(&[(everything(Out, ANY_IDENTITY), VERDICT_ALLOW)]);
    let refused = Some(Reason::UnsupportedL2);
    let packets = [true, false].map(|is_v4| opening(Out, address(APP, is_v4), UDP, 53));
    let question = arp(1, (MAC, ENDPOINT4), ([0; 6], ENDPOINT4));
    let arp = ethernet(HOST_MAC, MAC, ARP, &question);
    for flags in [BOTH, 0, ENDPOINT_HEALTH] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        for packet in packets.iter().chain([&arp]) {
            assert_eq!(bed.verdict(Out, packet), None);
            for stack in stacks() {
                let packet = tagged(packet, &stack);
                assert_eq!(bed.verdict(Out, &packet), refused, "{stack:x?}");
            }
        }
        for ethertype in [
            // LLC, whose frames have a length in place of the EtherType.
            0, 38, 0x05dc, 0x05ff,
            // X.25, Wake-on-LAN, AVTP, TRILL, DECnet, RARP, AppleTalk, IPX, old Q-in-Q, PROFINET, flow control.
            0x0805, 0x0842, 0x22f0, 0x22f3, 0x6003, 0x8035, 0x809b, 0x8137, 0x9100, 0x9200, 0x8892,
            0x8808,
            // LACP, MPLS, PPPoE, EAPOL, ATA, EtherCAT, LLDP, MACsec, PBB, PTP, NC-SI, PRP, CFM, FCoE, HSR.
            0x8809, 0x8847, 0x8848, 0x8863, 0x8864, 0x888e, 0x88a2, 0x88a4, 0x88cc, 0x88e5, 0x88e7,
            0x88f7, 0x88f8, 0x88fb, 0x8902, 0x8906, 0x892f,
            // ERSPAN, batman-adv, values next to those of IPv4 and IPv6, an experimental one, and the highest one.
            0x22eb, 0x88be, 0x4305, 0x0801, 0x86dc, 0x86de, 0x88b5, 0xffff,
        ] {
            for packet in &packets {
                let frame = ethernet(HOST_MAC, MAC, ethertype, &packet[14..]);
                assert_eq!(bed.verdict(Out, &frame), refused, "{ethertype:#06x}");
            }
        }
    }
}

/// A router alert option for multicast listener discovery, with padding before or after it (RFC 2711).
const ALERTS: [[u8; 6]; 3] = [[5, 2, 0, 0, 1, 0], [5, 2, 0, 0, 0, 0], [1, 0, 5, 2, 0, 0]];
const SOLICIT_ROUTERS: u8 = 133;
const ADVERTISE_ROUTER: u8 = 134;
const SOLICIT_NEIGHBOUR: u8 = 135;
const ADVERTISE_NEIGHBOUR: u8 = 136;
const REDIRECT: u8 = 137;

fn ip(text: &str) -> Ipv6Addr {
    text.parse().expect(text)
}

/// An ICMPv6 message about an address, without options.
fn about(kind: u8, code: u8, address: &str) -> Vec<u8> {
    let start = [kind, code, 0, 0, 0, 0, 0, 0];
    [&start[..], &ip(address).octets()].concat()
}

/// A packet of the endpoint: an ICMPv6 message behind extension headers.
fn behind(ends: (&str, &str), hop_limit: u8, extensions: &[&[u8]], message: Vec<u8>) -> Vec<u8> {
    let header = Ipv6 {
        hop_limit,
        ..Ipv6::icmp(ip(ends.0), ip(ends.1))
    };
    let message = header.with_checksum(message);
    let next_header = if extensions.is_empty() {
        ICMPV6
    } else {
        extensions[0][0]
    };
    let chain: Vec<u8> = extensions
        .iter()
        .enumerate()
        .flat_map(|(at, header)| {
            let next = extensions.get(at + 1).map_or(ICMPV6, |next| next[0]);
            [&[next, 0][..], &header[1..]].concat()
        })
        .collect();
    let header = Ipv6 {
        next_header,
        ..header
    };
    framed(Out, &header.packet(&[chain, message].concat()))
}

fn plain(ends: (&str, &str), hop_limit: u8, message: Vec<u8>) -> Vec<u8> {
    behind(ends, hop_limit, &[], message)
}

/// A packet of the endpoint with these options in a hop-by-hop header.
fn alerted(ends: (&str, &str), hop_limit: u8, options: [u8; 6], message: Vec<u8>) -> Vec<u8> {
    let extension = [&[0][..], &options].concat();
    behind(ends, hop_limit, &[&extension], message)
}

/// A UDP datagram of the endpoint.
fn datagram(ends: (&str, &str), ports: (u16, u16)) -> Vec<u8> {
    let header = Ipv6 {
        next_header: UDP,
        hop_limit: 255,
        ..Ipv6::icmp(ip(ends.0), ip(ends.1))
    };
    framed(Out, &header.packet(&with_ports(ports.0, ports.1)))
}

/// The link-local address derived from the endpoint's MAC address.
fn own_link_local() -> String {
    let [a, b, c, d, e, f] = MAC;
    let a = a ^ 2;
    format!("fe80::{a:02x}{b:02x}:{c:02x}ff:fe{d:02x}:{e:02x}{f:02x}")
}

/// A version 2 multicast listener report that joins one group.
fn report() -> Vec<u8> {
    [
        &[143, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0][..],
        &ip("ff02::1:ff00:9").octets(),
    ]
    .concat()
}

/// The messages that neighbour discovery (RFC 4861) and multicast listener discovery (RFC 2710, RFC 3810) require of a
/// host.
#[test]
#[ignore = "needs root"]
fn under_a_link_local_address_or_none_an_endpoint_says_what_its_link_needs() {
    let mut bed = Bed::new(&[]);
    for flags in [BOTH, 0] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        for source in [&own_link_local()[..], "::"] {
            let mut packets = vec![
                plain(
                    (source, "ff02::2"),
                    255,
                    vec![SOLICIT_ROUTERS, 0, 0, 0, 0, 0, 0, 0],
                ),
                plain(
                    (source, "ff02::1:ff00:9"),
                    255,
                    about(SOLICIT_NEIGHBOUR, 0, "fe80::9"),
                ),
                plain(
                    (source, "ff02::1:ff00:1"),
                    255,
                    about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
                ),
            ];
            for options in ALERTS {
                packets.extend([
                    alerted((source, "ff02::16"), 1, options, report()),
                    alerted(
                        (source, "ff02::1:ff00:9"),
                        1,
                        options,
                        about(131, 0, "ff02::1:ff00:9"),
                    ),
                    alerted(
                        (source, "ff02::2"),
                        1,
                        options,
                        about(132, 0, "ff02::1:ff00:9"),
                    ),
                ]);
            }
            for packet in packets {
                assert_eq!(bed.verdict(Out, &packet), None, "{packet:x?}");
            }
        }
        for (destination, kind, target) in [
            // Neighbour unreachability detection: solicitations and answers.
            ("fe80::1", SOLICIT_NEIGHBOUR, "fe80::1"),
            ("fd00:30::1", SOLICIT_NEIGHBOUR, "fd00:30::1"),
            ("fe80::1", ADVERTISE_NEIGHBOUR, "fe80::9"),
            ("fd00:30::1", ADVERTISE_NEIGHBOUR, "fd00:10:244:1::9"),
            ("ff02::1", ADVERTISE_NEIGHBOUR, "fe80::9"),
        ] {
            let packet = plain(
                (&own_link_local(), destination),
                255,
                about(kind, 0, target),
            );
            assert_eq!(bed.verdict(Out, &packet), None, "{kind} {destination}");
        }
    }
}

/// Each such message would use up one of the host's limited neighbour entries.
#[test]
#[ignore = "needs root"]
fn under_the_link_local_addresses_of_others_an_endpoint_says_nothing() {
    let mut bed = Bed::new(&[(everything(Out, ANY_IDENTITY), VERDICT_ALLOW)]);
    let own = own_link_local();
    let others = [
        "fe80::9",
        "fe80::1",
        &own.replace("fe80::", "fe80:0:0:1:"),
        &own.replace("fe80::", "febf::"),
    ];
    for flags in [BOTH, 0, BOTH | ENDPOINT_DHCPV6] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        for source in others {
            for packet in [
                plain(
                    (source, "ff02::2"),
                    255,
                    vec![SOLICIT_ROUTERS, 0, 0, 0, 0, 0, 0, 0],
                ),
                plain(
                    (source, "ff02::1:ff00:1"),
                    255,
                    about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
                ),
                plain(
                    (source, "fd00:30::1"),
                    255,
                    about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
                ),
                plain(
                    (source, "ff02::1"),
                    255,
                    about(ADVERTISE_NEIGHBOUR, 0, source),
                ),
                alerted((source, "ff02::16"), 1, ALERTS[0], report()),
                datagram((source, "ff02::1:2"), (546, 547)),
            ] {
                let verdict = bed.verdict(Out, &packet);
                assert_eq!(verdict, Some(Reason::InvalidSource), "{packet:x?}");
            }
        }
    }
}

/// RFC 8415: requests go from the link-local address to the group of servers and relay agents, from port 546 to port
/// 547.
#[test]
#[ignore = "needs root"]
fn an_endpoint_asks_for_addresses_by_dhcpv6_only_where_it_may() {
    let mut bed = Bed::new(&[]);
    let own = &own_link_local()[..];
    let request = datagram((own, "ff02::1:2"), (546, 547));
    let others = [
        datagram((own, "ff02::1:2"), (547, 546)),
        datagram((own, "ff02::1:2"), (546, 53)),
        datagram((own, "ff02::1:2"), (53, 547)),
        datagram((own, "ff02::2"), (546, 547)),
        datagram((own, "ff05::1:3"), (546, 547)),
        datagram((own, "fe80::1"), (546, 547)),
        datagram((own, "fd00:30::1"), (546, 547)),
        datagram(("::", "ff02::1:2"), (546, 547)),
        request[..54].to_vec(),
        request[..57].to_vec(),
    ];
    // A reply as a server on the host sends it.
    let reply = framed(In, &datagram(("fe80::1", own), (547, 546))[14..]);
    let refused = Some(Reason::InvalidSource);
    for flags in [0, BOTH] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        assert_eq!(bed.verdict(Out, &request), refused);
        set_endpoint(&mut bed.run.datapath, flags | ENDPOINT_DHCPV6, 1);
        assert_eq!(bed.verdict(Out, &request), None);
        assert_eq!(bed.verdict(In, &reply), None);
        for packet in &others {
            assert_eq!(bed.verdict(Out, packet), refused, "{packet:x?}");
        }
    }
}

/// Any other packet would reach the host, and all listeners of a group, from an address unknown to any policy.
#[test]
#[ignore = "needs root"]
fn without_an_address_of_its_own_an_endpoint_speaks_to_its_link_alone() {
    let mut bed = Bed::new(&[(everything(Out, ANY_IDENTITY), VERDICT_ALLOW)]);
    let own = [&own_link_local()[..], "::"];
    let groups = [
        "ff01::1",
        "ff02::1",
        "ff02::2",
        "ff02::16",
        "ff02::fb",
        "ff02::1:2",
        "ff02::1:ff00:9",
        "ff05::2",
    ];
    let unicast = ["fe80::1", "fd00:30::1", "fd00:10:244:2::9"];
    let mut packets = Vec::new();
    for source in own {
        for destination in groups.iter().chain(&unicast) {
            let ends = (source, *destination);
            // Name lookups, address lookups and other protocols are refused.
            for port in [53, 547, 5353, 5355] {
                packets.push(datagram(ends, (fresh(), port)));
            }
            packets.push(datagram(ends, (fresh(), 53))[..54].to_vec());
            packets.push(plain(ends, 255, vec![SOLICIT_NEIGHBOUR, 0, 0, 0]));
            for kind in 0..=255 {
                let of_discovery =
                    [SOLICIT_ROUTERS, SOLICIT_NEIGHBOUR, ADVERTISE_NEIGHBOUR].contains(&kind);
                let message = || about(kind, 0, "fd00:30::77");
                for hop_limit in [1, 64, 254, 255] {
                    if !of_discovery || hop_limit != 255 {
                        packets.push(plain(ends, hop_limit, message()));
                    }
                }
                if of_discovery {
                    let coded = || about(kind, 1, "fd00:30::77");
                    packets.push(plain(ends, 255, coded()));
                    let padding = [60, 1, 4, 0, 0, 0, 0];
                    packets.push(behind(ends, 255, &[&padding], message()));
                    packets.push(alerted(ends, 255, ALERTS[0], message()));
                }
                if ![131, 132, 143].contains(&kind) {
                    packets.push(alerted(ends, 1, ALERTS[0], message()));
                }
            }
        }
        for hop_limit in [0, 2, 64, 255] {
            packets.push(alerted(
                (source, "ff02::16"),
                hop_limit,
                ALERTS[0],
                report(),
            ));
        }
        for options in [
            [1, 4, 0, 0, 0, 0],
            [5, 2, 0, 1, 1, 0],
            [5, 2, 0, 0, 1, 1],
            [5, 2, 0, 0, 5, 2],
            [0; 6],
        ] {
            packets.push(alerted((source, "ff02::16"), 1, options, report()));
        }
        packets.extend([
            plain((source, "ff02::16"), 1, report()),
            alerted((source, "ff02::1"), 1, ALERTS[0], report()),
            alerted((source, "fd00:30::1"), 1, ALERTS[0], report()),
            alerted((source, "ff02::2"), 1, ALERTS[0], about(131, 0, "ff02::fb")),
            alerted((source, "fe80::1"), 1, ALERTS[0], about(131, 0, "fe80::1")),
            alerted(
                (source, "ff02::16"),
                1,
                ALERTS[0],
                about(132, 0, "ff02::fb"),
            ),
            // Routers are asked through their own group, neighbours through theirs, and neither through any other
            // address.
            plain((source, "ff02::1"), 255, about(SOLICIT_ROUTERS, 0, "::")),
            plain((source, "fe80::1"), 255, about(SOLICIT_ROUTERS, 0, "::")),
            plain(
                (source, "ff02::1"),
                255,
                about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
            ),
            plain(
                (source, "ff02::1:ff00:2"),
                255,
                about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
            ),
            plain(
                (source, "ff05::1:ff00:1"),
                255,
                about(SOLICIT_NEIGHBOUR, 0, "fd00:30::1"),
            ),
            plain(
                (source, "ff02::fb"),
                255,
                about(SOLICIT_NEIGHBOUR, 0, "ff02::fb"),
            ),
            plain(
                (source, "fe80::1"),
                255,
                about(SOLICIT_NEIGHBOUR, 0, "fe80::2"),
            ),
            plain(
                (source, "ff02::2"),
                255,
                about(ADVERTISE_NEIGHBOUR, 0, "fe80::9"),
            ),
        ]);
    }
    // Without an address, the endpoint has none to advertise, and can be answered only through a group.
    packets.extend([
        plain(
            ("::", "ff02::1"),
            255,
            about(ADVERTISE_NEIGHBOUR, 0, "fe80::9"),
        ),
        plain(
            ("::", "fe80::1"),
            255,
            about(ADVERTISE_NEIGHBOUR, 0, "fe80::9"),
        ),
        plain(
            ("::", "fe80::1"),
            255,
            about(SOLICIT_NEIGHBOUR, 0, "fe80::1"),
        ),
    ]);
    for flags in [BOTH, 0] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        bed.assert_dropped(Out, &packets, Reason::InvalidSource);
    }
}

/// Only the host is a neighbour. Other addresses are behind it, so policy applies to messages to them as usual.
#[test]
#[ignore = "needs root"]
fn under_its_own_address_an_endpoint_discovers_neighbours_and_nobody_else() {
    let mut bed = Bed::new(&[(exactly(Out, APP, ICMPV6, 128), VERDICT_ALLOW)]);
    let own = "fd00:10:244:1::9";
    let (host, far) = ("fd00:30::1", "2001:db8:1:9::9");
    let allowed = [
        plain(
            (own, "ff02::2"),
            255,
            vec![SOLICIT_ROUTERS, 0, 0, 0, 0, 0, 0, 0],
        ),
        plain(
            (own, "ff02::1:ff00:1"),
            255,
            about(SOLICIT_NEIGHBOUR, 0, host),
        ),
        plain((own, host), 255, about(SOLICIT_NEIGHBOUR, 0, host)),
        plain(
            (own, "fe80::1"),
            255,
            about(SOLICIT_NEIGHBOUR, 0, "fe80::1"),
        ),
        plain((own, host), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
        plain((own, "fe80::1"), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
        plain((own, "ff02::1"), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
    ];
    let padding = [60, 1, 4, 0, 0, 0, 0];
    let judged = [
        plain((own, far), 255, about(SOLICIT_NEIGHBOUR, 0, far)),
        plain((own, far), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
        plain((own, far), 255, about(SOLICIT_ROUTERS, 0, own)),
        // The gateway address does not belong to the host, which would route packets to it.
        plain((own, GATEWAY6), 255, about(SOLICIT_NEIGHBOUR, 0, GATEWAY6)),
        plain((own, GATEWAY6), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
        plain((own, "ff0e::1"), 255, about(ADVERTISE_NEIGHBOUR, 0, own)),
        plain((own, host), 64, about(SOLICIT_NEIGHBOUR, 0, host)),
        plain((own, host), 255, about(SOLICIT_NEIGHBOUR, 1, host)),
        plain((own, host), 255, about(SOLICIT_NEIGHBOUR, 0, far)),
        behind(
            (own, host),
            255,
            &[&padding],
            about(SOLICIT_NEIGHBOUR, 0, host),
        ),
    ];
    for packet in &allowed {
        assert_eq!(bed.verdict(Out, packet), None, "{packet:x?}");
    }
    for packet in &judged {
        let verdict = bed.verdict(Out, packet);
        assert_eq!(verdict, Some(Reason::PolicyDenied), "{packet:x?}");
    }
    // Policy that allows everything does not let an endpoint act as a router.
    let everything = [(everything(Out, ANY_IDENTITY), VERDICT_ALLOW)];
    bed.change(1, 2, &everything);
    for flags in [BOTH, 0] {
        set_endpoint(&mut bed.run.datapath, flags, 2);
        for packet in allowed.iter().chain(&judged) {
            assert_eq!(bed.verdict(Out, packet), None, "{packet:x?}");
        }
        for kind in [ADVERTISE_ROUTER, REDIRECT] {
            for destination in [host, far, "fe80::1", "ff02::1"] {
                for packet in [
                    plain((own, destination), 255, about(kind, 0, own)),
                    plain((own, destination), 64, about(kind, 0, own)),
                    behind((own, destination), 255, &[&padding], about(kind, 0, own)),
                ] {
                    let verdict = bed.verdict(Out, &packet);
                    assert_eq!(verdict, Some(Reason::InvalidSource), "{packet:x?}");
                }
            }
        }
    }
}

/// Routed packets have a lower hop limit than neighbour discovery messages require.
#[test]
#[ignore = "needs root"]
fn only_neighbours_discover_an_endpoint_whatever_its_policy() {
    let bed = Bed::new(&[]);
    for source in ["fe80::1", "fd00:30::1", "2001:db8:1:9::9"] {
        for kind in SOLICIT_ROUTERS..=REDIRECT {
            for (hop_limit, code, verdict) in [
                (255, 0, None),
                (254, 0, Some(Reason::PolicyDenied)),
                (64, 0, Some(Reason::PolicyDenied)),
                (255, 1, Some(Reason::PolicyDenied)),
            ] {
                let message = about(kind, code, "fd00:10:244:1::9");
                let header = Ipv6 {
                    hop_limit,
                    ..Ipv6::icmp(ip(source), ENDPOINT6)
                };
                let packet = framed(In, &header.packet(&header.with_checksum(message)));
                assert_eq!(
                    bed.verdict(In, &packet),
                    verdict,
                    "{source} {kind} {hop_limit}"
                );
            }
        }
    }
}
