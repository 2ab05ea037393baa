//! Where packets of flows from outside go on: to an endpoint or out of an uplink at once, without the host's routing in
//! between; and what conntrack is told of those to and from this host.

use aya_ebpf::bindings::TC_ACT_REDIRECT;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::service::{
    FLOW_DIRECT, FLOW_MASQUERADED, FLOW_OF_HOST, FLOW_PLAIN, FLOW_RELAYED,
};

use super::step::{AtUplink, Hook, Request, StepResult};
use crate::conntrack::{PacketFlags, Traffic, enter};
use crate::delivery;
use crate::fib;
use crate::frame::{Frame, IP_AT, MARK_ANSWERED, MARK_SERVED};
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_ENDPOINTS};

/// Sends a packet of a flow from outside on. `PASSED`: the host's stack does it, since it is for this host, has a VLAN tag,
/// is too long for the next device or has come too far: whoever sent it is to be told; or it is for an endpoint of this node.
/// `DELIVERABLE`: as the last, and there is host routing, but not for what another node sends on: the rest of a connection does
/// not come by this way.
#[inline(always)]
pub(super) fn forward<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let flags = request.flow_flags as u16;
    let is_masqueraded = flags & FLOW_MASQUERADED != 0;
    if is_masqueraded && request.is_passing == 0 {
        frame.set_mark(MARK_SERVED);
    }
    // It keeps the client's source, whatever is masqueraded.
    if flags & FLOW_DIRECT != 0 && request.is_passing == 0 {
        frame.set_mark(MARK_ANSWERED);
    }
    // What a backend of this node answers does not come from outside.
    let is_astray = request.is_passing != 0 && !is_masqueraded;
    if is_astray || flags & FLOW_OF_HOST != 0 || !request.is_untagged(frame) {
        return StepResult::PASSED;
    }
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return StepResult::PASSED;
    };
    if HEALTH_ENDPOINTS.get_ptr(destination.to_addr()).is_some() {
        // Half a flow is of no use to netfilter: what the endpoint answers takes the same way. Without a service that is
        // through the host's stack.
        return if delivery::is_on() && flags & (FLOW_RELAYED | FLOW_PLAIN) == 0 {
            StepResult::DELIVERABLE
        } else {
            StepResult::PASSED
        };
    }
    match fib::send::<T>(frame, source, destination) {
        Some(code) => handed_over(code),
        None => StepResult::PASSED,
    }
}

#[inline(always)]
fn handed_over(code: i64) -> StepResult {
    if code == TC_ACT_REDIRECT.into() {
        StepResult::FORWARDED
    } else {
        StepResult::PASSED
    }
}

/// Enters a packet between a client outside and this host: conntrack tells when the flow is over.
#[inline(always)]
pub(super) fn note<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let (Some(ip_at), Some(config)) = (AtUplink::ip_at(request), HEALTH_CONFIG.get(0)) else {
        return StepResult::PASSED;
    };
    let bytes = frame.length() - ip_at as u32;
    let is_request = request.tuple.direction() == TUPLE_OUT;
    // Seen from this host: what comes is of direction in.
    let mut tuple = if is_request {
        request
            .moved()
            .with_destination(request.backend())
            .with_direction(TUPLE_IN)
    } else {
        request.tuple.with_direction(TUPLE_OUT)
    };
    let traffic = Traffic {
        rx_bytes: if is_request { bytes } else { 0 },
        tx_bytes: if is_request { 0 } else { bytes },
        ifindex: frame.ifindex(),
        ..Traffic::default()
    };
    let flags = if request.is_later != 0 {
        PacketFlags::Unknown
    } else {
        PacketFlags::Tcp(request.tcp_flags as u8)
    };
    // Whether it was entered decides nothing.
    let _ = enter(T::flows(), &mut tuple, flags, traffic, &config.timeouts);
    StepResult::PASSED
}
