//! Flows through services: two entries each, one for the client's packets and one for the backend's answers.

use aya_ebpf::bindings::BPF_ANY;
use health_common::config::DatapathConfig;
use health_common::ct::{CtState, TUPLE_IN, TUPLE_OUT, lifetime};
use health_common::masquerade::Address as _;
use health_common::service::{
    FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_PAST_STACK, FLOW_PLAIN, FLOW_SHARED,
};
use health_common::tuple::ServiceFlowParts;

use super::backend::uncount_flow;
use super::enabled::is_on;
use crate::clock::coarse_now_secs;
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;

/// The key of the backend's answers.
#[inline(always)]
pub(super) fn answer_key<T: Version, P: Hook>(flow: &T, to: (T::Address, u16)) -> T {
    match gateway::<T>() {
        // An endpoint that is its own backend gets the packet from the gateway, and answers there.
        Some(gateway) if !P::IS_UPLINK && to.0 == flow.source().0 => flow
            .with_destination((gateway, flow.source().1))
            .reply()
            .with_destination(to)
            .reply(),
        _ => flow.with_destination(to).reply(),
    }
}

/// The gateway of this node's endpoints.
#[inline(always)]
pub(super) fn gateway<T: Version>() -> Option<T::Address> {
    let config = HEALTH_CONFIG.get(0)?;
    let gateway = if T::IP_VERSION == 4 {
        &config.gateway4
    } else {
        &config.gateway6
    };
    (!gateway.is_unset()).then(|| T::Address::of_addr(gateway))
}

/// Whether an `IN` entry belongs to this flow, given the flow with the port that the backend sees.
#[inline(always)]
pub(super) fn is_of_flow<T: Version>(
    parts: &ServiceFlowParts<T::Address>,
    flow: &T,
    moved: &T,
) -> bool {
    parts.to == flow.destination() && parts.port_beyond(moved.source().1) == flow.source().1
}

/// When a flow of a single packet expires.
#[inline(always)]
pub(super) fn first_expiry(protocol: u8, config: &DatapathConfig) -> u32 {
    coarse_now_secs() + lifetime(protocol, CtState::default(), &config.timeouts)
}

/// Enters a flow, given the keys of its packets and of their answers, which are on the stack, the parts of the
/// answers' entry, and the backend and client port of the packets' entry. Returns whether there was space.
#[inline(always)]
pub(super) fn enter_both<T: Version>(
    flow: &T,
    answer: &T,
    mut parts: ServiceFlowParts<T::Address>,
    backend: (T::Address, u16),
    moved_port_be: u16,
) -> bool {
    let flows = T::service_flows();
    let Ok(is_new) = flows.insert_unnoted(answer, &T::service_flow(&parts), u64::from(BPF_ANY))
    else {
        return false;
    };
    parts.to = backend;
    parts.client_port_be = moved_port_be;
    let is_entered = flows
        .insert(flow, &T::service_flow(&parts), u64::from(BPF_ANY))
        .is_ok();
    if is_new {
        if is_entered {
            flows.note(answer);
        } else {
            let _ = flows.remove(answer);
        }
    }
    is_entered
}

/// Extends a flow, given one of its entries and the key of the other. Not for TCP.
#[inline(always)]
pub(super) fn prolong<T: Version>(entry: *mut T::ServiceFlow, other: &T, config: &DatapathConfig) {
    let expires =
        coarse_now_secs() + lifetime(other.protocol(), CtState::default(), &config.timeouts);
    // SAFETY: a value of that map.
    if T::service_flow_parts(unsafe { &*entry }).expires == expires {
        return;
    }
    extend::<T>(entry, expires);
    if let Some(other) = T::service_flows().get_ptr_mut(other) {
        extend::<T>(other, expires);
    }
}

/// Extends an entry of a flow. Writes nothing else: the entry may belong to another flow by now.
#[inline(always)]
fn extend<T: Version>(entry: *mut T::ServiceFlow, expires: u32) {
    // SAFETY: a value of that map, valid memory for the program's run; an aligned word in it.
    unsafe {
        let word = entry.cast::<u8>().add(T::SERVICE_FLOW_EXPIRES_AT);
        word.cast::<u32>().write_volatile(expires);
    }
}

/// Makes the flow that owns a backend's answers share them with a new one.
#[inline(always)]
pub(super) fn share<T: Version>(flow: &T, answer: &T) {
    let Some(entry) = T::service_flows().get_ptr(answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let to = T::service_flow_parts(unsafe { &*entry }).to;
    // The key must be on the stack.
    let other = flow.with_destination(to);
    if let Some(entry) = T::service_flows().get_ptr(&other) {
        // SAFETY: as above.
        let mut parts = T::service_flow_parts(unsafe { &*entry });
        parts.flags |= FLOW_SHARED;
        let _ = T::service_flows().insert(&other, &T::service_flow(&parts), u64::from(BPF_ANY));
    }
}

/// Removes both entries of a flow. `sent`: the tuple of its packets to the backend, direction out.
#[inline(always)]
pub(crate) fn forget<T: Version>(sent: T) {
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let back = T::service_flow_parts(unsafe { &*back });
    let flow = answer.asked_by(&back);
    if let Some(out) = T::service_flows().get_ptr(&flow)
        // SAFETY: as above.
        && is_sent_by(&flow, &sent, &T::service_flow_parts(unsafe { &*out }))
    {
        let _ = T::service_flows().remove(&flow);
    }
    if T::service_flows().remove(&answer).is_ok() {
        uncount_flow(back.backend, back.service);
    }
}

/// Whether a flow's packets go to its backend with this tuple. The flow may have another backend or port by now.
#[inline(always)]
fn is_sent_by<T: Version>(flow: &T, sent: &T, parts: &ServiceFlowParts<T::Address>) -> bool {
    parts.to == sent.destination() && parts.port_beyond(flow.source().1) == sent.source().1
}

/// Like [`forget`], for a flow from outside whose packets went to this node's backend with this tuple; not for others,
/// which the programs at the client's device remove.
#[inline(always)]
pub(crate) fn forget_from_outside<T: Version>(sent: T) {
    let sent = sent.with_direction(TUPLE_OUT);
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let back = T::service_flow_parts(unsafe { &*back });
    if back.flags & FLOW_FROM_OUTSIDE != 0 {
        forget(sent);
    }
}

/// Like [`forget`], for the flow that conntrack knew by this key. By now, the entries may belong to another flow, which
/// goes the other way to the same backend.
#[inline(always)]
pub(crate) fn forget_untracked<T: Version>(key: T) {
    let sent = key.with_direction(TUPLE_OUT);
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let flags = T::service_flow_parts(unsafe { &*back }).flags;
    if comes_in(flags) == (key.direction() != TUPLE_OUT) {
        forget(sent);
    }
}

/// The flow as conntrack knows it, given one of its entries; `None` if conntrack cannot tell.
#[inline(always)]
pub(crate) fn tracked_flow<T: Version>(key: &T, entry: &T::ServiceFlow) -> Option<T> {
    if is_turned(key, entry) {
        return None;
    }
    let flow = key.sent(entry);
    Some(if comes_in(T::service_flow_parts(entry).flags) {
        flow.with_direction(TUPLE_IN)
    } else {
        flow
    })
}

/// Whether an entry belongs to a flow of an endpoint that is its own backend: conntrack sees one side of it, between
/// the gateway and the endpoint.
#[inline(always)]
fn is_turned<T: Version>(key: &T, entry: &T::ServiceFlow) -> bool {
    let parts = T::service_flow_parts(entry);
    let is_gateway = gateway::<T>().is_some_and(|gateway| gateway == key.destination().0);
    parts.flags & (FLOW_FROM_OUTSIDE | FLOW_PLAIN) == 0
        && (is_gateway || parts.to.0 == key.source().0)
}

/// Whether conntrack tracks a flow with these flags in direction in: from outside, with the client visible to the
/// backend.
#[inline(always)]
fn comes_in(flags: u16) -> bool {
    flags & (FLOW_FROM_OUTSIDE | FLOW_MASQUERADED) == FLOW_FROM_OUTSIDE
}

/// Whether a packet with this tuple, from or to an endpoint, belongs to a flow through a service. Modifies the tuple
/// in place and restores it, because the stack has no space for a second one.
#[inline(always)]
pub(crate) fn is_of_service<T: Version>(tuple: &mut T) -> bool {
    if !is_on() {
        return false;
    }
    let direction = tuple.direction();
    *tuple = tuple.with_direction(TUPLE_IN);
    let is_answer = T::service_flows().get_ptr(tuple).is_some();
    *tuple = tuple.reply().with_direction(TUPLE_IN);
    let is_answered = T::service_flows().get_ptr(tuple).is_some();
    *tuple = tuple.reply().with_direction(direction);
    is_answer || is_answered
}

/// Whether a backend's answer with this `IN` tuple goes to an outside client whose packets bypassed the
/// host's stack.
#[inline(always)]
pub(crate) fn is_past_stack<T: Version>(key: &T) -> bool {
    T::service_flows().get_ptr(key).is_some_and(|entry| {
        // SAFETY: a value of that map.
        T::service_flow_parts(unsafe { &*entry }).flags & FLOW_PAST_STACK != 0
    })
}
