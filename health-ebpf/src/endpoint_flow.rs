//! Conntrack of what endpoints send and receive.

use aya_ebpf::bindings::{__sk_buff, BPF_ANY};
use aya_ebpf::programs::TcContext;
use health_common::config::DatapathConfig;
use health_common::ct::TUPLE_IN;
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_common::metrics::{Direction, Reason};
use health_common::packet::Kind;

use crate::clock::coarse_now_ns;
use crate::conntrack::{Said, Tracked, Traffic, enter, is_known};
use crate::frame::{Frame, IP_AT};
use crate::maps::{HEALTH_CONFIG, HEALTH_CT4, HEALTH_CT6, HEALTH_FRAGMENTS4, HEALTH_FRAGMENTS6};
use crate::metrics::count;
use crate::packet::{read_inner4, read_inner6, read4, read6};

/// Enters an IPv4 packet that goes in `direction` (as in a tuple) into the entry of its flow.
/// `source_identity` is that of its sender.
#[inline(always)]
pub fn track4(frame: &Frame, direction: u8, source_identity: u32) {
    if enter_packet4(frame.skb(), direction.into(), source_identity) != 0 {
        let is_related = is_related4(frame.skb(), direction.into()) != 0;
        note_error(frame, direction, is_related);
    }
}

/// As [`track4`].
#[inline(always)]
pub fn track6(frame: &Frame, direction: u8, source_identity: u32) {
    let error_at = enter_packet6(frame.skb(), direction.into(), source_identity);
    if error_at != 0 {
        let is_related = is_related6(frame.skb(), error_at, direction.into()) != 0;
        note_error(frame, direction, is_related);
    }
}

/// Does all for a packet that is not an ICMP error; of one, the result says where it begins, else it is 0.
///
/// A function of its own in the kernel too, as are its likes: the verifier looks at it once, and not
/// once for each way that leads there. And a program and what it calls share 512 bytes of stack, so one does
/// not call the other.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn enter_packet4(skb: *mut __sk_buff, direction: u32, source_identity: u32) -> u32 {
    let ctx = TcContext::new(skb);
    match HEALTH_CONFIG.get(0) {
        Some(config) => enter4(&Frame::new(&ctx), direction as u8, source_identity, config),
        None => 0,
    }
}

/// As [`enter_packet4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn enter_packet6(skb: *mut __sk_buff, direction: u32, source_identity: u32) -> u32 {
    let ctx = TcContext::new(skb);
    match HEALTH_CONFIG.get(0) {
        Some(config) => enter6(&Frame::new(&ctx), direction as u8, source_identity, config),
        None => 0,
    }
}

#[inline(always)]
fn enter4(frame: &Frame, direction: u8, source_identity: u32, config: &DatapathConfig) -> u32 {
    let Some(packet) = read4(frame, direction) else {
        return note(frame, direction, Tracked::Invalid);
    };
    let mut tuple = packet.tuple;
    let mut is_part = false;
    match packet.kind {
        Kind::Flow => {}
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
            } else {
                // SAFETY: entries are replaced as a whole.
                let ports = unsafe { HEALTH_FRAGMENTS4.get(key) };
                let Some(ports) = ports.filter(|ports| !ports.has_expired(now_secs())) else {
                    return note(frame, direction, Tracked::Invalid);
                };
                tuple.sport_be = ports.sport_be;
                tuple.dport_be = ports.dport_be;
                is_part = true;
            }
        }
        Kind::IcmpError => {
            return 1;
        }
        Kind::NoFlow => return 0,
    }
    let said = if is_part {
        Said::Nothing
    } else {
        Said::Flags(packet.tcp_flags)
    };
    let traffic = traffic(frame, direction, source_identity);
    let tracked = enter(&HEALTH_CT4, &mut tuple, said, traffic, &config.timeouts);
    note(frame, direction, tracked)
}

#[inline(always)]
fn enter6(frame: &Frame, direction: u8, source_identity: u32, config: &DatapathConfig) -> u32 {
    let Some((packet, content_at)) = read6(frame, direction) else {
        return note(frame, direction, Tracked::Invalid);
    };
    let mut tuple = packet.tuple;
    let mut is_part = false;
    match packet.kind {
        Kind::Flow => {}
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
            } else {
                // SAFETY: entries are replaced as a whole.
                let ports = unsafe { HEALTH_FRAGMENTS6.get(key) };
                let Some(ports) = ports.filter(|ports| !ports.has_expired(now_secs())) else {
                    return note(frame, direction, Tracked::Invalid);
                };
                tuple.sport_be = ports.sport_be;
                tuple.dport_be = ports.dport_be;
                tuple.protocol = ports.protocol;
                is_part = true;
            }
        }
        Kind::IcmpError => {
            return content_at;
        }
        Kind::NoFlow => return 0,
    }
    let said = if is_part {
        Said::Nothing
    } else {
        Said::Flags(packet.tcp_flags)
    };
    let traffic = traffic(frame, direction, source_identity);
    let tracked = enter(&HEALTH_CT6, &mut tuple, said, traffic, &config.timeouts);
    note(frame, direction, tracked)
}

/// Whether an ICMP error that goes in `direction` is about a flow that is known: 1 or 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn is_related4(skb: *mut __sk_buff, direction: u32) -> u32 {
    let ctx = TcContext::new(skb);
    match read_inner4(&Frame::new(&ctx), direction as u8) {
        Some(mut flow) => is_known(&HEALTH_CT4, &mut flow).into(),
        None => 0,
    }
}

/// As [`is_related4`], of an error that begins at `error_at`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn is_related6(skb: *mut __sk_buff, error_at: u32, direction: u32) -> u32 {
    let ctx = TcContext::new(skb);
    match read_inner6(&Frame::new(&ctx), error_at, direction as u8) {
        Some(mut flow) => is_known(&HEALTH_CT6, &mut flow).into(),
        None => 0,
    }
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
fn note(frame: &Frame, direction: u8, tracked: Tracked) -> u32 {
    match tracked {
        Tracked::Full => count(frame, Reason::CtFull, way(direction)),
        Tracked::Invalid => count(frame, Reason::CtInvalid, way(direction)),
        Tracked::New | Tracked::Known => {}
    }
    0
}

#[inline(always)]
fn note_error(frame: &Frame, direction: u8, is_related: bool) {
    let reason = if is_related {
        Reason::CtRelated
    } else {
        Reason::CtInvalid
    };
    count(frame, reason, way(direction));
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
