//! Conntrack of what endpoints send and receive.

use aya_ebpf::bindings::{__sk_buff, BPF_ANY};
use aya_ebpf::programs::TcContext;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, Tuple4, Tuple6};
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_common::metrics::{Direction, Reason};
use health_common::packet::Kind;

use crate::clock::coarse_now_ns;
use crate::conntrack::{Tracked, Traffic, enter, enter_part, is_known};
use crate::frame::{Frame, IP_AT};
use crate::maps::{HEALTH_CONFIG, HEALTH_CT4, HEALTH_CT6, HEALTH_FRAGMENTS4, HEALTH_FRAGMENTS6};
use crate::metrics::count;
use crate::packet::{read_inner4, read_inner6, read4, read6};

/// Enters an IPv4 packet that goes in `direction` (as in a tuple) into the entry of its flow.
/// `source_identity` is that of its sender. The result says nothing: the verifier wants one.
///
/// A function of its own in the kernel too, as are its likes: the verifier looks at it once, and not
/// once for each way that leads there.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn track_endpoint4(
    skb: *mut __sk_buff,
    direction: u32,
    source_identity: u32,
) -> u32 {
    if let Some(config) = HEALTH_CONFIG.get(0) {
        let ctx = TcContext::new(skb);
        track4(&Frame::new(&ctx), direction as u8, source_identity, config);
    }
    0
}

/// As [`track_endpoint4`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn track_endpoint6(
    skb: *mut __sk_buff,
    direction: u32,
    source_identity: u32,
) -> u32 {
    if let Some(config) = HEALTH_CONFIG.get(0) {
        let ctx = TcContext::new(skb);
        track6(&Frame::new(&ctx), direction as u8, source_identity, config);
    }
    0
}

#[inline(always)]
fn track4(frame: &Frame, direction: u8, source_identity: u32, config: &DatapathConfig) {
    let Some(packet) = read4(frame, direction) else {
        return note(frame, direction, Tracked::Invalid);
    };
    let (mut tuple, traffic) = (packet.tuple, traffic(frame, direction, source_identity));
    let tracked = match packet.kind {
        Kind::Flow => enter(
            &HEALTH_CT4,
            &tuple,
            packet.tcp_flags,
            traffic,
            &config.timeouts,
        ),
        Kind::Fragment(fragment) => {
            let key = FragmentKey4 {
                saddr_be: tuple.saddr_be,
                daddr_be: tuple.daddr_be,
                id_be: fragment.id_be as u16,
                protocol: tuple.protocol,
                pad: 0,
            };
            if fragment.first {
                let ports = ports(tuple.sport_be, tuple.dport_be, tuple.protocol, config);
                // Without room, those that follow are of no known flow, and are counted as such.
                let _ = HEALTH_FRAGMENTS4.insert(key, ports, u64::from(BPF_ANY));
                enter(
                    &HEALTH_CT4,
                    &tuple,
                    packet.tcp_flags,
                    traffic,
                    &config.timeouts,
                )
            } else {
                // SAFETY: entries are replaced as a whole.
                match unsafe { HEALTH_FRAGMENTS4.get(key) } {
                    Some(ports) if !ports.has_expired(now_secs()) => {
                        tuple.sport_be = ports.sport_be;
                        tuple.dport_be = ports.dport_be;
                        enter_part(&HEALTH_CT4, &tuple, traffic, &config.timeouts)
                    }
                    _ => Tracked::Invalid,
                }
            }
        }
        Kind::IcmpError => {
            return match read_inner4(frame, direction) {
                Some(flow) if is_known::<Tuple4>(&HEALTH_CT4, &flow) => {
                    count(frame, Reason::CtRelated, way(direction));
                }
                _ => note(frame, direction, Tracked::Invalid),
            };
        }
        Kind::NoFlow => return,
    };
    note(frame, direction, tracked);
}

#[inline(always)]
fn track6(frame: &Frame, direction: u8, source_identity: u32, config: &DatapathConfig) {
    let Some((packet, content_at)) = read6(frame, direction) else {
        return note(frame, direction, Tracked::Invalid);
    };
    let (mut tuple, traffic) = (packet.tuple, traffic(frame, direction, source_identity));
    let tracked = match packet.kind {
        Kind::Flow => enter(
            &HEALTH_CT6,
            &tuple,
            packet.tcp_flags,
            traffic,
            &config.timeouts,
        ),
        Kind::Fragment(fragment) => {
            let key = FragmentKey6 {
                saddr_be: tuple.saddr_be,
                daddr_be: tuple.daddr_be,
                id_be: fragment.id_be,
            };
            if fragment.first {
                let ports = ports(tuple.sport_be, tuple.dport_be, tuple.protocol, config);
                // As for IPv4.
                let _ = HEALTH_FRAGMENTS6.insert(key, ports, u64::from(BPF_ANY));
                enter(
                    &HEALTH_CT6,
                    &tuple,
                    packet.tcp_flags,
                    traffic,
                    &config.timeouts,
                )
            } else {
                // SAFETY: entries are replaced as a whole.
                match unsafe { HEALTH_FRAGMENTS6.get(key) } {
                    Some(ports) if !ports.has_expired(now_secs()) => {
                        tuple.sport_be = ports.sport_be;
                        tuple.dport_be = ports.dport_be;
                        tuple.protocol = ports.protocol;
                        enter_part(&HEALTH_CT6, &tuple, traffic, &config.timeouts)
                    }
                    _ => Tracked::Invalid,
                }
            }
        }
        Kind::IcmpError => {
            return match read_inner6(frame, content_at, direction) {
                Some(flow) if is_known::<Tuple6>(&HEALTH_CT6, &flow) => {
                    count(frame, Reason::CtRelated, way(direction));
                }
                _ => note(frame, direction, Tracked::Invalid),
            };
        }
        Kind::NoFlow => return,
    };
    note(frame, direction, tracked);
}

#[inline(always)]
fn traffic(frame: &Frame, direction: u8, source_identity: u32) -> Traffic {
    let bytes = frame.length() - IP_AT as u32;
    let is_in = direction == TUPLE_IN;
    Traffic {
        rx_bytes: if is_in { bytes } else { 0 },
        tx_bytes: if is_in { 0 } else { bytes },
        source_identity,
        ifindex: frame.ifindex(),
    }
}

#[inline(always)]
fn ports(sport_be: u16, dport_be: u16, protocol: u8, config: &DatapathConfig) -> FragmentPorts {
    FragmentPorts {
        expires: now_secs() + config.timeouts.fragment,
        sport_be,
        dport_be,
        protocol,
        pad: [0; 3],
    }
}

/// Counts what conntrack could not do. The packet passes all the same.
#[inline(always)]
fn note(frame: &Frame, direction: u8, tracked: Tracked) {
    match tracked {
        Tracked::Full => count(frame, Reason::CtFull, way(direction)),
        Tracked::Invalid => count(frame, Reason::CtInvalid, way(direction)),
        Tracked::New | Tracked::Known => {}
    }
}

/// Which way a packet goes, seen from the host.
#[inline(always)]
fn way(direction: u8) -> Direction {
    if direction == TUPLE_IN {
        Direction::Egress
    } else {
        Direction::Ingress
    }
}

#[inline(always)]
fn now_secs() -> u32 {
    (coarse_now_ns() / 1_000_000_000) as u32
}
