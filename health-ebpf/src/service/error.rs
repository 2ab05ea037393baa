//! ICMP errors about packets of flows: the receiver of an error finds its own packet in it, with the address and port
//! that it used.
//!
//! There are four steps: read the packet that the error quotes; look up its flow; rewrite both ends of the quoted
//! packet at once; rewrite those of the error. A single step would be too much for the verifier, since the paths
//! through them multiply.

use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::metrics::Reason;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MOVED};
use health_common::tuple::ServiceFlowParts;

use super::answer::answered;
use super::flow::gateway;
use super::request::{Receiver, Request};
use super::rewrite::Rewritten;
use crate::frame::Frame;
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::rewrite::{self, Quoted};
use crate::subprogram::subprogram;

/// Reads the packet that an ICMP error quotes. `true`: the request has the tuple of a reply to that packet, direction
/// out.
#[subprogram(
    service4_read_error,
    service6_read_error,
    uplink4_read_error,
    uplink6_read_error
)]
fn read_error<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> bool {
    let inner = request
        .ip_at::<P>()
        .and_then(|ip_at| T::read_inner(frame, ip_at, request.content_at, TUPLE_OUT));
    let Some(inner) = inner else {
        return false;
    };
    request.tuple = inner.reply;
    request.quoted_at = inner.content_at as u16;
    request.quoted_len = inner.content_len as u16;
    true
}

/// Finds the flow of an ICMP error about a packet that went to a backend.
#[subprogram(
    service4_answer_error,
    service6_answer_error,
    uplink4_answer_error,
    uplink6_answer_error
)]
pub(super) fn answer_error<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> bool {
    // Keys must be on the stack.
    let key = request.tuple.with_direction(TUPLE_IN);
    let addresses = request
        .ip_at::<P>()
        .and_then(|ip_at| T::addresses(frame, ip_at));
    let Some((_, destination)) = addresses else {
        return false;
    };
    if !request.is_error() || destination != key.destination().0 {
        return false;
    }
    let Some(parts) = answered::<T, P>(&key, None) else {
        return false;
    };
    take_in(request, &parts, Receiver::Client);
    true
}

/// Finds the flow of an ICMP error about a service's answer; the error is for the backend that sent the answer. If an
/// endpoint is its own backend, also handles errors about the client's packets.
#[subprogram(
    service4_send_error,
    service6_send_error,
    uplink4_send_error,
    uplink6_send_error
)]
fn send_error<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> bool {
    // As above.
    let key = request.tuple;
    let addresses = request
        .ip_at::<P>()
        .and_then(|ip_at| T::addresses(frame, ip_at));
    let Some((source, destination)) = addresses else {
        return false;
    };
    // No endpoint may report on another endpoint's flow. From outside, routers on the way may.
    let is_between =
        (P::IS_UPLINK || source == key.source().0) && destination == key.destination().0;
    let Some(entry) = T::service_flows().get_ptr(&key) else {
        return false;
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    let is_from_outside = parts.flags & FLOW_FROM_OUTSIDE != 0;
    if !is_between || is_from_outside != P::IS_UPLINK {
        return false;
    }
    let receiver = if P::IS_UPLINK {
        Receiver::Backend
    } else if gateway::<T>().is_some_and(|gateway| gateway == destination) {
        Receiver::OwnClient
    } else if parts.to.0 == source {
        Receiver::OwnBackend
    } else {
        Receiver::Backend
    };
    take_in(request, &parts, receiver);
    true
}

/// Records the parts of an error's flow, from its entry under the tuple of a reply to the quoted packet.
#[inline(always)]
fn take_in<T: Version>(
    request: &mut Request<T>,
    parts: &ServiceFlowParts<T::Address>,
    receiver: Receiver,
) {
    request.set_backend(parts.to);
    request.flow_flags = parts.flags.into();
    request.moved_port_be = if parts.flags & FLOW_MOVED != 0 {
        parts.client_port_be
    } else {
        0
    };
    request.receiver = receiver;
}

/// Rewrites an ICMP error to a client so that it quotes the packet that the client sent. The request contains the
/// error's offset.
#[inline(always)]
pub(super) fn translate_error_to_client<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Rewritten, Reason> {
    if read_error::<T, P>(frame, request) && answer_error::<T, P>(frame, request) {
        rewrite::<T, P>(frame, request)
    } else {
        Ok(Rewritten::Passed)
    }
}

/// Rewrites an ICMP error from a client, or from an endpoint that is its own client or backend, so that it quotes the
/// packet that its receiver sent.
#[inline(always)]
pub(super) fn translate_error_to_backend<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Rewritten, Reason> {
    if read_error::<T, P>(frame, request) && send_error::<T, P>(frame, request) {
        rewrite::<T, P>(frame, request)
    } else {
        Ok(Rewritten::Passed)
    }
}

/// Rewrites an error whose flow was found.
#[inline(always)]
fn rewrite<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Rewritten, Reason> {
    rewrite_quoted::<T, P>(frame, request)?;
    rewrite_around::<T, P>(frame, request)
}

/// The client's end of the quoted packet after rewriting.
#[inline(always)]
fn client<T: Version>(request: &Request<T>, receiver: Receiver) -> (T::Address, u16) {
    // The quoted packet's far end is the source of a reply.
    let (far, near) = (request.tuple.source(), request.tuple.destination());
    let old = if receiver.is_client() { near } else { far };
    let address = match receiver {
        Receiver::OwnClient => far.0,
        // It exists, since such a flow was entered through it.
        Receiver::OwnBackend => gateway::<T>().unwrap_or(old.0),
        Receiver::Client | Receiver::Backend => old.0,
    };
    let port_be = if request.moved_port_be != 0 {
        request.moved_port_be
    } else {
        old.1
    };
    (address, port_be)
}

/// Rewrites the packet that an ICMP error quotes, once its flow was found.
#[subprogram(
    service4_rewrite_quoted,
    service6_rewrite_quoted,
    uplink4_rewrite_quoted,
    uplink6_rewrite_quoted
)]
fn rewrite_quoted<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<(), Reason> {
    let receiver = request.receiver;
    let (client, far) = (client(request, receiver), request.backend());
    let quoted = Quoted::<T> {
        content_at: request.quoted_at.into(),
        content_len: request.quoted_len.into(),
        protocol: request.tuple.protocol(),
        old: [request.tuple.destination(), request.tuple.source()],
        new: if receiver.is_client() {
            [client, far]
        } else {
            [far, client]
        },
    };
    rewrite::quoted(frame, request.content_at, &quoted).ok_or(Reason::WriteFailed)
}

/// Rewrites the ends of such an error itself.
#[subprogram(
    service4_rewrite_around,
    service6_rewrite_around,
    uplink4_rewrite_around,
    uplink6_rewrite_around
)]
fn rewrite_around<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Rewritten, Reason> {
    let receiver = request.receiver;
    let Some(ip_at) = request.ip_at::<P>() else {
        return Ok(Rewritten::Passed);
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return Ok(Rewritten::Passed);
    };
    let (client, far) = (client(request, receiver).0, request.addr_be);
    // Errors from routers on the way keep their source.
    let sender = match receiver {
        Receiver::Client if source != request.tuple.source().0 => source,
        Receiver::Client | Receiver::OwnClient => far,
        Receiver::Backend => source,
        Receiver::OwnBackend => client,
    };
    let new_destination = if receiver.is_client() { client } else { far };
    let is_written = rewrite::around::<T>(
        frame,
        ip_at as u32,
        request.content_at,
        [source, destination],
        [sender, new_destination],
    );
    if is_written.is_none() {
        return Err(Reason::WriteFailed);
    }
    Ok(match receiver {
        Receiver::OwnClient | Receiver::OwnBackend => Rewritten::Back,
        Receiver::Client | Receiver::Backend => Rewritten::On,
    })
}
