//! Conntrack of what endpoints send and receive.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;
use health_common::ct::{TUPLE_IN, Tuple4, Tuple6};
use health_common::metrics::{Direction, Reason};
use health_common::packet::Kind;

use crate::conntrack::{Said, Tracked, Traffic, enter, is_known};
use crate::fragment::resolve;
use crate::frame::{Frame, IP_AT};
use crate::maps::HEALTH_CONFIG;
use crate::metrics::count;
use crate::packet::Found;
use crate::version::Version;

/// Enters an IPv4 packet that goes in `direction` (as in a tuple) into the entry of its flow.
/// `source_identity` is that of its sender.
#[inline(always)]
pub fn track4(frame: &Frame, direction: u8, source_identity: u32) {
    let error_at = enter_packet4(frame.skb(), direction.into(), source_identity);
    if error_at != 0 {
        let is_related = is_related4(frame.skb(), error_at, direction.into()) != 0;
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

/// As [`enter_packet`].
///
/// A function of its own in the kernel too, as are its likes: the verifier looks at it once, and not
/// once for each way that leads there. And a program and what it calls share 512 bytes of stack, so one does
/// not call the other.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn enter_packet4(skb: *mut __sk_buff, direction: u32, source_identity: u32) -> u32 {
    enter_packet::<Tuple4>(skb, direction as u8, source_identity)
}

/// As [`enter_packet4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn enter_packet6(skb: *mut __sk_buff, direction: u32, source_identity: u32) -> u32 {
    enter_packet::<Tuple6>(skb, direction as u8, source_identity)
}

/// Does all for a packet that is not an ICMP error; of one, the result says where it begins, else it is 0.
#[inline(always)]
fn enter_packet<T: Version>(skb: *mut __sk_buff, direction: u8, source_identity: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let frame = &Frame::new(&ctx);
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return 0;
    };
    let Some(Found {
        mut packet,
        content_at,
    }) = T::read(frame, IP_AT, direction)
    else {
        return note(frame, direction, Tracked::Invalid);
    };
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return content_at,
        Kind::NoFlow => return 0,
    }
    if !resolve(&mut packet, &config.timeouts) {
        return note(frame, direction, Tracked::Invalid);
    }
    let said = Said::by(&packet);
    let traffic = traffic(frame, direction, source_identity);
    let tracked = enter(
        T::flows(),
        &mut packet.tuple,
        said,
        traffic,
        &config.timeouts,
    );
    note(frame, direction, tracked)
}

/// Whether an ICMP error that begins at `error_at` and goes in `direction` is about a flow that is known: 1 or
/// 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn is_related4(skb: *mut __sk_buff, error_at: u32, direction: u32) -> u32 {
    is_related::<Tuple4>(skb, error_at, direction as u8)
}

/// As [`is_related4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn is_related6(skb: *mut __sk_buff, error_at: u32, direction: u32) -> u32 {
    is_related::<Tuple6>(skb, error_at, direction as u8)
}

#[inline(always)]
fn is_related<T: Version>(skb: *mut __sk_buff, error_at: u32, direction: u8) -> u32 {
    let ctx = TcContext::new(skb);
    match T::read_inner(&Frame::new(&ctx), IP_AT, error_at, direction) {
        Some(mut inner) => is_known(T::flows(), &mut inner.reply).into(),
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
