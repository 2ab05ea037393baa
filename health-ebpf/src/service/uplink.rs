//! Services for packets from outside this node: the programs `to_service` and `from_service`.
//!
//! A local backend gets a client's packets unchanged, except for the destination. A remote one gets them from this
//! node's address, which `masquerade` sets as their source, so that its answers come back here. Backends' answers get
//! the service's source where they leave for the client.

use aya_ebpf::bindings::TC_ACT_REDIRECT;
use health_common::calls::{CALL_FROM_SERVICE, CALL_TO_SERVICE};
use health_common::ct::{Tuple4, Tuple6};
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::service::{FLOW_DIRECT, FLOW_OF_HOST};
use network_types::eth::EthHdr;

use super::answer::{answer_to_outside, restore_port};
use super::direct::accept::is_told;
use super::error::{tell_backend, tell_client};
use super::step::{AtUplink, Request, StepResult, UplinkSteps};
use super::{dropped, enter, find_backend, is_on, send_back};
use crate::frame::{Frame, MARK_ANSWERED, MARK_SERVED};
use crate::maps::HEALTH_CALLS;
use crate::metrics::{Verdict, ignore, pass, redirected, refuse};
use crate::{delivery, nat};

/// Tail-calls `to_service` for a packet that came in on an uplink, if services are enabled.
#[inline(always)]
pub fn arrive(frame: &Frame) -> Verdict {
    if is_on() && frame.is_to_host() {
        // SAFETY: a tail call runs no drops, and no value of these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_TO_SERVICE) };
    }
    ignore()
}

/// Tail-calls `from_service` for a packet that leaves on an uplink, if services are enabled; else passes it to
/// masquerading.
#[inline(always)]
pub fn leave(frame: &Frame, ethertype: u16) -> Verdict {
    // An error that `to_service` sent back, or a packet to a backend that answers the client directly.
    if frame.was_marked(MARK_ANSWERED) {
        frame.set_mark(0);
        return pass(frame, Reason::Forwarded, Direction::Egress);
    }
    if is_on() && !frame.was_marked(MARK_SERVED) {
        // SAFETY: a tail call runs no drops, and no value of these programs implements `Drop`.
        unsafe { HEALTH_CALLS.tail_call(frame.ctx(), CALL_FROM_SERVICE) };
    }
    nat::leave(frame, ethertype)
}

/// The program `to_service`: handles a packet that came in on an uplink.
#[inline(always)]
pub fn to_service(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => arriving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => arriving::<Tuple6>(frame, ip_at),
        _ => ignore(),
    }
}

/// The program `from_service`: handles a packet that leaves on an uplink.
#[inline(always)]
pub fn from_service(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => leaving::<Tuple4>(frame, ip_at, ETHERTYPE_IPV4),
        Some((ETHERTYPE_IPV6, ip_at)) => leaving::<Tuple6>(frame, ip_at, ETHERTYPE_IPV6),
        _ => ignore(),
    }
}

#[inline(always)]
fn arriving<T: UplinkSteps>(frame: &Frame, ip_at: usize) -> Verdict {
    let skb = frame.skb();
    let mut request = Request::<T>::at(ip_at);
    if is_told::<T>(frame, ip_at) {
        let mut accepted = T::accept(skb, &mut request);
        if accepted == StepResult::FOUND {
            accepted = enter(&mut request, |request| T::relay(skb, request));
        }
        if accepted == StepResult::FOUND {
            accepted = T::take_off(skb, &mut request);
        }
        if accepted == StepResult::FOUND {
            return go_on(frame, &mut request);
        }
        if let Some(verdict) = dropped(frame, accepted, Direction::Ingress) {
            return verdict;
        }
    }
    let (found, _) = find_backend::<T, AtUplink>(skb, &mut request);
    let mut result = match found {
        StepResult::FOUND if request.flow_flags as u16 & FLOW_DIRECT != 0 => {
            let _ = T::follow(skb, &mut request);
            match T::rewrite(skb, &mut request) {
                StepResult::FOUND => T::tell(skb, &mut request),
                result => result,
            }
        }
        StepResult::FOUND => {
            if request.flow_flags as u16 & FLOW_OF_HOST != 0 {
                let _ = T::note(skb, &mut request);
            }
            T::rewrite(skb, &mut request)
        }
        StepResult::IS_ERROR => tell_backend(skb, &mut request),
        StepResult::REJECTED => return reject(frame, T::reject(skb, &mut request)),
        result => result,
    };
    if result == StepResult::PASSED {
        request.is_passing = 1;
        result = if request.is_error() {
            T::answer_error(skb, &mut request)
        } else {
            answer_to_outside(skb, &mut request)
        };
    }
    if result != StepResult::FOUND {
        return dropped(frame, result, Direction::Ingress).unwrap_or_else(ignore);
    }
    go_on(frame, &mut request)
}

/// Forwards a packet once it is complete.
#[inline(always)]
fn go_on<T: UplinkSteps>(frame: &Frame, request: &mut Request<T>) -> Verdict {
    let result = T::forward(frame.skb(), request);
    if result == StepResult::FORWARDED {
        return redirected(
            frame,
            Reason::Forwarded,
            Direction::Ingress,
            TC_ACT_REDIRECT.into(),
        );
    }
    let verdict = pass(frame, Reason::Forwarded, Direction::Ingress);
    if result == StepResult::DELIVERABLE {
        delivery::hand_over(frame);
    }
    verdict
}

#[inline(always)]
fn leaving<T: UplinkSteps>(frame: &Frame, ip_at: usize, ethertype: u16) -> Verdict {
    let skb = frame.skb();
    let mut request = Request::<T>::at(ip_at);
    let answered = answer_to_outside(skb, &mut request);
    let result = if answered.begins_error_at().is_some() {
        tell_client(skb, &mut request)
    } else {
        restore_port(skb, answered)
    };
    if result != StepResult::FOUND {
        return match dropped(frame, result, Direction::Egress) {
            Some(verdict) => verdict,
            None => nat::leave(frame, ethertype),
        };
    }
    if request.flow_flags as u16 & FLOW_OF_HOST != 0 && request.has_flow() {
        let _ = T::note(skb, &mut request);
    }
    pass(frame, Reason::Forwarded, Direction::Egress)
}

/// Notifies a client that there is no backend, on the way that its packet came, if the packet could be turned into an
/// error.
#[inline(always)]
fn reject(frame: &Frame, result: StepResult) -> Verdict {
    let reason = Reason::ServiceRejected;
    if result == StepResult::TURNED && turn_round(frame) {
        send_back(frame, frame.ifindex(), reason)
    } else {
        refuse(frame, reason, Direction::Ingress)
    }
}

/// Swaps the hardware addresses, if there are any.
#[inline(always)]
fn turn_round(frame: &Frame) -> bool {
    if frame.link_header_len() == 0 {
        return true;
    }
    let Some(ethernet) = frame.at::<EthHdr>(0) else {
        return false;
    };
    let swapped = [ethernet.src_addr, ethernet.dst_addr];
    frame.store(0, &swapped)
}
