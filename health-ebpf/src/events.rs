//! Events for monitoring: records for `HEALTH_EVENTS`, written only if `HEALTH_MONITOR` wants them.
//!
//! While no client is monitoring, an event costs a program one array look-up, which the kernel inlines, and a test.
//! Everything else is in functions that are separate in the kernel as well, so that the verifier checks them once, not
//! once per caller.

use core::ptr;

use health_common::addr::Addr;
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::endpoint::{ENDPOINT_DEBUG, EndpointInfo};
use health_common::events::{
    EVENT_DROP, EVENT_TRACE, Event, WANT_CT, WANT_DROP, WANT_NAT, WANT_TRACE,
};
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::tuple::Tuple;

use crate::clock::now_ns;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::{
    HEALTH_CONFIG, HEALTH_DEVICES, HEALTH_DRAFT, HEALTH_ENDPOINTS, HEALTH_EVENTS, HEALTH_MONITOR,
};
use crate::metrics::count_bytes;
use crate::subprogram::subprogram;

/// Reports a dropped packet.
#[inline(always)]
pub fn dropped(frame: &Frame, reason: Reason, direction: Direction) {
    if is_wanted(WANT_DROP | WANT_NAT) {
        let (reason, direction) = (reason as u8, direction as u8);
        report_packet(frame, EVENT_DROP, reason, direction, frame.ifindex());
    }
}

/// Reports a packet that passes to or from an endpoint, if the endpoint's packets are traced.
#[inline(always)]
pub fn passed(frame: &Frame, endpoint: &EndpointInfo, direction: Direction) {
    if endpoint.flags & ENDPOINT_DEBUG != 0 && is_wanted(WANT_TRACE) {
        report_packet(frame, EVENT_TRACE, 0, direction as u8, endpoint.ifindex);
    }
}

/// Reports a change to a flow; `kind` as in [`Event::kind`].
#[inline(always)]
pub fn report_flow<T: Tuple>(kind: u8, tuple: &T, entry: &CtEntry) {
    if !is_wanted(WANT_CT) {
        return;
    }
    let (ifindex, identity) = (entry.ifindex, entry.source_identity);
    let tuple = ptr::from_ref(tuple);
    // The kernel checks the argument types of separate functions, and a generic type has no name there.
    if T::IP_VERSION == Tuple4::IP_VERSION {
        report_flow4(tuple.cast(), kind.into(), ifindex, identity);
    } else {
        report_flow6(tuple.cast(), kind.into(), ifindex, identity);
    }
}

#[inline(always)]
fn is_wanted(kinds: u32) -> bool {
    HEALTH_MONITOR
        .get(0)
        .is_some_and(|filter| filter.wanted & kinds != 0)
}

#[subprogram(report_packet)]
fn report_packet(frame: &Frame, kind: u8, reason: u8, direction: u8, ifindex: u32) {
    let Some(event) = draft() else {
        return;
    };
    *event = Event {
        kind,
        reason,
        direction,
        ifindex,
        length: frame.length(),
        ..Event::default()
    };
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => describe::<Tuple4>(frame, ip_at, event),
        Some((ETHERTYPE_IPV6, ip_at)) => describe::<Tuple6>(frame, ip_at, event),
        _ => {}
    }
    write(event);
}

/// This CPU's scratch record, to be filled in.
#[inline(always)]
fn draft() -> Option<&'static mut Event> {
    // SAFETY: a valid pointer into this CPU's slot. Programs on one CPU do not interrupt each other here, as they all
    // run with bottom halves disabled, and each function calls this only once.
    HEALTH_DRAFT
        .get_ptr_mut(0)
        .map(|event| unsafe { &mut *event })
}

#[inline(always)]
fn describe<T: Version>(frame: &Frame, ip_at: usize, event: &mut Event) {
    if let Some(found) = T::read(frame, ip_at, TUPLE_OUT) {
        name(event, &found.packet.tuple);
    } else if let Some(ip) = frame.at::<T::Header>(ip_at) {
        let (source, destination) = T::ends(ip);
        event.source = source.to_addr();
        event.destination = destination.to_addr();
        event.protocol = T::protocol_behind(ip);
    }
}

/// Fills in the two ends of an event.
#[inline(always)]
fn name<T: Tuple>(event: &mut Event, tuple: &T) {
    let (source, destination) = (tuple.source(), tuple.destination());
    event.source = source.0.to_addr();
    event.destination = destination.0.to_addr();
    event.sport_be = source.1;
    event.dport_be = destination.1;
    event.protocol = tuple.protocol();
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn report_flow4(
    tuple: *const Tuple4,
    kind: u32,
    ifindex: u32,
    source_identity: u32,
) -> u32 {
    // SAFETY: made from a reference to such a tuple; the verifier requires a null check.
    write_flow(unsafe { tuple.as_ref() }, kind, ifindex, source_identity)
}

/// Like [`report_flow4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn report_flow6(
    tuple: *const Tuple6,
    kind: u32,
    ifindex: u32,
    source_identity: u32,
) -> u32 {
    // SAFETY: as above.
    write_flow(unsafe { tuple.as_ref() }, kind, ifindex, source_identity)
}

/// Writes an event about a flow. The result is meaningless, but functions in the kernel must have one.
#[inline(always)]
fn write_flow<T: Tuple>(tuple: Option<&T>, kind: u32, ifindex: u32, source_identity: u32) -> u32 {
    let (Some(tuple), Some(event)) = (tuple, draft()) else {
        return 0;
    };
    *event = Event {
        ifindex,
        source_identity,
        kind: kind as u8,
        direction: tuple.direction(),
        ..Event::default()
    };
    name(event, tuple);
    write(event);
    0
}

/// Writes an event if the filter passes it.
#[inline(always)]
fn write(event: &mut Event) {
    let Some(filter) = HEALTH_MONITOR.get(0) else {
        return;
    };
    event.endpoint = endpoint(event);
    event.time_ns = now_ns();
    if filter.passes(event) && HEALTH_EVENTS.output::<Event>(&*event, 0).is_err() {
        count_bytes(event.length, Reason::EventLost, metrics_direction(event));
    }
}

/// ID of the endpoint that an event concerns: the one that owns the device or, failing that, an address. A forged
/// source identifies no endpoint; the destination is not reported instead, because that endpoint did nothing.
#[inline(always)]
fn endpoint(event: &Event) -> u16 {
    if let Some(config) = HEALTH_CONFIG.get(0)
        && config.health_ifindex == event.ifindex
    {
        let own = if config.health4.is_unset() {
            &config.health6
        } else {
            &config.health4
        };
        return endpoint_at(own);
    }
    // SAFETY: as in `endpoint_at`.
    if let Some(id) = unsafe { HEALTH_DEVICES.get(event.ifindex) } {
        return *id as u16;
    }
    if event.kind == EVENT_DROP && event.reason == Reason::InvalidSource as u8 {
        return 0;
    }
    match endpoint_at(&event.source) {
        0 => endpoint_at(&event.destination),
        id => id,
    }
}

#[inline(always)]
fn endpoint_at(addr: &Addr) -> u16 {
    // SAFETY: the agent replaces entries as a whole, and programs never change them.
    unsafe { HEALTH_ENDPOINTS.get(addr) }.map_or(0, |endpoint| endpoint.id)
}

/// The direction of the event's packet.
#[inline(always)]
fn metrics_direction(event: &Event) -> Direction {
    let egress = if matches!(event.kind, EVENT_DROP | EVENT_TRACE) {
        Direction::Egress as u8
    } else {
        TUPLE_IN
    };
    if event.direction == egress {
        Direction::Egress
    } else {
        Direction::Ingress
    }
}
