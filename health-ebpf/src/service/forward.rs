//! Where packets of flows from outside go on: to an endpoint or out of an uplink at once, without the host's routing in
//! between; and what conntrack is told of those to and from this host.

use core::ffi::c_int;

use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, TC_ACT_REDIRECT};
use aya_ebpf::helpers::generated::bpf_redirect_neigh;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::service::{FLOW_DIRECT, FLOW_MASQUERADED, FLOW_OF_HOST};

use super::step::{AtUplink, Hook, Request, StepResult};
use crate::conntrack::{PacketFlags, Traffic, enter};
use crate::delivery;
use crate::fib::FibLookup;
use crate::frame::{Frame, IP_AT, MARK_ANSWERED, MARK_SERVED};
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_ENDPOINTS};
use crate::rewrite::decrement_ttl;

/// `struct bpf_redir_neigh`.
#[repr(C)]
struct NextHop {
    family: u32,
    address: [u32; 4],
}

const _: () = assert!(size_of::<NextHop>() == size_of::<aya_ebpf::bindings::bpf_redir_neigh>());

/// Sends a packet of a flow from outside on. `PASSED`: the host's stack does it, since it is for this host, has a VLAN tag,
/// is too long for the next device or has come too far: whoever sent it is to be told. `DELIVERABLE`: it is for an endpoint of
/// this node, and there is host routing.
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
    if is_astray
        || flags & FLOW_OF_HOST != 0
        || request.ip_at != IP_AT as u32
        || frame.has_vlan_tag()
    {
        return StepResult::PASSED;
    }
    let Some((source, destination)) = T::addresses(frame, IP_AT) else {
        return StepResult::PASSED;
    };
    if let Some(endpoint) = HEALTH_ENDPOINTS.get_ptr(destination.to_addr()) {
        if delivery::is_on() {
            return StepResult::DELIVERABLE;
        }
        // SAFETY: a value of that map, whose fields do not change while its endpoint is there.
        let (ifindex, macs) =
            unsafe { ((*endpoint).ifindex, [(*endpoint).mac, (*endpoint).host_mac]) };
        if !frame.fits(ifindex)
            || decrement_ttl::<T>(frame, IP_AT as u32).is_none()
            || !frame.store(0, &macs)
        {
            return StepResult::PASSED;
        }
        return handed_over(frame.redirect(ifindex, 0));
    }
    let mut route = FibLookup::of::<T>(frame.ifindex(), source, destination);
    // SAFETY: a valid context.
    let found = unsafe { route.ask(frame.skb().cast()) };
    // The neighbour that is not known yet is asked for as the packet is sent.
    let is_found =
        found == BPF_FIB_LKUP_RET_SUCCESS.into() || found == BPF_FIB_LKUP_RET_NO_NEIGH.into();
    if !is_found || !frame.fits(route.ifindex) || decrement_ttl::<T>(frame, IP_AT as u32).is_none()
    {
        return StepResult::PASSED;
    }
    let mut next = NextHop {
        family: route.family.into(),
        address: route.destination,
    };
    // SAFETY: what the helper takes for its structure.
    handed_over(unsafe {
        bpf_redirect_neigh(
            route.ifindex,
            (&raw mut next).cast(),
            size_of::<NextHop>() as c_int,
            0,
        )
    })
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
            .tuple
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
