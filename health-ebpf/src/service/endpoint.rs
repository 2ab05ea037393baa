//! Services for packets that endpoints send and receive.

use health_common::endpoint::EndpointInfo;
use health_common::metrics::{Direction, Reason};
use network_types::eth::EthHdr;

use super::answer::{Answered, Rest, answer_to_inside, restore_port};
use super::destination::{Destination, find_destination};
use super::direct::Direct;
use super::error::{self, translate_error_to_backend};
use super::reject::{Unreachable, reject};
use super::request::Request;
use super::rewrite::{Rewritten, rewrite};
use super::withdraw::{self, forget_ports, withdraw_from_outside};
use crate::frame::Frame;
use crate::hook::AtEndpoint;
use crate::ip_version::Version;
use crate::metrics::{Verdict, redirected, refuse};
use crate::subprogram::subprogram;

/// Sends a packet of an endpoint to a backend if it is for a service. `Ok`: the packet continues, to the backend or,
/// unchanged, to its own destination; the value says whether it was entered as a new flow.
#[inline(always)]
pub fn send<T: Direct + Unreachable>(
    frame: &Frame,
    endpoint: &EndpointInfo,
) -> Result<bool, Verdict> {
    let mut request = Request::<T>::new();
    match send_on(frame, &mut request) {
        Ok((Rewritten::Back, _)) => Err(turn_round(frame, endpoint, Reason::Forwarded)),
        Ok((Rewritten::On | Rewritten::Passed, is_new)) => Ok(is_new),
        Err(reason) => Err(refuse_request(frame, endpoint, &mut request, reason)),
    }
}

/// Rewrites a packet for its backend. The second result is whether it was entered as a new flow.
#[inline(always)]
fn send_on<T: Direct>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<(Rewritten, bool), Reason> {
    Ok(match find_destination::<T, AtEndpoint>(frame, request)? {
        Destination::Own => (Rewritten::Passed, false),
        Destination::Backend { is_new } => (rewrite::<T, AtEndpoint>(frame, request)?, is_new),
        Destination::Error => (
            translate_error_to_backend::<T, AtEndpoint>(frame, request)?,
            false,
        ),
    })
}

/// Removes what was stored for a packet that policy refuses, and its flow if that is new: they would take up space
/// that others need.
#[inline(always)]
pub fn withdraw<T: Version>(frame: &Frame, is_new: bool) {
    forget_ports::<T>(frame);
    if is_new {
        withdraw::withdraw::<T>(frame);
    }
}

/// Rewrites the source of a backend's answer to an endpoint to the frontend's address. If the endpoint's policy
/// refuses the packet, removes its flow if that is from outside.
#[inline(always)]
pub fn answer<T: Version>(frame: &Frame, is_admitted: bool) -> Option<Verdict> {
    if !is_admitted {
        withdraw_from_outside::<T>(frame);
        return None;
    }
    let reason = answer_client::<T>(frame).err()?;
    Some(refuse(frame, reason, Direction::Egress))
}

#[inline(always)]
fn answer_client<T: Version>(frame: &Frame) -> Result<(), Reason> {
    let mut rest = Rest::default();
    match answer_to_inside::<T>(frame, &mut rest)? {
        Answered::Passed | Answered::Done | Answered::Lost => Ok(()),
        Answered::ButPort => restore_port(frame, &mut rest),
        Answered::Error => translate_error_to_client::<T>(frame, rest.content_at),
    }
}

/// Rewrites an ICMP error to an endpoint so that it quotes the packet that the endpoint sent.
#[subprogram(service4_error_to_client, service6_error_to_client)]
fn translate_error_to_client<T: Version>(frame: &Frame, error_at: u32) -> Result<(), Reason> {
    let mut request = Request::<T>::new();
    request.content_at = error_at;
    error::translate_error_to_client::<T, AtEndpoint>(frame, &mut request).map(|_| ())
}

/// Drops a packet. If there is no backend for it, its sender is notified, unless it cannot be turned into an error.
#[inline(always)]
fn refuse_request<T: Unreachable>(
    frame: &Frame,
    endpoint: &EndpointInfo,
    request: &mut Request<T>,
    reason: Reason,
) -> Verdict {
    if reason == Reason::ServiceRejected && reject::<T, AtEndpoint>(frame, request) {
        turn_round(frame, endpoint, reason)
    } else {
        refuse(frame, reason, Direction::Ingress)
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
    let code = frame.send_back(endpoint.ifindex);
    redirected(frame, reason, Direction::Ingress, code)
}
