//! Packets from sources that no outside host can have, and packets from or to IPv4-mapped IPv6 addresses.

use std::net::{IpAddr, Ipv6Addr};

use health_common::metrics::Reason;
use health_common::own::OWN_ENTRIES;
use health_datapath::TrieError;
use health_datapath::own::OwnAddress;
use tests::packet::{ARP, IPV6, Ipv6, echo, ethernet, tagged};
use tests::testrun::{DROP, GO_ON, IFINDEX, Outcome, TestRun};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{ENDPOINT4, ENDPOINT6, ICMPV6, TCP, UDP, frame, framed, with_ports};
use crate::service_packets::{NODE_PORT, Stand, at_uplink, hosts, node_port};

/// The host's addresses besides the node's: addresses of other devices, broadcast and anycast addresses, and a prefix.
const OF_HOST: [&str; 8] = [
    "172.30.0.1/32",
    "172.30.0.255/32",
    "192.0.2.0/24",
    "127.0.0.0/8",
    "fd00:30::1/128",
    "fd00:30::/128",
    "2001:db8:7::/64",
    "::1/128",
];
/// Addresses that no host can have.
const OF_NOBODY: [&str; 11] = [
    "127.0.0.1",
    "127.255.255.255",
    "0.0.0.0",
    "0.0.0.7",
    "224.0.0.1",
    "239.255.255.255",
    "255.255.255.255",
    "::",
    "::1",
    "ff02::1",
    "ff0e::7",
];
/// IPv4-mapped IPv6 addresses: the endpoint's, the node's, some that no host can have, and an outside host's.
const MAPPED: [&str; 6] = [
    "::ffff:10.244.1.9",
    "::ffff:172.30.0.1",
    "::ffff:127.0.0.1",
    "::ffff:0.0.0.1",
    "::ffff:224.0.0.1",
    "::ffff:198.51.100.9",
];

fn ip(text: &str) -> IpAddr {
    text.parse().expect(text)
}

/// A node with services at its addresses, whose programs know the host's addresses.
fn stand() -> Stand {
    let mut stand = Stand::of(TestRun::load());
    let ports = hosts().into_iter().flat_map(|hosts| {
        [TCP, UDP].map(|protocol| node_port(protocol, hosts.node, Some(hosts.endpoint)))
    });
    stand.serve(&ports.collect::<Vec<_>>());
    has(&stand, &OF_HOST.map(|text| (text, IFINDEX)));
    stand
}

/// Sets the host's addresses in the programs' map to exactly these, with their devices.
fn has(stand: &Stand, own: &[(&str, u32)]) {
    let mut map = stand.run.datapath.own_addresses().expect("the map");
    let own = own.iter().map(|(text, device)| OwnAddress {
        prefix: text.parse().expect(text),
        device: *device,
    });
    map.set_all(own).expect("room for addresses");
}

fn is_dropped(stand: &Stand, packet: &[u8]) -> bool {
    let before = stand.run.counted(Reason::InvalidSource);
    let outcome = stand.run.run("from_netdev", packet);
    let counted = stand.run.counted(Reason::InvalidSource) - before;
    match outcome.code {
        DROP => {
            assert_eq!((counted, &outcome.bytes[..]), (1, packet));
            true
        }
        _ => {
            assert_eq!(counted, 0, "{outcome:?}");
            false
        }
    }
}

#[test]
#[ignore = "needs root"]
fn more_addresses_of_the_host_than_there_is_room_for_change_nothing() {
    let stand = stand();
    let mut map = stand.run.datapath.own_addresses().expect("the map");
    let all = (0..=OWN_ENTRIES).map(|number| {
        let address = IpAddr::from((0x0a60_0000 + number).to_be_bytes());
        OwnAddress {
            prefix: address.into(),
            device: IFINDEX,
        }
    });
    let result = map.set_all(all);
    let wanted = OWN_ENTRIES as usize + 1;
    assert!(
        matches!(result, Err(TrieError::Full { wanted: found, .. }) if found == wanted),
        "{result:?}"
    );
    // The host's own addresses are still protected.
    for hosts in hosts() {
        let packet = at_uplink((hosts.node, 4000), (hosts.endpoint, 80), UDP);
        assert!(is_dropped(&stand, &packet), "{}", hosts.node);
    }
}

#[test]
#[ignore = "needs root"]
fn nobody_outside_sends_from_an_address_of_this_node() {
    let stand = stand();
    let own = OF_HOST
        .iter()
        .map(|text| ip(text.split('/').next().unwrap()));
    let own = own.chain([ip("192.0.2.77"), ip("2001:db8:7::77")]);
    let own = own.chain([ENDPOINT4.into(), ENDPOINT6.into()]);
    let false_sources: Vec<_> = own.chain(OF_NOBODY.map(ip)).collect();
    for hosts in hosts() {
        let is_v4 = hosts.node.is_ipv4();
        let sources = false_sources.iter().copied();
        let sources = sources.filter(|ip| ip.is_ipv4() == is_v4);
        for source in sources.chain([hosts.client]) {
            for to in [
                hosts.endpoint,
                hosts.node,
                hosts.elsewhere,
                hosts.cluster_ip,
            ] {
                for protocol in [TCP, UDP] {
                    let packet = at_uplink((source, 4000), (to, NODE_PORT), protocol);
                    let is_false = source != hosts.client;
                    let what = format!("{source} {to} {protocol}");
                    assert_eq!(is_dropped(&stand, &packet), is_false, "{what}");
                    for tags in [&[(0x8100, 7)][..], &[(0x88a8, 7), (0x8100, 8)]] {
                        let packet = tagged(&packet, tags);
                        assert_eq!(is_dropped(&stand, &packet), is_false, "{what}: tagged");
                    }
                }
            }
        }
    }
    let flows = stand.all_flows();
    let clients = flows.iter().filter(|(flow, _)| !flow.inbound);
    let is_real = |source| hosts().iter().any(|hosts| hosts.client == source);
    assert!(clients.clone().count() > 0);
    assert!(
        clients.clone().all(|(flow, _)| is_real(flow.source)),
        "{flows:?}"
    );
}

#[test]
#[ignore = "needs root"]
fn an_address_that_the_host_has_no_more_may_come() {
    let stand = stand();
    let [v4, _] = hosts();
    let packet = at_uplink((ip("192.0.2.77"), 4000), (v4.endpoint, 80), UDP);
    assert!(is_dropped(&stand, &packet));
    has(&stand, &[("172.30.0.1/32", IFINDEX)]);
    assert!(!is_dropped(&stand, &packet));
}

#[test]
#[ignore = "needs root"]
fn everybody_may_be_asked_without_an_address() {
    let stand = stand();
    for (to, is_false) in [
        ("255.255.255.255", false),
        ("224.0.0.22", false),
        ("172.30.0.255", true),
    ] {
        let packet = at_uplink((ip("0.0.0.0"), 68), (ip(to), 67), UDP);
        assert_eq!(is_dropped(&stand, &packet), is_false, "{to}");
    }
    for (to, is_false) in [
        ("ff02::1:ff00:9", false),
        ("ff02::16", false),
        ("fd00:30::1", true),
    ] {
        let packet = at_uplink((ip("::"), 1), (ip(to), 2), UDP);
        assert_eq!(is_dropped(&stand, &packet), is_false, "{to}");
    }
}

/// A neighbour discovery message about an address, with this hop limit.
fn discovery(kind: u8, source: &str, to: &str, hop_limit: u8) -> Vec<u8> {
    let header = Ipv6 {
        hop_limit,
        next_header: ICMPV6,
        ..Ipv6::icmp(source.parse().expect(source), to.parse().expect(to))
    };
    let about: Ipv6Addr = source.parse().expect(source);
    let message = echo(kind, 0, 0, 0, &about.octets());
    let packet = header.packet(&header.with_checksum(message));
    ethernet([0; 6], [2, 0, 0, 0, 0, 2], IPV6, &packet)
}

#[test]
#[ignore = "needs root"]
fn neighbours_may_report_that_they_have_an_address_of_this_host_too() {
    const ADVERTISEMENT: u8 = 136;
    let stand = stand();
    has(
        &stand,
        &[("fe80::7/128", IFINDEX), ("fd00:30::1/128", IFINDEX)],
    );
    for source in ["fe80::7", "fd00:30::1"] {
        for (kind, to, hop_limit, is_false) in [
            (ADVERTISEMENT, "ff02::1", 255, false),
            // A routed one, a unicast one, and another kind of message.
            (ADVERTISEMENT, "ff02::1", 254, true),
            (ADVERTISEMENT, "fd00:10:244:1::9", 255, true),
            (128, "ff02::1", 255, true),
        ] {
            let packet = discovery(kind, source, to, hop_limit);
            assert_eq!(
                is_dropped(&stand, &packet),
                is_false,
                "{source} {kind} {to}"
            );
        }
    }
}

#[test]
#[ignore = "needs root"]
fn two_links_may_have_the_same_link_local_address() {
    let stand = stand();
    let packet = at_uplink((ip("fe80::7"), 1), (ip("fe80::1"), 2), UDP);
    has(&stand, &[("fe80::7/128", IFINDEX + 1)]);
    assert!(!is_dropped(&stand, &packet));
    has(&stand, &[("fe80::7/128", IFINDEX)]);
    assert!(is_dropped(&stand, &packet));
}

#[test]
#[ignore = "needs root"]
fn no_packet_of_ipv6_is_from_or_to_an_address_of_ipv4() {
    let stand = stand();
    let [_, v6] = hosts();
    let udp = with_ports(4000, NODE_PORT);
    for mapped in MAPPED.map(ip) {
        for to in [v6.endpoint, v6.node, v6.elsewhere, mapped] {
            let packet = at_uplink((mapped, 4000), (to, NODE_PORT), UDP);
            assert!(is_dropped(&stand, &packet), "{mapped} {to}");
        }
        let packet = at_uplink((v6.client, 4000), (mapped, NODE_PORT), UDP);
        assert!(is_dropped(&stand, &packet), "to {mapped}");

        // From the endpoint and to it.
        for (way, reason) in [(Out, Reason::InvalidPacket), (In, Reason::InvalidSource)] {
            let before = stand.run.counted(reason);
            let packet = frame(way, mapped, UDP, &udp);
            let outcome = stand.run.run(way.program(), &packet);
            let expected = Outcome {
                code: DROP,
                bytes: packet,
            };
            assert_eq!(outcome, expected, "{way:?} {mapped}");
            assert_eq!(stand.run.counted(reason), before + 1, "{way:?} {mapped}");
        }
        let IpAddr::V6(mapped) = mapped else {
            unreachable!("an address of IPv6")
        };
        for (way, ends, reason) in [
            (Out, (mapped, ENDPOINT6), Reason::InvalidSource),
            (Out, (mapped, mapped), Reason::InvalidSource),
            (In, (ENDPOINT6, mapped), Reason::InvalidPacket),
        ] {
            let header = Ipv6 {
                next_header: UDP,
                ..Ipv6::icmp(ends.0, ends.1)
            };
            let before = stand.run.counted(reason);
            let packet = framed(way, &header.packet(&udp));
            assert_eq!(stand.run.run(way.program(), &packet).code, DROP);
            assert_eq!(stand.run.counted(reason), before + 1, "{way:?} {ends:?}");
        }
    }
    assert_eq!(stand.all_flows(), []);
    let flows = stand.run.maps().conntrack().expect("the flows");
    assert_eq!(flows, []);
}

#[test]
#[ignore = "needs root"]
fn what_is_no_ip_is_left_alone_at_an_uplink() {
    let stand = stand();
    for packet in [
        ethernet([0; 6], [2, 0, 0, 0, 0, 2], ARP, &[0; 28]),
        ethernet([0; 6], [2, 0, 0, 0, 0, 2], 0x88cc, &[0; 40]),
    ] {
        assert_eq!(stand.run.run("from_netdev", &packet).code, GO_ON);
    }
}
