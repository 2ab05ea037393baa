//! ICMP errors about flows through services: each receiver finds its own packet quoted in the error.

use std::net::IpAddr;
use std::ops::RangeFrom;

use tests::packet::{checksum, transport_checksum};
use tests::testrun::{GO_ON, REDIRECT};

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{
    ACK, ICMP, ICMPV6, SYN, TCP, UDP, Way, frame, hosts as ends, segment, with_ports,
};
use crate::service_packets::{
    BACKEND_PORT, Hosts, NODE_PORT, Stand, at_uplink, frame_at_uplink, hosts, segment_at_uplink,
    two_services,
};

const CLIENT_PORTS: RangeFrom<u16> = 4000..;
const ETHERNET_LEN: usize = 14;

/// The kind of an error.
#[derive(Clone, Copy, Debug)]
enum Says {
    /// Nothing listens on the port.
    Unreachable,
    /// The packet exceeds the MTU of the next link.
    TooBig,
}
use Says::{TooBig, Unreachable};

/// An ICMP error message about the packet in a frame. It quotes the whole packet or only the required minimum.
fn error(says: Says, source: IpAddr, destination: IpAddr, about: &[u8], is_short: bool) -> Vec<u8> {
    let packet = &about[ETHERNET_LEN..];
    let header_len = if source.is_ipv4() { 20 } else { 40 };
    let quoted = if is_short {
        &packet[..header_len + 8]
    } else {
        packet
    };
    let (start, rest) = match (says, source.is_ipv4()) {
        (Unreachable, true) => ([3, 3], [0; 4]),
        (TooBig, true) => ([3, 4], [0, 0, 5, 0]),
        (Unreachable, false) => ([1, 4], [0; 4]),
        (TooBig, false) => ([2, 0], [0, 0, 5, 0]),
    };
    let mut message = [&start[..], &[0, 0], &rest, quoted].concat();
    let check = match source {
        IpAddr::V4(_) => checksum(&[&message]),
        IpAddr::V6(_) => transport_checksum(source, destination, ICMPV6, &message),
    };
    message[2..4].copy_from_slice(&check.to_be_bytes());
    message
}

fn icmp(peer: IpAddr) -> u8 {
    if peer.is_ipv4() { ICMP } else { ICMPV6 }
}

/// An error to or from the endpoint.
fn at_endpoint(way: Way, peer: IpAddr, says: Says, about: &[u8], is_short: bool) -> Vec<u8> {
    let (source, destination) = ends(way, peer);
    let message = error(says, source, destination, about, is_short);
    frame(way, peer, icmp(peer), &message)
}

fn error_at_uplink(
    source: IpAddr,
    destination: IpAddr,
    says: Says,
    about: &[u8],
    is_short: bool,
) -> Vec<u8> {
    let message = error(says, source, destination, about, is_short);
    frame_at_uplink(source, destination, icmp(source), &message)
}

/// A packet from or to the endpoint.
fn packet(protocol: u8, way: Way, peer: (IpAddr, u16), port: u16, flags: u8) -> Vec<u8> {
    let ports = match way {
        Out => (port, peer.1),
        In => (peer.1, port),
    };
    match protocol {
        TCP => segment(way, peer.0, ports, flags),
        protocol => frame(way, peer.0, protocol, &with_ports(ports.0, ports.1)),
    }
}

fn source_port(frame: &[u8], like: IpAddr) -> u16 {
    let at = ETHERNET_LEN + if like.is_ipv4() { 20 } else { 40 };
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

/// The frame without its MAC addresses.
fn without_link(frame: &[u8]) -> &[u8] {
    &frame[ETHERNET_LEN - 2..]
}

/// A flow, and an error about it.
#[derive(Clone, Copy, Debug)]
struct Case {
    hosts: Hosts,
    protocol: u8,
    client_port: u16,
    says: Says,
    is_short: bool,
}

/// Runs the test for each IP version, protocol, kind of error, and quote length, with services that have this backend.
fn each(backend: fn(&Hosts) -> IpAddr, test: impl Fn(&Stand, Case)) {
    let mut stand = Stand::new();
    let mut client_ports = CLIENT_PORTS;
    for hosts in hosts() {
        for protocol in [TCP, UDP] {
            stand.serve(&two_services(protocol, &hosts, backend(&hosts)));
            for says in [Unreachable, TooBig] {
                for is_short in [false, true] {
                    let case = Case {
                        hosts,
                        protocol,
                        client_port: client_ports.next().expect("a port"),
                        says,
                        is_short,
                    };
                    test(&stand, case);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_hears_of_its_own_packet_whatever_port_the_backend_saw() {
    each(
        |hosts| hosts.elsewhere,
        |stand, case| {
            let Case {
                hosts,
                protocol,
                client_port,
                says,
                is_short,
            } = case;
            for (place, asked) in [hosts.cluster_ip, hosts.node].into_iter().enumerate() {
                let asked = (asked, NODE_PORT);
                let sent = packet(protocol, Out, asked, client_port, SYN);
                let seen = stand.run.run(Out.program(), &sent).bytes;
                let is_moved = source_port(&seen, asked.0) != client_port;
                assert_eq!(is_moved, place == 1);
                // From the backend, and from a router on the path to it; the router's address stays the same.
                for (from, as_seen) in [(hosts.elsewhere, asked.0), (hosts.client, hosts.client)] {
                    let got = at_endpoint(In, from, says, &seen, is_short);
                    let outcome = stand.run.run(In.program(), &got);
                    let expected = at_endpoint(In, as_seen, says, &sent, is_short);
                    assert_eq!(
                        (outcome.code, outcome.bytes),
                        (GO_ON, expected),
                        "{case:?} {is_moved}"
                    );
                }
            }
        },
    );
}

#[test]
#[ignore = "needs root"]
fn a_client_outside_hears_of_its_own_packet_whatever_port_the_backend_saw() {
    each(
        |hosts| hosts.endpoint,
        |stand, case| {
            let Case {
                hosts,
                protocol,
                client_port,
                says,
                is_short,
            } = case;
            for (place, asked) in [hosts.cluster_ip, hosts.node].into_iter().enumerate() {
                let (asked, client) = ((asked, NODE_PORT), (hosts.client, client_port));
                let sent = match protocol {
                    TCP => segment_at_uplink(client, asked, SYN),
                    _ => at_uplink(client, asked, UDP),
                };
                let seen = stand.run.run("from_netdev", &sent).bytes;
                let is_moved = source_port(&seen, asked.0) != client_port;
                assert_eq!(is_moved, place == 1);
                assert_eq!(stand.run.run(In.program(), &seen).code, GO_ON);
                let error = at_endpoint(Out, hosts.client, says, &seen, is_short);
                let outcome = stand.run.run(Out.program(), &error);
                assert_eq!((outcome.code, &outcome.bytes), (GO_ON, &error));
                let leaving = error_at_uplink(hosts.endpoint, hosts.client, says, &seen, is_short);
                let outcome = stand.run.run("to_netdev", &leaving);
                let expected = error_at_uplink(asked.0, hosts.client, says, &sent, is_short);
                assert_eq!(
                    (outcome.code, outcome.bytes),
                    (GO_ON, expected),
                    "{case:?} {is_moved}"
                );
            }
        },
    );
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_that_is_its_own_backend_gets_its_errors_on_either_side() {
    each(
        |hosts| hosts.endpoint,
        |stand, case| {
            let Case {
                hosts,
                protocol,
                client_port,
                says,
                is_short,
            } = case;
            let run = |packet: &[u8]| {
                let outcome = stand.run.run(Out.program(), packet);
                assert_eq!(outcome.code, REDIRECT, "{case:?}");
                outcome.bytes
            };
            for (place, asked) in [hosts.cluster_ip, hosts.node].into_iter().enumerate() {
                let asked = (asked, NODE_PORT);
                let sent = packet(protocol, Out, asked, client_port, SYN);
                let seen = run(&sent);
                let port = source_port(&seen, asked.0);
                assert_eq!(port != client_port, place == 1);
                let reported = run(&at_endpoint(Out, hosts.gateway, says, &seen, is_short));
                let expected = at_endpoint(In, asked.0, says, &sent, is_short);
                assert_eq!(
                    without_link(&reported),
                    without_link(&expected),
                    "to the client: {case:?}"
                );
                let answer = packet(
                    protocol,
                    Out,
                    (hosts.gateway, port),
                    BACKEND_PORT,
                    SYN | ACK,
                );
                let answered = run(&answer);
                let reported = run(&at_endpoint(Out, asked.0, says, &answered, is_short));
                let expected = at_endpoint(In, hosts.gateway, says, &answer, is_short);
                assert_eq!(
                    without_link(&reported),
                    without_link(&expected),
                    "to the backend: {case:?}"
                );
            }
        },
    );
}

#[test]
#[ignore = "needs root"]
fn a_backend_hears_of_its_own_answer() {
    each(
        |hosts| hosts.elsewhere,
        |stand, case| {
            let Case {
                hosts,
                protocol,
                client_port,
                says,
                is_short,
            } = case;
            for asked in [hosts.cluster_ip, hosts.node] {
                let asked = (asked, NODE_PORT);
                let sent = packet(protocol, Out, asked, client_port, SYN);
                let seen = stand.run.run(Out.program(), &sent).bytes;
                let port = source_port(&seen, asked.0);
                let backend = (hosts.elsewhere, BACKEND_PORT);
                let answer = packet(protocol, In, backend, port, SYN | ACK);
                let answered = stand.run.run(In.program(), &answer).bytes;
                let reported = at_endpoint(Out, asked.0, says, &answered, is_short);
                let outcome = stand.run.run(Out.program(), &reported);
                let expected = at_endpoint(Out, backend.0, says, &answer, is_short);
                assert_eq!((outcome.code, outcome.bytes), (GO_ON, expected), "{case:?}");
            }
        },
    );
}
