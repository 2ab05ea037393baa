//! Host routing: a packet to an endpoint of this node goes straight into the endpoint's namespace, bypassing the host's
//! stack. An endpoint's answers to an outside client also bypass the stack if the client's packets did so on their way
//! through a service.
//!
//! `from_endpoint` and `to_service` pass packets to the `deliver` program, which has its own stack. Packets that a
//! router would answer, or must examine more closely, are left to the host's stack, which sends them through
//! `to_endpoint`.

use health_common::addr::Addr;
use health_common::calls::CALL_DELIVER;
use health_common::config::{DatapathConfig, routes_itself};
use health_common::ct::{Tuple4, Tuple6};
use health_common::endpoint::{ENDPOINT_HEALTH, EndpointInfo};
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

use crate::endpoint::{Packets, admit};
use crate::fib;
use crate::frame::{Frame, IP_AT, MARK_PAST_STACK};
use crate::maps::{HEALTH_CALLS, HEALTH_CONFIG, HEALTH_ENDPOINTS};
use crate::metrics::{Verdict, ignore, redirected, redirected_uncounted, refuse};
use crate::rewrite::decrement_ttl;
use crate::service;

/// Whether host routing is on.
#[inline(always)]
pub fn is_on() -> bool {
    HEALTH_CONFIG.get(0).is_some_and(routes)
}

/// Whether these settings enable host routing, which requires services.
#[inline(always)]
pub fn routes(config: &DatapathConfig) -> bool {
    service::is_there() && routes_itself(config.flags)
}

/// Tail-calls `deliver`. Returns only if there is no such program.
#[inline(always)]
pub fn hand_over(frame: &Frame) {
    // SAFETY: a tail call skips destructors, but no value in these programs implements `Drop`.
    unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_DELIVER) };
}

/// Like [`hand_over`], for an answer to an outside client.
#[inline(always)]
pub fn hand_over_answer(frame: &Frame) {
    frame.set_mark(MARK_PAST_STACK);
    hand_over(frame);
    frame.set_mark(0);
}

/// The `deliver` program: handles an untagged packet from an endpoint, or one from outside for a service.
#[inline(always)]
pub fn deliver(frame: &Frame) -> Verdict {
    let done = match frame.protocol() {
        ETHERTYPE_IPV4 => hand_on::<Tuple4>(frame),
        ETHERTYPE_IPV6 => hand_on::<Tuple6>(frame),
        _ => None,
    };
    done.unwrap_or_else(ignore)
}

/// Handles a packet to an endpoint of this node or to an outside client; `None`, with the packet unchanged, if it is
/// for the host's stack.
#[inline(always)]
fn hand_on<T: Packets>(frame: &Frame) -> Option<Verdict> {
    let is_answer = frame.was_marked(MARK_PAST_STACK);
    if is_answer {
        frame.set_mark(0);
    }
    let ip = frame.at::<T::Header>(IP_AT)?;
    if !frame.is_to_host() || T::has_options(ip) || T::has_link_destination(ip) {
        return None;
    }
    let (source, destination) = T::ends(ip);
    if is_answer {
        // `to_netdev` counts the packet, and sets its source to the service's address.
        return fib::send::<T>(frame, source, destination).map(redirected_uncounted);
    }
    let endpoint = endpoint_of(destination.to_addr(), frame.ifindex())?;
    if !frame.fits(endpoint.ifindex) {
        return None;
    }
    decrement_ttl::<T>(frame, IP_AT as u32)?;
    // From here on, treat the packet as being at the endpoint's device.
    let frame = &frame.on_way_to(endpoint.ifindex);
    if let Err(verdict) = admit::<T>(frame, endpoint) {
        return Some(verdict);
    }
    if !frame.store(0, &[endpoint.mac, endpoint.host_mac]) {
        return Some(refuse(frame, Reason::WriteFailed, Direction::Egress));
    }
    let code = frame.redirect_to_peer(endpoint.ifindex);
    Some(redirected(
        frame,
        Reason::Forwarded,
        Direction::Egress,
        code,
    ))
}

/// The endpoint that a packet is for, if the packet came in on another device. Packets to the health endpoint are left
/// to `to_endpoint`.
#[inline(always)]
fn endpoint_of(addr: Addr, came_by: u32) -> Option<&'static EndpointInfo> {
    // SAFETY: the agent replaces entries as a whole, and programs never change them.
    let endpoint = unsafe { HEALTH_ENDPOINTS.get(addr) }?;
    (endpoint.flags & ENDPOINT_HEALTH == 0 && endpoint.ifindex != came_by).then_some(endpoint)
}
