//! Services: a packet to a frontend is sent to a backend, and the backend's answers get the frontend's address.
//!
//! Known flows are looked up first, so that they keep their backend whatever happens to the service. Policy is
//! applied between the two translations: it sees the backend in a client's packets, and the client in packets to a
//! backend.

mod answer;
mod backend;
mod connected;
mod direct;
mod error;
mod forward;
mod reject;
mod request;
pub mod socket;
mod step;
mod uplink;

use aya_ebpf::Global;
use aya_ebpf::bindings::__sk_buff;
use health_common::config::{DatapathConfig, SERVICES};

use crate::frame::{Frame, MARK_ANSWERED};
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::metrics::{Verdict, redirected, refuse, refuse_for};
use health_common::endpoint::EndpointInfo;
use health_common::metrics::{Direction, Reason};
use health_common::packet::Packet;
use health_common::service::{FLOW_OF_HOST, FLOW_PAST_STACK, FLOW_SHARED};
use health_common::tuple::ServiceFlowParts;
use network_types::eth::EthHdr;

use backend::PORT_ATTEMPTS;
pub(crate) use backend::{forget, forget_untracked, tracked_flow};
use error::tell_backend;
pub use reject::SentErrors;
use step::{AtEndpoint, AtUplink, Hook, Request, SharedSteps, StepResult};
pub use step::{Steps, UplinkSteps};
pub use uplink::{arrive, from_service, leave, to_service};

/// Whether the agent that loads the programs may ever have services. The verifier treats it as a constant: without
/// services, it neither checks nor keeps code that only they need.
#[unsafe(no_mangle)]
static HAS_SERVICES: Global<u8> = Global::new(1);

/// Whether these programs handle services at all, now or later.
#[inline(always)]
pub fn is_there() -> bool {
    HAS_SERVICES.load() != 0
}

/// Whether services are enabled.
#[inline(always)]
pub fn is_on() -> bool {
    is_there()
        && HEALTH_CONFIG
            .get(0)
            .is_some_and(|config| config.flags & SERVICES != 0)
}

/// The destination of packets of a known flow from outside, with the other parts of its entry.
#[inline(always)]
pub(crate) fn known_from_outside<T: Version<Address: Default>>(
    packet: &Packet<T>,
    flow: &T,
    config: &DatapathConfig,
) -> Option<ServiceFlowParts<T::Address>> {
    request::known::<T, AtUplink>(&Request::of(packet), flow, config)
}

/// The flow that a backend's packet to an outside client answers; the packet's tuple has direction in.
#[inline(always)]
pub(crate) fn answered_to_outside<T: Version>(
    key: &T,
    config: &DatapathConfig,
) -> Option<ServiceFlowParts<T::Address>> {
    answer::answered::<T, AtUplink>(key, Some(config))
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

/// Sends a packet of an endpoint to a backend if it is for a service. `Ok`: the packet continues, to the backend or,
/// unchanged, to its own destination; the value says whether it was entered as a new flow.
#[inline(always)]
pub fn send<T: Steps>(frame: &Frame, endpoint: &EndpointInfo) -> Result<bool, Verdict> {
    let skb = frame.skb();
    let mut request = Request::<T>::new();
    let (found, is_new) = find_backend::<T, AtEndpoint>(skb, &mut request);
    let result = match found {
        StepResult::FOUND => T::rewrite(skb, &mut request),
        StepResult::IS_ERROR => tell_backend(skb, &mut request),
        result => result,
    };
    match result {
        StepResult::TURNED => Err(turn_round(frame, endpoint, Reason::Forwarded)),
        StepResult::REJECTED => Err(reject(frame, endpoint, T::reject(skb, &mut request))),
        result => match dropped(frame, result, Direction::Ingress) {
            Some(verdict) => Err(verdict),
            None => Ok(is_new),
        },
    }
}

/// Finds a packet's destination: its flow's backend, or one for a new flow, which is then entered. The second result
/// is whether the flow is new.
#[inline(always)]
fn find_backend<T: SharedSteps<P>, P: Hook>(
    skb: *mut __sk_buff,
    request: &mut Request<T>,
) -> (StepResult, bool) {
    let mut result = T::find(skb, request);
    if result == StepResult::HAS_NO_SERVICE {
        result = T::pass_by(skb, request);
    }
    if result == StepResult::FOUND && request.flow_flags as u16 & FLOW_SHARED != 0 {
        result = T::take_answers(skb, request);
    }
    if result == StepResult::MAY_ANSWER {
        result = T::leave_to_socket(skb, request);
    }
    let is_new = result == StepResult::IS_NEW;
    if is_new {
        for _ in 0..PORT_ATTEMPTS {
            result = T::choose(skb, request);
            if result == StepResult::CHOSEN {
                result = T::take(skb, request);
            }
            let is_of_host = request.flow_flags as u16 & FLOW_OF_HOST != 0;
            if P::IS_UPLINK && is_of_host && result == StepResult::CHOSEN {
                result = T::avoid_socket(skb, request);
            }
            if result != StepResult::TAKEN {
                break;
            }
        }
    }
    if P::IS_UPLINK && result == StepResult::CHOSEN {
        result = T::settle(skb, request);
    }
    if result == StepResult::CHOSEN {
        result = enter(request, |request| T::enter(skb, request));
    }
    (result, is_new)
}

/// Enters a flow using `step`.
#[inline(always)]
fn enter<T: Version>(
    request: &mut Request<T>,
    step: impl Fn(&mut Request<T>) -> StepResult,
) -> StepResult {
    let protocol = request.tuple.protocol();
    match T::service_flows().with_room(protocol, &StepResult::HAS_NO_ROOM, || step(request)) {
        StepResult::HAS_NO_ROOM => StepResult::dropped(Reason::ServiceNoBackend),
        result => result,
    }
}

/// Removes what was stored for a packet that policy refuses, and its flow if that is new: they would take up space
/// that others need.
#[inline(always)]
pub fn withdraw<T: Steps>(frame: &Frame, is_new: bool) {
    let _ = T::forget_ports(frame.skb());
    if is_new {
        let _ = T::withdraw(frame.skb());
    }
}

/// Rewrites the source of a backend's answer to an endpoint to the frontend's address. If the endpoint's policy
/// refuses the packet, removes its flow if that is from outside.
#[inline(always)]
pub fn answer<T: Steps>(frame: &Frame, is_admitted: bool) -> Option<Verdict> {
    let result = if is_admitted {
        let mut answered = T::answer(frame.skb());
        if answered == StepResult::LOST && T::restore(frame.skb()) == StepResult::FOUND {
            answered = T::answer(frame.skb());
        }
        match answered.begins_error_at() {
            Some(error_at) => T::tell_client(frame.skb(), error_at),
            None => answer::restore_port(frame.skb(), answered),
        }
    } else {
        T::withdraw_from_outside(frame.skb())
    };
    dropped(frame, result, Direction::Egress)
}

#[inline(always)]
fn dropped(frame: &Frame, result: StepResult, direction: Direction) -> Option<Verdict> {
    refuse_for(frame, result.0, step::DROPS, direction)
}

/// Notifies a client that there is no backend, if its packet could be turned into an error.
#[inline(always)]
fn reject(frame: &Frame, endpoint: &EndpointInfo, result: StepResult) -> Verdict {
    let reason = Reason::ServiceRejected;
    match result {
        StepResult::TURNED => turn_round(frame, endpoint, reason),
        _ => refuse(frame, reason, Direction::Ingress),
    }
}

/// Sends a packet back to the endpoint that it came from. No policy applies: the endpoint talks to itself, or is
/// notified about its own packet.
#[inline(always)]
fn turn_round(frame: &Frame, endpoint: &EndpointInfo, reason: Reason) -> Verdict {
    let addresses = [endpoint.mac, endpoint.host_mac];
    if !frame.store(0, &addresses) {
        return refuse(frame, Reason::WriteFailed, Direction::Ingress);
    }
    const _: () = assert!(core::mem::offset_of!(EthHdr, ether_type) == size_of::<[[u8; 6]; 2]>());
    send_back(frame, endpoint.ifindex, reason)
}

/// Sends a packet out of the device that it came in on. The program there lets it pass.
#[inline(always)]
fn send_back(frame: &Frame, ifindex: u32, reason: Reason) -> Verdict {
    frame.set_mark(MARK_ANSWERED);
    let code = frame.redirect(ifindex, 0);
    redirected(frame, reason, Direction::Ingress, code)
}
