//! ICMP echo wire format: outgoing requests, incoming replies and errors, for both IP versions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use health_common::checksum;
use health_common::probe::{ASK_ONE_WAY, PROBE_LEN, Path, ProbeId, ProbePayload};
use health_common::siphash::SipKey;

use crate::failure::IcmpError;

/// Length of a request in bytes: ICMP header and probe payload.
pub(super) const REQUEST_LEN: usize = ICMP_HEADER_LEN + PROBE_LEN;

const ICMP_HEADER_LEN: usize = 8;
const IPV4_MIN_HEADER_LEN: usize = 20;
const IPV6_HEADER_LEN: usize = 40;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_ICMPV6: u8 = 58;

/// IP version of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    /// IP version of an address.
    pub(super) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }

    /// Length of an IP header without options or extension headers, in bytes.
    const fn header_len(self) -> usize {
        match self {
            Self::V4 => IPV4_MIN_HEADER_LEN,
            Self::V6 => IPV6_HEADER_LEN,
        }
    }

    pub(super) const fn echo_request(self) -> u8 {
        match self {
            Self::V4 => 8,
            Self::V6 => 128,
        }
    }

    pub(super) const fn echo_reply(self) -> u8 {
        match self {
            Self::V4 => 0,
            Self::V6 => 129,
        }
    }

    /// Types of the errors that quote the packet they are about (RFC 792, RFC 4443 section 2.1).
    pub(super) const fn errors(self) -> &'static [u8] {
        match self {
            Self::V4 => &[3, 11, 12],
            Self::V6 => &[1, 2, 3, 4],
        }
    }
}

/// The identifying values in the probes of one agent.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Mark {
    /// ICMP identifier, host byte order.
    pub(in super::super) icmp_id: u16,
    /// See [`ProbeId`].
    pub(in super::super) session: u32,
    /// Key for the tags of the mesh's probes.
    pub(in super::super) key: SipKey,
    /// Whether peers are asked for the arrival times of probes.
    pub(in super::super) one_way: bool,
}

/// A received message that concerns a probe of this agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// An echo reply.
    Reply {
        /// The probe that it answers.
        number: ProbeId,
    },
    /// An echo reply with this agent's identifier but without the payload of a probe.
    Unmarked,
    /// An error that quotes the request.
    Error {
        /// Sequence number of the request, host byte order.
        sequence: u16,
        /// Destination of the request.
        destination: IpAddr,
        /// The error.
        error: IcmpError,
        /// If it was too big: the MTU of the next hop as the error's sender reports it, in bytes; 0 if not reported.
        next_hop_mtu: Option<u32>,
    },
}

/// Builds an echo request. For ICMPv6 the kernel fills in the checksum, because it knows the source address that the
/// checksum covers.
pub(super) fn request(
    family: Family,
    mark: Mark,
    number: ProbeId,
    path: Path,
) -> [u8; REQUEST_LEN] {
    let flags = if mark.one_way { ASK_ONE_WAY } else { 0 };
    let payload = ProbePayload::new(mark.key, mark.icmp_id, number, path, flags);
    let mut packet = [0; REQUEST_LEN];
    packet[0] = family.echo_request();
    packet[4..6].copy_from_slice(&mark.icmp_id.to_be_bytes());
    packet[6..8].copy_from_slice(&number.sequence.to_be_bytes());
    packet[ICMP_HEADER_LEN..].copy_from_slice(&payload.to_bytes());
    if family == Family::V4 {
        let mut words = [0; REQUEST_LEN / 2];
        for (word, pair) in words.iter_mut().zip(packet.chunks_exact(2)) {
            *word = u16::from_ne_bytes([pair[0], pair[1]]);
        }
        let check = !checksum::fold(checksum::sum(&words));
        packet[2..4].copy_from_slice(&check.to_ne_bytes());
    }
    packet
}

/// Builds an echo request for an IP packet of `size` bytes in total, without the IP header. Zeros are appended to the
/// probe payload; they do not change the checksum. Never shorter than a probe.
pub(super) fn sized_request(family: Family, mark: Mark, sequence: u16, size: usize) -> Vec<u8> {
    let number = ProbeId {
        session: mark.session,
        round: 0,
        sequence,
    };
    let mut packet = request(family, mark, number, Path::Host).to_vec();
    let len = size.saturating_sub(family.header_len());
    packet.resize(len.max(REQUEST_LEN), 0);
    packet
}

/// Parses a packet that a raw socket received from `from`: for IPv4 with the IP header, for IPv6 without. `None` if it
/// does not concern one of this agent's probes.
pub(super) fn parse(family: Family, mark: Mark, from: IpAddr, packet: &[u8]) -> Option<Message> {
    let icmp = match family {
        Family::V4 => packet.get(ipv4_header_len(packet)?..)?,
        Family::V6 => packet,
    };
    let (&kind, &code) = (icmp.first()?, icmp.get(1)?);
    if kind == family.echo_reply() {
        let sequence = echo_sequence(icmp, mark)?;
        let payload = icmp.get(ICMP_HEADER_LEN..ICMP_HEADER_LEN + PROBE_LEN);
        let number = payload
            .and_then(ProbePayload::from_bytes)
            .filter(|payload| payload.is_genuine(mark.key, mark.icmp_id.to_be(), sequence.to_be()))
            .map(|payload| payload.id(sequence.to_be()))
            .filter(|number| number.session == mark.session);
        return Some(match number {
            Some(number) => Message::Reply { number },
            None => Message::Unmarked,
        });
    }
    if !family.errors().contains(&kind) {
        return None;
    }
    let quoted = icmp.get(ICMP_HEADER_LEN..)?;
    let (destination, quoted_icmp) = match family {
        Family::V4 => {
            let header_len = ipv4_header_len(quoted)?;
            let destination: [u8; 4] = quoted.get(16..20)?.try_into().ok()?;
            if quoted[9] != PROTOCOL_ICMP {
                return None;
            }
            (
                Ipv4Addr::from(destination).into(),
                quoted.get(header_len..)?,
            )
        }
        Family::V6 => {
            let destination: [u8; 16] = quoted.get(24..IPV6_HEADER_LEN)?.try_into().ok()?;
            if quoted[6] != PROTOCOL_ICMPV6 {
                return None;
            }
            (
                Ipv6Addr::from(destination).into(),
                &quoted[IPV6_HEADER_LEN..],
            )
        }
    };
    if *quoted_icmp.first()? != family.echo_request() {
        return None;
    }
    Some(Message::Error {
        sequence: echo_sequence(quoted_icmp, mark)?,
        destination,
        error: IcmpError { kind, code, from },
        next_hop_mtu: next_hop_mtu(family, kind, code, icmp),
    })
}

/// The MTU in an error that reports a packet as too big (RFC 1191 section 4, RFC 4443 section 3.2). In IPv4 the same
/// word may also hold the length of the quoted packet (RFC 4884 section 4.1).
fn next_hop_mtu(family: Family, kind: u8, code: u8, icmp: &[u8]) -> Option<u32> {
    let word = icmp.get(4..ICMP_HEADER_LEN)?;
    match (family, kind, code) {
        (Family::V4, 3, 4) => Some(u32::from(u16::from_be_bytes([word[2], word[3]]))),
        (Family::V6, 2, _) => Some(u32::from_be_bytes(word.try_into().ok()?)),
        _ => None,
    }
}

fn ipv4_header_len(packet: &[u8]) -> Option<usize> {
    let len = usize::from(packet.first()? & 0xf) * 4;
    (len >= IPV4_MIN_HEADER_LEN && packet.len() >= len).then_some(len)
}

/// The sequence number of an echo message with this agent's identifier.
fn echo_sequence(icmp: &[u8], mark: Mark) -> Option<u16> {
    let field = |at: usize| Some(u16::from_be_bytes([*icmp.get(at)?, *icmp.get(at + 1)?]));
    (field(4)? == mark.icmp_id).then_some(field(6)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MARK: Mark = Mark {
        icmp_id: 0x1234,
        session: 0x5678,
        key: [1, 2],
        one_way: false,
    };

    fn number(sequence: u16) -> ProbeId {
        ProbeId {
            session: MARK.session,
            round: 3,
            sequence,
        }
    }

    fn ipv4(protocol: u8, destination: [u8; 4], options: usize, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 20 + options];
        packet[0] = 0x40 | ((20 + options) / 4) as u8;
        packet[9] = protocol;
        packet[16..20].copy_from_slice(&destination);
        packet.extend_from_slice(payload);
        packet
    }

    fn ipv6(next_header: u8, destination: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[6] = next_header;
        packet[24..40].copy_from_slice(&destination.octets());
        packet.extend_from_slice(payload);
        packet
    }

    fn error(kind: u8, code: u8, quoted: &[u8]) -> Vec<u8> {
        let mut packet = vec![kind, code, 0, 0, 0, 0, 0, 0];
        packet.extend_from_slice(quoted);
        packet
    }

    #[test]
    fn an_ipv4_request_has_a_valid_checksum_and_its_reply_is_known() {
        let mut packet = request(Family::V4, MARK, number(77), Path::Endpoint);
        let sum: u32 = packet
            .chunks_exact(2)
            .map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]])))
            .sum();
        assert_eq!(checksum::fold(sum), 0xffff);
        packet[0] = 0;
        for options in [0, 8] {
            let received = ipv4(1, [10, 0, 0, 1], options, &packet);
            let from = IpAddr::from([10, 0, 0, 2]);
            assert_eq!(
                parse(Family::V4, MARK, from, &received),
                Some(Message::Reply { number: number(77) })
            );
            let other_id = Mark { icmp_id: 1, ..MARK };
            assert_eq!(parse(Family::V4, other_id, from, &received), None);
            let (key, session) = ([1, 3], 1);
            for other in [Mark { key, ..MARK }, Mark { session, ..MARK }] {
                assert_eq!(
                    parse(Family::V4, other, from, &received),
                    Some(Message::Unmarked)
                );
            }
        }
    }

    #[test]
    fn errors_that_quote_a_request_are_known() {
        let from = IpAddr::from([10, 0, 0, 9]);
        let quoted = request(Family::V4, MARK, number(5), Path::Host);
        // RFC 792 guarantees no more than the header and 8 bytes.
        let quoted = ipv4(1, [10, 9, 9, 9], 4, &quoted[..8]);
        let received = ipv4(1, [10, 0, 0, 1], 0, &error(3, 1, &quoted));
        assert_eq!(
            parse(Family::V4, MARK, from, &received),
            Some(Message::Error {
                sequence: 5,
                destination: IpAddr::from([10, 9, 9, 9]),
                error: IcmpError {
                    kind: 3,
                    code: 1,
                    from
                },
                next_hop_mtu: None,
            })
        );
        let udp = ipv4(
            17,
            [10, 9, 9, 9],
            0,
            &request(Family::V4, MARK, number(5), Path::Host),
        );
        let received = ipv4(1, [10, 0, 0, 1], 0, &error(3, 1, &udp));
        assert_eq!(parse(Family::V4, MARK, from, &received), None);

        let from: IpAddr = "fd00::9".parse().unwrap();
        let to: Ipv6Addr = "fd00::77".parse().unwrap();
        let quoted = ipv6(58, to, &request(Family::V6, MARK, number(6), Path::Host));
        assert_eq!(
            parse(Family::V6, MARK, from, &error(1, 3, &quoted)),
            Some(Message::Error {
                sequence: 6,
                destination: to.into(),
                error: IcmpError {
                    kind: 1,
                    code: 3,
                    from
                },
                next_hop_mtu: None,
            })
        );
    }

    #[test]
    fn a_request_of_any_size_is_a_valid_one() {
        for (size, len) in [(1500, 1480), (1401, 1381), (REQUEST_LEN + 20, REQUEST_LEN)] {
            let mut packet = sized_request(Family::V4, MARK, 5, size);
            assert_eq!(packet.len(), len);
            packet.resize(len.next_multiple_of(2), 0);
            let sum: u64 = packet
                .chunks_exact(2)
                .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            assert_eq!(sum % 0xffff, 0, "{size}");
        }
        assert_eq!(sized_request(Family::V6, MARK, 5, 1500).len(), 1460);
    }

    #[test]
    fn a_router_reports_the_mtu_of_its_next_hop() {
        let mtu_of = |family, from: &str, packet: &[u8]| {
            let from = from.parse().unwrap();
            match parse(family, MARK, from, packet) {
                Some(Message::Error { next_hop_mtu, .. }) => next_hop_mtu,
                other => panic!("{other:?}"),
            }
        };
        let request4 = request(Family::V4, MARK, number(5), Path::Host);
        let quoted = ipv4(1, [10, 9, 9, 9], 0, &request4[..8]);
        // With the length of the quoted packet, in words.
        let mut icmp = error(3, 4, &quoted);
        icmp[4..8].copy_from_slice(&[0, 7, 0x05, 0x78]);
        let received = ipv4(1, [10, 0, 0, 1], 0, &icmp);
        assert_eq!(mtu_of(Family::V4, "10.0.0.9", &received), Some(1400));
        let old_router = ipv4(1, [10, 0, 0, 1], 0, &error(3, 4, &quoted));
        assert_eq!(mtu_of(Family::V4, "10.0.0.9", &old_router), Some(0));
        let unreachable = ipv4(1, [10, 0, 0, 1], 0, &error(3, 1, &quoted));
        assert_eq!(mtu_of(Family::V4, "10.0.0.9", &unreachable), None);

        let to: Ipv6Addr = "fd00::77".parse().unwrap();
        let quoted = ipv6(58, to, &request(Family::V6, MARK, number(6), Path::Host));
        let mut icmp = error(2, 0, &quoted);
        icmp[4..8].copy_from_slice(&1280_u32.to_be_bytes());
        assert_eq!(mtu_of(Family::V6, "fd00::9", &icmp), Some(1280));
    }

    proptest! {
        #[test]
        fn no_input_panics(packet in prop::collection::vec(any::<u8>(), 0..120), v6: bool) {
            let family = if v6 { Family::V6 } else { Family::V4 };
            let _ = parse(family, MARK, IpAddr::from([10, 0, 0, 1]), &packet);
        }

        #[test]
        fn no_truncation_panics(len in 0_usize..100) {
            let quoted = ipv4(1, [10, 9, 9, 9], 0, &request(Family::V4, MARK, number(5), Path::Host));
            let mut packet = ipv4(1, [10, 0, 0, 1], 0, &error(3, 1, &quoted));
            packet.truncate(len);
            let _ = parse(Family::V4, MARK, IpAddr::from([10, 0, 0, 1]), &packet);
            let to: Ipv6Addr = "fd00::77".parse().unwrap();
            let quoted = ipv6(58, to, &request(Family::V6, MARK, number(6), Path::Host));
            let mut packet = error(1, 3, &quoted);
            packet.truncate(len);
            let _ = parse(Family::V6, MARK, "fd00::9".parse().unwrap(), &packet);
        }
    }
}
