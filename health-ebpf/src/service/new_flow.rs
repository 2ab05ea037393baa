//! New flows: a backend, a port that its answers can use, and the entries.

use health_common::ct::IP_PROTOCOL_UDP;
use health_common::masquerade::{Address as _, Masquerade};
use health_common::metrics::Reason;
use health_common::nat::{Ports, can_change_port};
use health_common::service::choice::scaled;
use health_common::service::outside::is_own;
use health_common::service::{
    FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_MOVED, FLOW_PAST_STACK, FLOW_PLAIN,
    FLOW_SHARED, FRONTEND_DIRECT,
};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use super::backend::count_flow;
use super::choice::{Client, elect, frontend_of_packets, hash, stay};
use super::flow::{answer_key, enter_both, first_expiry, is_of_flow, share};
use super::request::Request;
use super::tracked::{is_closed_by_client, is_open, is_tracked};
use crate::clock::{are_flows_held, coarse_now_secs};
use crate::delivery;
use crate::frame::Frame;
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::ipcache::{identity_of, is_endpoint};
use crate::maps::HEALTH_CONFIG;
use crate::nat::settings as masquerade;
use crate::subprogram::{Stage, subprogram};

/// Maximum number of ports tried for a flow, its own first, as long as the backend's answers to them belong to another
/// flow.
pub(super) const PORT_ATTEMPTS: u16 = 33;
/// Maximum number of backends selected for a flow whose port cannot change.
const BACKEND_ATTEMPTS: u16 = 5;
/// Ports for flows whose own port is taken, except for privileged ones: those get [`PRIVILEGED`]. The kernel's own
/// NAT has three ranges, 1-511, 600-1023 and 1024-65535, for ports below 512, below 1024 and others
/// (`net/netfilter/nf_nat_core.c`).
const UNPRIVILEGED: Ports = Ports {
    min: 1024,
    max: u16::MAX,
};
const PRIVILEGED: Ports = Ports {
    min: 512,
    max: 1023,
};
/// Spreads adjacent numbers: `GOLDEN_RATIO_32` of `include/linux/hash.h`.
const GOLDEN_RATIO: u32 = 0x61c8_8647;

/// Whether a flow got a port and a backend whose answers belong to it alone.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Yes.
    Done,
    /// Another port, or another backend, must be tried.
    Again,
}

// SAFETY: `repr(u32)`, two variants without fields.
unsafe impl Stage for Attempt {}

/// Whether a flow was entered.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Entered {
    /// No, and its packet passes unchanged.
    Passed,
    /// Yes.
    Done,
    /// No: the maps have no space for another flow.
    NoRoom,
}

// SAFETY: `repr(u32)`, three variants without fields.
unsafe impl Stage for Entered {}

/// Selects a backend for a new flow. `false`: the packet passes unchanged.
#[subprogram(service4_choose, service6_choose, uplink4_choose, uplink6_choose)]
pub(super) fn choose<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<bool, Reason> {
    // The flow keeps its backend, and gets another port.
    if request.moved_port_be != 0 || request.has(FLOW_PLAIN) {
        return Ok(true);
    }
    let flow = request.tuple;
    let Some(frontend) = frontend_of_packets(&flow) else {
        return Ok(false);
    };
    if HEALTH_CONFIG.get(0).is_some_and(are_flows_held) {
        return Err(Reason::FlowsHeld);
    }
    let client = flow.source().0.to_addr();
    if P::IS_UPLINK && is_own(is_endpoint(client), || identity_of(flow.source().0)) {
        return Ok(false);
    }
    let client = Client {
        source: client,
        stays_as: client,
    };
    let (index, to) = elect::<T, P>(&flow, &client, &frontend, request.attempt.into())?;
    if to.1 != flow.destination().1 && !can_change_port(flow.protocol()) {
        return Err(Reason::ServiceNoBackend);
    }
    request.set_backend(to);
    if P::IS_UPLINK {
        let way = frontend.way(is_endpoint(to.0.to_addr()), || identity_of(to.0));
        let mut flags = FLOW_FROM_OUTSIDE | way;
        if frontend.flags & FRONTEND_DIRECT != 0 && way == FLOW_MASQUERADED {
            flags |= FLOW_DIRECT;
        }
        if way == 0 && request.is_untagged(frame) && delivery::is_on() {
            flags |= FLOW_PAST_STACK;
        }
        if flags & FLOW_MASQUERADED != 0 && !masquerade::<T>().is_some_and(Masquerade::is_on) {
            return Err(Reason::ServiceNoBackend);
        }
        request.flow_flags = flags.into();
    }
    (request.backend, request.service) = (index, frontend.service);
    request.has_affinity = u16::from(frontend.affinity_secs != 0);
    Ok(true)
}

/// Takes the backend that was selected for a packet, unless its answers belong to another flow of the client between
/// the same ports: then another port must be tried. If ports cannot change, another backend must be selected; at the
/// last attempt, both flows share the answers.
#[subprogram(service4_take, service6_take, uplink4_take, uplink6_take)]
pub(super) fn take<T: Version, P: Hook>(
    _frame: &Frame,
    request: &mut Request<T>,
) -> Result<Attempt, Reason> {
    // Keys must be on the stack.
    let flow = request.tuple;
    if is_taken::<T, P>(request, &flow) {
        let is_tcp = flow.protocol() == IP_PROTOCOL_TCP;
        // No flow starts in the middle of a connection.
        if is_tcp && !request.opens() {
            return Err(Reason::ServiceNoBackend);
        }
        if can_move(flow.protocol()) {
            return move_on(request);
        }
        request.attempt += 1;
        if request.attempt < BACKEND_ATTEMPTS {
            return Ok(Attempt::Again);
        }
        share::<T>(&flow, &answer_key::<T, P>(&flow, request.backend()));
        request.flow_flags |= u32::from(FLOW_SHARED);
    }
    if request.moved_port_be != 0 {
        request.flow_flags |= u32::from(FLOW_MOVED);
    }
    // A client that got a backend other than its own for one flow keeps its affinity.
    if request.has_affinity != 0 && (request.attempt == 0 || request.moved_port_be != 0) {
        stay(flow.source().0.to_addr(), request.service, request.backend);
    }
    Ok(Attempt::Done)
}

/// Makes the caller try another port for a flow.
#[inline(always)]
pub(super) fn move_on<T: Version>(request: &mut Request<T>) -> Result<Attempt, Reason> {
    request.attempt += 1;
    if request.attempt >= PORT_ATTEMPTS {
        return Err(Reason::ServiceNoBackend);
    }
    request.moved_port_be = other_port(&request.tuple, request.attempt.into()).to_be();
    Ok(Attempt::Again)
}

/// Whether flows of a protocol may get another source port here.
#[inline(always)]
fn can_move(protocol: u8) -> bool {
    matches!(protocol, IP_PROTOCOL_TCP | IP_PROTOCOL_UDP)
}

/// A port to try for a flow, host byte order; `attempt`: how many were tried before. A flow that lost its entry tries
/// the same ports again, and so finds the one that its answers use.
#[inline(always)]
fn other_port<T: Version>(flow: &T, attempt: u32) -> u16 {
    let ports = if u16::from_be(flow.source().1) < UNPRIVILEGED.min {
        PRIVILEGED
    } else {
        UNPRIVILEGED
    };
    let spread = (hash(flow, false) ^ attempt).wrapping_mul(GOLDEN_RATIO);
    ports.min + scaled(spread, ports.count()) as u16
}

/// Whether a backend's answers belong to another flow between the same ports as the backend sees them: one through
/// another frontend, one without a service, or one that the backend opened.
#[inline(always)]
fn is_taken<T: Version, P: Hook>(request: &Request<T>, flow: &T) -> bool {
    let to = request.backend();
    let sent = request.moved();
    let answer = T::service_flows().get_ptr(&answer_key::<T, P>(&sent, to));
    // SAFETY: a value of that map.
    let answer = answer.map(|entry| T::service_flow_parts(unsafe { &*entry }));
    if answer.is_some_and(|parts| is_of_flow(&parts, flow, &sent)) {
        return false;
    }
    let mut sent = sent.with_destination(to);
    if flow.protocol() != IP_PROTOCOL_TCP {
        return answer.is_some_and(|parts| coarse_now_secs() < parts.expires)
            || can_move(flow.protocol()) && is_tracked::<T, P>(&mut sent);
    }
    // In the middle of an endpoint's connection, the entries may have been evicted. From outside, anyone can send
    // such a segment in a client's name.
    let opens = request.opens();
    // Conntrack knows nothing of a connection of an endpoint that is its own backend.
    if !P::IS_UPLINK && to.0 == flow.source().0 {
        // So it does not know its end either: the last port tried is taken over from a connection that may be over.
        return answer.is_some() && opens && request.attempt + 1 < PORT_ATTEMPTS;
    }
    let is_evicted = answer.is_none() && !opens && !P::IS_UPLINK;
    if is_evicted || !is_open::<T, P>(sent) {
        return false;
    }
    // If a connection's backend answers the client directly, this node does not see its end. A client that has closed
    // its side and opens another connection between the same ports has finished with it; otherwise the backend's node
    // drops the SYN.
    !(P::IS_UPLINK && opens && is_closed_by_client(sent))
}

/// Enters the new flow, in both directions.
#[subprogram(service4_enter, service6_enter, uplink4_enter, uplink6_enter)]
pub(super) fn enter<T: Version, P: Hook>(_frame: &Frame, request: &mut Request<T>) -> Entered {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return Entered::Passed;
    };
    // Keys must be on the stack.
    let flow = request.tuple;
    let is_moved = request.moved_port_be != 0;
    let parts = ServiceFlowParts {
        to: flow.destination(),
        backend: request.backend,
        service: request.service,
        expires: first_expiry(flow.protocol(), config),
        flags: request.flow_flags as u16,
        client_port_be: if is_moved { flow.source().1 } else { 0 },
    };
    let answer = answer_key::<T, P>(&request.moved(), request.backend());
    if !enter_both(
        &flow,
        &answer,
        parts,
        request.backend(),
        request.moved_port_be,
    ) {
        return Entered::NoRoom;
    }
    if parts.service != 0 {
        count_flow(parts.backend);
    }
    Entered::Done
}
