//! Forwarding of packets of flows from outside: straight to an endpoint or out of an uplink, bypassing the host's
//! routing; and conntrack updates for packets to and from this host.

use aya_ebpf::bindings::TC_ACT_REDIRECT;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::service::{
    FLOW_DIRECT, FLOW_MASQUERADED, FLOW_OF_HOST, FLOW_PLAIN, FLOW_RELAYED,
};

use super::request::Request;
use crate::conntrack::{Traffic, enter};
use crate::delivery;
use crate::fib;
use crate::frame::{Frame, IP_AT, MARK_ANSWERED, MARK_SERVED};
use crate::hook::AtUplink;
use crate::ip_version::Version;
use crate::ipcache::is_endpoint;
use crate::maps::HEALTH_CONFIG;
use crate::subprogram::{Stage, subprogram};

/// Where a packet goes next.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(super) enum Forwarded {
    /// To the host's stack, which must handle it: it is for this host or an endpoint of this node, has a VLAN tag, is
    /// too long for the next device, or its hop limit is used up: the stack notifies the sender.
    Stack,
    /// To an endpoint of this node, with host routing. Not for packets forwarded by another node or sent to the backend
    /// itself, since the rest of the connection does not come this way.
    Endpoint,
    /// To the device that it leaves on, which it was passed to.
    Device,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Forwarded {}

/// Forwards a packet of a flow from outside.
#[subprogram(uplink4_forward, uplink6_forward)]
pub(super) fn forward<T: Version>(frame: &Frame, request: &mut Request<T>) -> Forwarded {
    let flags = request.flow_flags as u16;
    let is_masqueraded = flags & FLOW_MASQUERADED != 0;
    if is_masqueraded && request.is_passing == 0 {
        frame.set_mark(MARK_SERVED);
    }
    // It keeps the client's source, whatever is masqueraded.
    if flags & FLOW_DIRECT != 0 && request.is_passing == 0 {
        frame.set_mark(MARK_ANSWERED);
    }
    // Answers of this node's backends do not come from outside.
    let is_astray = request.is_passing != 0 && !is_masqueraded;
    if is_astray || flags & FLOW_OF_HOST != 0 || !request.is_untagged(frame) {
        return Forwarded::Stack;
    }
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return Forwarded::Stack;
    };
    if is_endpoint(destination.to_addr()) {
        // Half a flow is useless to netfilter, so the endpoint's answers take the same way. Without a service, they
        // go through the host's stack.
        return if delivery::is_on() && flags & (FLOW_RELAYED | FLOW_PLAIN) == 0 {
            Forwarded::Endpoint
        } else {
            Forwarded::Stack
        };
    }
    match fib::send::<T>(frame, source, destination) {
        Some(code) => handed_over(code),
        None => Forwarded::Stack,
    }
}

#[inline(always)]
fn handed_over(code: i64) -> Forwarded {
    if code == TC_ACT_REDIRECT.into() {
        Forwarded::Device
    } else {
        Forwarded::Stack
    }
}

/// Records a packet between an outside client and this host: conntrack decides when the flow is over.
#[subprogram(uplink4_note, uplink6_note)]
pub(super) fn note<T: Version>(frame: &Frame, request: &mut Request<T>) {
    let (Some(ip_at), Some(config)) = (request.ip_at::<AtUplink>(), HEALTH_CONFIG.get(0)) else {
        return;
    };
    let bytes = frame.length() - ip_at as u32;
    let is_request = request.tuple.direction() == TUPLE_OUT;
    // Seen from this host: arriving packets have direction in.
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
    let flags = request.packet_flags();
    // It does not matter whether it was recorded.
    let _ = enter(T::flows(), &mut tuple, flags, traffic, &config.timeouts);
}
