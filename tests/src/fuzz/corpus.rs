//! The packets that fuzzing starts from: conversations of an endpoint, of a client behind this node and of the node
//! itself, as seen by each of the programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::shape::{FRAGMENT, ICMP, ICMPV6, TCP, UDP, mend_checksums, mend_lengths};
use super::{KEY, PROBE_ID, Program, SESSION};
use crate::packet::{ARP, IPV4, IPV6, Ipv4, Ipv6, Probe, Tcp, echo, ethernet, payload, tagged};

/// Hardware addresses of the endpoint and of the host's end of its veth.
pub(super) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
pub(super) const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

const GRE: u8 = 47;
const SCTP: u8 = 132;
const HOP_BY_HOP: u8 = 0;
const DESTINATION_OPTIONS: u8 = 60;
const MORE_FRAGMENTS: u16 = 0x2000;

/// A participant's IPv4 and IPv6 addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Ipv6Addr,
}

impl Host {
    const fn new(v4: [u8; 4], v6: [u16; 8]) -> Self {
        let ([a, b, c, d], [e, f, g, h, i, j, k, l]) = (v4, v6);
        Self {
            v4: Ipv4Addr::new(a, b, c, d),
            v6: Ipv6Addr::new(e, f, g, h, i, j, k, l),
        }
    }

    fn of(self, is_v4: bool) -> IpAddr {
        if is_v4 {
            self.v4.into()
        } else {
            self.v6.into()
        }
    }
}

/// The health endpoint.
pub(super) const ENDPOINT: Host = Host::new([10, 244, 1, 7], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7]);
/// The gateway of this node's endpoints.
pub(super) const GATEWAY: Host = Host::new([10, 244, 1, 1], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1]);
/// This node.
pub(super) const NODE: Host = Host::new([172, 30, 0, 1], [0xfd00, 0x30, 0, 0, 0, 0, 0, 1]);
/// Another node, which is probed.
pub(super) const PEER: Host = Host::new([172, 30, 0, 2], [0xfd00, 0x30, 0, 0, 0, 0, 0, 2]);
/// A client whose gateway is this node.
pub(super) const CLIENT: Host = Host::new([192, 168, 77, 5], [0xfd00, 0x77, 0, 0, 0, 0, 0, 5]);
/// A host outside the cluster.
pub(super) const FAR: Host = Host::new([192, 0, 2, 9], [0x2001, 0xdb8, 0, 0, 0, 0, 0, 9]);
/// A host outside the cluster for which addresses are not masqueraded.
const EXCLUDED: Host = Host::new([198, 51, 100, 9], [0xfd00, 0x10, 0x244, 2, 0, 0, 0, 9]);
/// A router on the path to all these hosts.
const ROUTER: Host = Host::new([172, 30, 0, 254], [0xfd00, 0x30, 0, 0, 0, 0, 0, 0xfe]);

pub(super) const HOSTS: [Host; 8] = [ENDPOINT, GATEWAY, NODE, PEER, CLIENT, FAR, ROUTER, EXCLUDED];

/// Ports of all flows: the opener's and the other side's.
pub(super) const PORTS: (u16, u16) = (40_000, 80);

/// A packet and the program that sees it.
#[derive(Clone, Debug)]
pub(super) struct Seed {
    pub(super) program: Program,
    pub(super) frame: Vec<u8>,
}

/// A point at which a packet is seen, and the packet's addresses there.
#[derive(Clone, Copy)]
struct View {
    program: Program,
    from: Host,
    to: Host,
    /// Whether the opener sends it.
    is_forth: bool,
}

const fn view(program: Program, from: Host, to: Host, is_forth: bool) -> View {
    View {
        program,
        from,
        to,
        is_forth,
    }
}

/// Each conversation as seen at each point, before and after any NAT.
const VIEWS: [View; 14] = [
    // The endpoint opens a flow to the outside, masqueraded at the uplink.
    view(Program::FromEndpoint, ENDPOINT, FAR, true),
    view(Program::ToNetdev, ENDPOINT, FAR, true),
    view(Program::FromNetdev, FAR, NODE, false),
    view(Program::ToEndpoint, FAR, ENDPOINT, false),
    // A client behind this node opens one too.
    view(Program::ToNetdev, CLIENT, FAR, true),
    // A flow inside the cluster, opened by the peer.
    view(Program::FromNetdev, PEER, ENDPOINT, true),
    view(Program::ToEndpoint, PEER, ENDPOINT, true),
    view(Program::FromEndpoint, ENDPOINT, PEER, false),
    view(Program::ToNetdev, ENDPOINT, PEER, false),
    // Flows of the host itself.
    view(Program::ToNetdev, NODE, FAR, true),
    view(Program::ToNetdev, NODE, PEER, true),
    view(Program::FromNetdev, PEER, NODE, false),
    // Flows opened from outside.
    view(Program::FromNetdev, FAR, NODE, true),
    view(Program::FromEndpoint, ENDPOINT, GATEWAY, true),
];

/// The whole corpus.
pub(super) fn corpus() -> Vec<Seed> {
    let mut corpus = Vec::new();
    for is_v4 in [true, false] {
        for view in &VIEWS {
            conversation(view, is_v4, &mut corpus);
        }
        probes(is_v4, &mut corpus);
    }
    neighbours(&mut corpus);
    let vlans: Vec<Seed> = corpus.iter().step_by(7).map(in_vlan).collect();
    corpus.extend(vlans);
    corpus
}

/// Adds packets of each protocol in all relevant forms.
fn conversation(view: &View, is_v4: bool, corpus: &mut Vec<Seed>) {
    let mut add = |frame: Vec<u8>| {
        corpus.push(Seed {
            program: view.program,
            frame,
        });
    };
    let contents = contents(view, is_v4);
    for (protocol, content) in &contents {
        add(frame(view, is_v4, *protocol, content));
    }
    for (protocol, content) in &contents {
        // Errors about a packet in the other direction.
        let back = View {
            from: view.to,
            to: view.from,
            is_forth: !view.is_forth,
            ..*view
        };
        let about = frame(&back, is_v4, *protocol, content);
        for kind in error_kinds(is_v4) {
            let sender = if kind[0] == 11 { ROUTER } else { view.from };
            let from_there = View {
                from: sender,
                ..*view
            };
            let len = about.len().min(14 + 40 + 64);
            let message = [&kind[..], &[0, 0, 0, 0, 0x05, 0x14], &about[14..len]].concat();
            add(frame(&from_there, is_v4, icmp(is_v4), &message));
        }
    }
    let datagram = with_ports(view, 1400);
    for offset in [0, 480, 960] {
        let is_last = offset == 960;
        let part = &datagram[offset..if is_last {
            datagram.len()
        } else {
            offset + 480
        }];
        add(fragment(view, is_v4, offset as u16, !is_last, part));
    }
    let segment = tcp(view, is_v4, 16, b"behind more headers");
    if is_v4 {
        for options in [vec![1; 4], vec![148, 4, 0, 0], vec![7, 7, 4, 0, 0, 0, 0, 0]] {
            for (protocol, content) in [(TCP, &segment), (ICMP, &echo(8, 0, 5, 6, b"options"))] {
                let ip = Ipv4 {
                    protocol,
                    options: options.clone(),
                    ..Ipv4::icmp(view.from.v4, view.to.v4)
                };
                add(ether(view, IPV4, &ip.packet(content)));
            }
        }
    } else {
        let hop = [DESTINATION_OPTIONS, 0, 1, 4, 0, 0, 0, 0];
        let destination = [TCP, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let content = [&hop[..], &destination, &segment].concat();
        add(frame(view, is_v4, HOP_BY_HOP, &content));
    }
}

/// Protocols and contents of packets. Checksums are filled in later.
fn contents(view: &View, is_v4: bool) -> Vec<(u8, Vec<u8>)> {
    let mut contents = Vec::new();
    for (flags, data) in [(2, ""), (18, ""), (16, "some data"), (17, ""), (4, "")] {
        contents.push((TCP, tcp(view, is_v4, flags, data.as_bytes())));
    }
    contents.push((UDP, with_ports(view, 33)));
    let (request, reply) = if is_v4 { (8, 0) } else { (128, 129) };
    let kind = if view.is_forth { request } else { reply };
    contents.push((icmp(is_v4), echo(kind, 0, PORTS.0, 3, &payload(57))));
    contents.push((icmp(is_v4), echo(request, 0, 7, 3, b"")));
    contents.push((SCTP, with_ports(view, 20)));
    contents.push((GRE, payload(24)));
    contents
}

fn tcp(view: &View, is_v4: bool, flags: u8, data: &[u8]) -> Vec<u8> {
    let (source, destination) = ports(view);
    let tcp = Tcp {
        source,
        destination,
        sequence: 1000,
        acknowledgement: 2000,
        flags,
        options: crate::packet::timestamps(77, 66),
        data: data.to_vec(),
    };
    tcp.segment(view.from.of(is_v4), view.to.of(is_v4))
}

/// Ports followed by `len` bytes: a UDP datagram whose length and checksum are filled in later.
fn with_ports(view: &View, len: usize) -> Vec<u8> {
    let (source, destination) = ports(view);
    let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    [&ports[..], &payload(len)].concat()
}

fn ports(view: &View) -> (u16, u16) {
    let (opener, other) = PORTS;
    if view.is_forth {
        (opener, other)
    } else {
        (other, opener)
    }
}

fn icmp(is_v4: bool) -> u8 {
    if is_v4 { ICMP } else { ICMPV6 }
}

/// ICMP type and code: unreachable, too large, time exceeded.
fn error_kinds(is_v4: bool) -> [[u8; 2]; 3] {
    if is_v4 {
        [[3, 3], [3, 4], [11, 0]]
    } else {
        [[1, 4], [2, 0], [3, 0]]
    }
}

/// Builds a complete frame with correct lengths and checksums.
fn frame(view: &View, is_v4: bool, protocol: u8, content: &[u8]) -> Vec<u8> {
    let (ethertype, packet) = if is_v4 {
        let ip = Ipv4 {
            protocol,
            ..Ipv4::icmp(view.from.v4, view.to.v4)
        };
        (IPV4, ip.packet(content))
    } else {
        let ip = Ipv6 {
            next_header: protocol,
            ..Ipv6::icmp(view.from.v6, view.to.v6)
        };
        (IPV6, ip.packet(content))
    };
    ether(view, ethertype, &packet)
}

fn ether(view: &View, ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let (to, from) = match view.program {
        Program::FromEndpoint | Program::FromNetdev => (HOST_MAC, MAC),
        Program::ToEndpoint | Program::ToNetdev => (MAC, HOST_MAC),
    };
    let mut frame = ethernet(to, from, ethertype, packet);
    mend_lengths(&mut frame);
    mend_checksums(&mut frame);
    frame
}

/// Builds a fragment of a UDP datagram. The checksum of the datagram cannot be verified in a single fragment.
fn fragment(view: &View, is_v4: bool, offset: u16, more: bool, part: &[u8]) -> Vec<u8> {
    if is_v4 {
        let more = if more { MORE_FRAGMENTS } else { 0 };
        let ip = Ipv4 {
            id: 0x4711,
            fragment: more | (offset / 8),
            protocol: UDP,
            ..Ipv4::icmp(view.from.v4, view.to.v4)
        };
        return ether(view, IPV4, &ip.packet(part));
    }
    let [high, low] = (offset | u16::from(more)).to_be_bytes();
    let header = [UDP, 0, high, low, 0, 0, 0x47, 0x11];
    frame(view, is_v4, FRAGMENT, &[&header[..], part].concat())
}

/// Adds probes of this agent and of other agents, and replies to both, at the uplinks and at the endpoint.
fn probes(is_v4: bool, corpus: &mut Vec<Seed>) {
    let (request, reply) = if is_v4 { (8, 0) } else { (128, 129) };
    let own = (PROBE_ID, SESSION);
    let foreign = (!PROBE_ID, !SESSION);
    for (program, from, to, kind, (id, session)) in [
        (Program::ToNetdev, NODE, PEER, request, own),
        (Program::FromNetdev, PEER, NODE, reply, own),
        (Program::FromNetdev, PEER, NODE, request, foreign),
        (Program::ToNetdev, NODE, PEER, reply, foreign),
        (Program::ToEndpoint, PEER, ENDPOINT, request, foreign),
    ] {
        for sequence in 0..16 {
            let probe = Probe {
                key: KEY,
                id,
                sequence,
                session,
                round: sequence / 8,
                path: 1 + (sequence % 2) as u8,
                flags: (sequence / 2 % 2) as u8,
                turnround: if sequence % 4 == 3 { 1 << 63 } else { 0 },
                arrived: 0,
            };
            let message = echo(kind, 0, id, sequence, &probe.payload());
            let view = view(program, from, to, true);
            corpus.push(Seed {
                program,
                frame: frame(&view, is_v4, icmp(is_v4), &message),
            });
        }
    }
}

/// Adds neighbour requests from either side of the endpoint's veth.
fn neighbours(corpus: &mut Vec<Seed>) {
    for (program, asker, asked, mac) in [
        (Program::ToEndpoint, GATEWAY, ENDPOINT, HOST_MAC),
        (Program::FromEndpoint, ENDPOINT, GATEWAY, MAC),
    ] {
        let arp = [
            &[0, 1, 8, 0, 6, 4, 0, 1][..],
            &mac,
            &asker.v4.octets(),
            &[0; 6],
            &asked.v4.octets(),
        ];
        let request = ethernet([0xff; 6], mac, ARP, &arp.concat());

        let target = asked.v6.octets();
        let group = Ipv6Addr::from([
            0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, target[13], target[14], target[15],
        ]);
        let ip = Ipv6 {
            hop_limit: 255,
            ..Ipv6::icmp(asker.v6, group)
        };
        let solicitation = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target, &[1, 1], &mac].concat();
        let to_group = [0x33, 0x33, 0xff, target[13], target[14], target[15]];
        let packet = ip.packet(&ip.with_checksum(solicitation));
        let solicitation = ethernet(to_group, mac, IPV6, &packet);
        for frame in [request, solicitation] {
            corpus.push(Seed { program, frame });
        }
    }
}

fn in_vlan(seed: &Seed) -> Seed {
    let frame = tagged(&seed.frame, &[(0x8100, 42)]);
    Seed {
        frame,
        program: seed.program,
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Place, checksums};
    use super::*;

    #[test]
    fn packets_of_the_corpus_are_whole() {
        let corpus = corpus();
        assert!(corpus.len() > 1000, "{}", corpus.len());
        for Seed { frame, .. } in &corpus {
            for found in checksums(frame) {
                assert!(
                    matches!(found.error, Some(0)) || found.place == Place::InnerTransport,
                    "{found:?} of {frame:02x?}"
                );
            }
        }
    }
}
