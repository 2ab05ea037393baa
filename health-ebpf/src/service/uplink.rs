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

use super::answer::{Answered, Rest, answer_to_outside, restore_port};
use super::destination::{Destination, enter_with_room, find_destination};
use super::direct::accept::{accept, may_have_option, relay, take_off};
use super::direct::{Direct, follow, name_frontend};
use super::enabled::is_on;
use super::error::{answer_error, translate_error_to_backend, translate_error_to_client};
use super::forward::{Forwarded, forward, note};
use super::reject::{Unreachable, reject};
use super::request::Request;
use super::rewrite::{Rewritten, rewrite};
use crate::frame::{Frame, MARK_ANSWERED, MARK_SERVED};
use crate::hook::AtUplink;
use crate::ip_version::Version;
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

/// The `to_service` program: handles a packet that came in on an uplink.
#[inline(always)]
pub fn to_service(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => arriving::<Tuple4>(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => arriving::<Tuple6>(frame, ip_at),
        _ => ignore(),
    }
}

/// The `from_service` program: handles a packet that leaves on an uplink.
#[inline(always)]
pub fn from_service(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => leaving::<Tuple4>(frame, ip_at, ETHERTYPE_IPV4),
        Some((ETHERTYPE_IPV6, ip_at)) => leaving::<Tuple6>(frame, ip_at, ETHERTYPE_IPV6),
        _ => ignore(),
    }
}

#[inline(always)]
fn arriving<T: Direct + Unreachable>(frame: &Frame, ip_at: usize) -> Verdict {
    let mut request = Request::<T>::at(ip_at);
    match accept_or_send(frame, ip_at, &mut request) {
        Ok(true) => go_on(frame, &mut request),
        Ok(false) => ignore(),
        Err(reason) => refuse_request(frame, &mut request, reason),
    }
}

/// Rewrites a packet that another node forwarded here, that is for a service, or that passes as an answer. `false`: it
/// is none of these.
#[inline(always)]
fn accept_or_send<T: Direct>(
    frame: &Frame,
    ip_at: usize,
    request: &mut Request<T>,
) -> Result<bool, Reason> {
    if may_have_option::<T>(frame, ip_at)
        && accept(frame, request)?
        && enter_with_room(request, |request| relay(frame, request))?
    {
        return take_off::<T>(frame).map(|()| true);
    }
    let rewritten = match find_destination::<T, AtUplink>(frame, request)? {
        Destination::Own => Rewritten::Passed,
        Destination::Backend { .. } => send(frame, request)?,
        Destination::Error => translate_error_to_backend::<T, AtUplink>(frame, request)?,
    };
    if rewritten != Rewritten::Passed {
        return Ok(rewritten == Rewritten::On);
    }
    request.is_passing = 1;
    if request.is_error() {
        return Ok(answer_error::<T, AtUplink>(frame, request));
    }
    let answered = answer_to_outside(frame, request, &mut Rest::default())?;
    Ok(matches!(answered, Answered::Done))
}

/// Rewrites a packet for its backend.
#[inline(always)]
fn send<T: Direct>(frame: &Frame, request: &mut Request<T>) -> Result<Rewritten, Reason> {
    let is_direct = request.has(FLOW_DIRECT);
    if is_direct {
        follow(frame, request);
    } else if request.has(FLOW_OF_HOST) {
        note(frame, request);
    }
    let rewritten = rewrite::<T, AtUplink>(frame, request)?;
    if is_direct {
        name_frontend(frame, request)?;
    }
    Ok(rewritten)
}

/// Forwards a packet once it is complete.
#[inline(always)]
fn go_on<T: Version>(frame: &Frame, request: &mut Request<T>) -> Verdict {
    let forwarded = forward(frame, request);
    if let Forwarded::Device = forwarded {
        return redirected(
            frame,
            Reason::Forwarded,
            Direction::Ingress,
            TC_ACT_REDIRECT.into(),
        );
    }
    let verdict = pass(frame, Reason::Forwarded, Direction::Ingress);
    if let Forwarded::Endpoint = forwarded {
        delivery::hand_over(frame);
    }
    verdict
}

#[inline(always)]
fn leaving<T: Version>(frame: &Frame, ip_at: usize, ethertype: u16) -> Verdict {
    let mut request = Request::<T>::at(ip_at);
    match answer_client(frame, &mut request) {
        Ok(true) => {}
        Ok(false) => return nat::leave(frame, ethertype),
        Err(reason) => return refuse(frame, reason, Direction::Egress),
    }
    if request.has(FLOW_OF_HOST) && request.has_flow() {
        note(frame, &mut request);
    }
    pass(frame, Reason::Forwarded, Direction::Egress)
}

/// Rewrites an answer to a client. `false`: it is none.
#[inline(always)]
fn answer_client<T: Version>(frame: &Frame, request: &mut Request<T>) -> Result<bool, Reason> {
    let mut rest = Rest::default();
    match answer_to_outside(frame, request, &mut rest)? {
        Answered::Passed | Answered::Lost => Ok(false),
        Answered::Done => Ok(true),
        Answered::ButPort => restore_port(frame, &mut rest).map(|()| true),
        Answered::Error => {
            Ok(translate_error_to_client::<T, AtUplink>(frame, request)? == Rewritten::On)
        }
    }
}

/// Drops a packet. If there is no backend for it, its sender is notified on the way that it came, unless it cannot be
/// turned into an error.
#[inline(always)]
fn refuse_request<T: Unreachable>(
    frame: &Frame,
    request: &mut Request<T>,
    reason: Reason,
) -> Verdict {
    if reason == Reason::ServiceRejected
        && reject::<T, AtUplink>(frame, request)
        && turn_round(frame)
    {
        let code = frame.send_back(frame.ifindex());
        redirected(frame, reason, Direction::Ingress, code)
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
