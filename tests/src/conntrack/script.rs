//! Scripts of flows: the sequence of packets between two hosts.

use std::net::IpAddr;

use super::packets::{
    Hosts, IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP, IP_PROTOCOL_UDPLITE, echo_message, fragments, icmp,
    icmp_protocol, packet, sctp, tcp, udp, udplite,
};
use crate::packet::{Tcp, payload};

/// FIN flag of a TCP segment.
pub const FIN: u8 = 1;
/// SYN flag.
pub const SYN: u8 = 2;
/// RST flag.
pub const RST: u8 = 4;
/// ACK flag.
pub const ACK: u8 = 16;
/// URG flag, for urgent data.
pub const URG: u8 = 0x20;
/// ECE and CWR flags, which a SYN sets to offer explicit congestion notification.
pub const ECN: u8 = 0xc0;

const IP_PROTOCOL_TCP: u8 = 6;
/// The opener's first sequence number. The other side starts at twice this number.
const FIRST: u32 = 1_000_000;
const WINDOW: u16 = 65_000;
/// Bytes of payload in each fragment.
const FRAGMENT_LEN: usize = 1_200;

/// The sender of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that sends the flow's first packet.
    Opener,
    /// The other side.
    Answerer,
}

/// The sequence number of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sequence {
    /// The next sequence number.
    Next,
    /// The sequence number of this side's last segment.
    Again,
    /// The next sequence number plus this offset.
    Ahead(i32),
    /// Zero, as in a RST in reply to a segment without ACK, which acknowledges everything received.
    Zero,
}

/// A TCP segment.
#[derive(Clone, Debug)]
pub struct Segment {
    flags: u8,
    len: usize,
    sequence: Sequence,
    window: u16,
    is_damaged: bool,
}

/// Builds a segment with these flags and no data.
pub fn segment(flags: u8) -> Segment {
    Segment {
        flags,
        len: 0,
        sequence: Sequence::Next,
        window: WINDOW,
        is_damaged: false,
    }
}

impl Segment {
    /// Adds `len` bytes of data.
    pub fn data(self, len: usize) -> Self {
        Self { len, ..self }
    }

    /// Repeats the sequence number of this side's last segment.
    pub fn again(self) -> Self {
        Self {
            sequence: Sequence::Again,
            ..self
        }
    }

    /// Uses a sequence number that is `by` ahead of the expected one.
    pub fn ahead(self, by: i32) -> Self {
        Self {
            sequence: Sequence::Ahead(by),
            ..self
        }
    }

    /// Uses sequence number zero.
    pub fn of_nothing(self) -> Self {
        Self {
            sequence: Sequence::Zero,
            ..self
        }
    }

    /// Advertises a window of zero.
    pub fn without_window(self) -> Self {
        Self { window: 0, ..self }
    }

    /// Uses a wrong checksum.
    pub fn damaged(self) -> Self {
        Self {
            is_damaged: true,
            ..self
        }
    }
}

/// Type and code of an ICMP error.
pub type ErrorKind = (u8, u8);

/// The packet that an ICMP error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// The last packet of the other side.
    Last,
    /// The last packet of the side that sends the error.
    Own,
    /// A packet that was never sent, to an unused port.
    Unsent,
}

/// The content that a side sends.
#[derive(Clone, Debug)]
pub enum Content {
    /// A TCP segment.
    Segment(Segment),
    /// A TCP segment that is lost before it reaches the node.
    Lost(Segment),
    /// A UDP datagram with this many bytes.
    Datagram(usize),
    /// A UDP-Lite datagram.
    LiteDatagram,
    /// An echo request.
    Request,
    /// An echo reply.
    Reply,
    /// An ICMP message of this type, with an identifier.
    Message(u8),
    /// A packet of this IP protocol, with zeros as content.
    Protocol(u8),
    /// An SCTP chunk of this type.
    Chunk(u8),
    /// An ICMP error.
    Error(ErrorKind, About),
    /// An ICMP error with a wrong checksum, about the last packet.
    DamagedError(ErrorKind),
    /// Fragments of a datagram: the total number of fragments, then the indexes of those to send, in this order.
    Parts(usize, &'static [usize]),
}

/// A conversation between two hosts.
#[derive(Clone, Debug)]
pub struct Talk {
    /// The opener and the answerer.
    hosts: Hosts,
    ports: (u16, u16),
    /// The next sequence number of each side.
    next: [u32; 2],
    /// The sequence number of each side's last segment.
    last_sequence: [u32; 2],
    /// The last packet of each side.
    last: [Vec<u8>; 2],
    /// Identification of the last fragmented packet.
    fragment_id: u16,
}

impl Talk {
    /// Creates a conversation that has not started.
    pub fn new(opener: IpAddr, answerer: IpAddr, ports: (u16, u16)) -> Self {
        Self {
            hosts: (opener, answerer),
            ports,
            next: [FIRST, 2 * FIRST],
            last_sequence: [FIRST, 2 * FIRST],
            last: [Vec::new(), Vec::new()],
            fragment_id: ports.0,
        }
    }

    /// Addresses and ports, as source and destination of this side's packets.
    fn ends(&self, side: Side) -> (Hosts, (u16, u16)) {
        let (opener, answerer) = self.hosts;
        let (source, destination) = self.ports;
        match side {
            Side::Opener => (self.hosts, self.ports),
            Side::Answerer => ((answerer, opener), (destination, source)),
        }
    }

    /// Builds the IP packets for the content that a side sends.
    pub fn say(&mut self, side: Side, content: &Content) -> Vec<Vec<u8>> {
        let (hosts, ports) = self.ends(side);
        let (protocol, bytes) = match content {
            Content::Segment(segment) => (IP_PROTOCOL_TCP, self.segment(side, segment)),
            Content::Lost(segment) => {
                self.segment(side, segment);
                return Vec::new();
            }
            Content::Datagram(len) => (IP_PROTOCOL_UDP, udp(hosts, ports, &payload(*len))),
            Content::LiteDatagram => (IP_PROTOCOL_UDPLITE, udplite(hosts, ports, &payload(30))),
            Content::Request => (icmp_protocol(hosts), self.echo(hosts, false)),
            Content::Reply => (icmp_protocol(hosts), self.echo(hosts, true)),
            Content::Message(kind) => {
                let id = self.ports.0.to_be_bytes();
                let message = [&[*kind, 0, 0, 0][..], &id, &[0; 14]].concat();
                (icmp_protocol(hosts), icmp(hosts, message))
            }
            Content::Protocol(protocol) => (*protocol, vec![0; 36]),
            Content::Chunk(kind) => (IP_PROTOCOL_SCTP, self.chunk(side, *kind)),
            Content::Error(kind, about) => (icmp_protocol(hosts), self.error(side, *kind, *about)),
            Content::DamagedError(kind) => {
                let mut error = self.error(side, *kind, About::Last);
                error[2] ^= 0x55;
                (icmp_protocol(hosts), error)
            }
            Content::Parts(count, order) => {
                let datagram = udp(hosts, ports, &payload((count - 1) * FRAGMENT_LEN + 100));
                self.fragment_id = self.fragment_id.wrapping_add(1);
                let all = fragments(
                    hosts,
                    IP_PROTOCOL_UDP,
                    &datagram,
                    self.fragment_id,
                    FRAGMENT_LEN,
                );
                return order.iter().map(|&index| all[index].clone()).collect();
            }
        };
        let packet = packet(hosts, protocol, &bytes);
        if !matches!(content, Content::Error(..) | Content::DamagedError(_)) {
            self.last[side as usize] = packet.clone();
        }
        vec![packet]
    }

    fn segment(&mut self, side: Side, segment: &Segment) -> Vec<u8> {
        let (hosts, ports) = self.ends(side);
        let own = side as usize;
        let sequence = match segment.sequence {
            Sequence::Next => self.next[own],
            Sequence::Again => self.last_sequence[own],
            Sequence::Ahead(by) => self.next[own].wrapping_add_signed(by),
            Sequence::Zero => 0,
        };
        let acknowledgement = if segment.flags & ACK == 0 {
            0
        } else {
            self.next[1 - own]
        };
        let built = Tcp {
            source: ports.0,
            destination: ports.1,
            sequence,
            acknowledgement,
            flags: segment.flags,
            options: Vec::new(),
            data: payload(segment.len),
        };
        if let Sequence::Next | Sequence::Again = segment.sequence {
            let taken = segment.len as u32 + u32::from(segment.flags & (SYN | FIN) != 0);
            if taken > 0 {
                self.last_sequence[own] = sequence;
            }
            self.next[own] = sequence.wrapping_add(taken).max(self.next[own]);
        }
        let mut bytes = tcp(hosts, &built, segment.window);
        if segment.is_damaged {
            bytes[16] ^= 0x55;
        }
        bytes
    }

    fn echo(&self, hosts: Hosts, is_reply: bool) -> Vec<u8> {
        echo_message(hosts, is_reply, self.ports.0, &payload(56))
    }

    fn chunk(&self, side: Side, kind: u8) -> Vec<u8> {
        const INIT: u8 = 1;
        const INIT_ACK: u8 = 2;
        let (_, ports) = self.ends(side);
        // Each side's packets carry the tag that the other side chose.
        let tags = [0x1111_u32, 0x2222];
        let tag = if kind == INIT {
            0
        } else {
            tags[1 - side as usize]
        };
        let value = match kind {
            INIT | INIT_ACK => {
                let mut value = tags[side as usize].to_be_bytes().to_vec();
                value.extend([0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
                value
            }
            _ => vec![0; 12],
        };
        sctp(ports, tag, kind, &value)
    }

    fn error(&self, side: Side, (kind, code): ErrorKind, about: About) -> Vec<u8> {
        let (hosts, _) = self.ends(side);
        let own = side as usize;
        let about = match about {
            About::Last => self.last[1 - own].clone(),
            About::Own => self.last[own].clone(),
            About::Unsent => {
                let (source, destination) = hosts;
                let other = (destination, source);
                packet(other, IP_PROTOCOL_UDP, &udp(other, (7, 7), &payload(30)))
            }
        };
        let rest = match (hosts.0.is_ipv4(), kind, code) {
            // The MTU of the next hop (RFC 1191, RFC 4443 section 3.2).
            (true, 3, 4) | (false, 2, 0) => 1_280_u32,
            _ => 0,
        };
        let mut message = vec![kind, code, 0, 0];
        message.extend(rest.to_be_bytes());
        message.extend(about);
        icmp(hosts, message)
    }
}
