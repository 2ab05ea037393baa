//! ICMP errors about packets of flows: the receiver of an error finds its own packet in it, with the address and port
//! that it used.
//!
//! There are four steps: read the packet that the error quotes; look up its flow; rewrite both ends of the quoted
//! packet at once; rewrite those of the error. A single step would be too much for the verifier, since the paths
//! through them multiply.

use aya_ebpf::bindings::__sk_buff;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::metrics::Reason;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MOVED};
use health_common::tuple::ServiceFlowParts;

use super::answer::answered;
use super::request::gateway;
use super::step::{Hook, Request, SharedSteps, StepResult};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::rewrite::{self, Quoted};

/// The receiver of an ICMP error.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// The client, or, if the flow was not looked up, no one.
    Client = 0,
    /// The client, which is its own backend.
    OwnClient = 1,
    /// The backend.
    Backend = 2,
    /// The backend, which is its own client.
    OwnBackend = 3,
}

impl Told {
    const fn is_client(self) -> bool {
        matches!(self, Self::Client | Self::OwnClient)
    }

    const fn of(number: u16) -> Self {
        match number {
            1 => Self::OwnClient,
            2 => Self::Backend,
            3 => Self::OwnBackend,
            _ => Self::Client,
        }
    }
}

/// Reads the packet that an ICMP error quotes. `FOUND`: the request has the tuple of a reply to that packet,
/// direction out.
#[inline(always)]
pub(super) fn read_error<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    let inner = P::ip_at(request)
        .and_then(|ip_at| T::read_inner(frame, ip_at, request.content_at, TUPLE_OUT));
    let Some(inner) = inner else {
        return StepResult::PASSED;
    };
    request.tuple = inner.reply;
    request.quoted_at = inner.content_at as u16;
    request.quoted_len = inner.content_len as u16;
    StepResult::FOUND
}

/// Finds the flow of an ICMP error about a packet that went to a backend.
#[inline(always)]
pub(super) fn answer_error<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    // Keys must be on the stack.
    let key = request.tuple.with_direction(TUPLE_IN);
    let Some((_, destination)) = P::ip_at(request).and_then(|ip_at| T::addresses(frame, ip_at))
    else {
        return StepResult::PASSED;
    };
    if !request.is_error() || destination != key.destination().0 {
        return StepResult::PASSED;
    }
    let Some(parts) = answered::<T, P>(&key, None) else {
        return StepResult::PASSED;
    };
    take_in(request, &parts, Told::Client)
}

/// Finds the flow of an ICMP error about a service's answer; the error is for the backend that sent the answer. If an
/// endpoint is its own backend, also handles errors about the client's packets.
#[inline(always)]
pub(super) fn send_error<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    // As above.
    let key = request.tuple;
    let Some((source, destination)) =
        P::ip_at(request).and_then(|ip_at| T::addresses(frame, ip_at))
    else {
        return StepResult::PASSED;
    };
    // No endpoint may report on another endpoint's flow. From outside, routers on the way may.
    let is_between =
        (P::IS_UPLINK || source == key.source().0) && destination == key.destination().0;
    let Some(entry) = T::service_flows().get_ptr(&key) else {
        return StepResult::PASSED;
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    let is_from_outside = parts.flags & FLOW_FROM_OUTSIDE != 0;
    if !is_between || is_from_outside != P::IS_UPLINK {
        return StepResult::PASSED;
    }
    let told = if P::IS_UPLINK {
        Told::Backend
    } else if gateway::<T>().is_some_and(|gateway| gateway == destination) {
        Told::OwnClient
    } else if parts.to.0 == source {
        Told::OwnBackend
    } else {
        Told::Backend
    };
    take_in(request, &parts, told)
}

/// Records the parts of an error's flow, from its entry under the tuple of a reply to the quoted packet.
#[inline(always)]
fn take_in<T: Version>(
    request: &mut Request<T>,
    parts: &ServiceFlowParts<T::Address>,
    told: Told,
) -> StepResult {
    request.set_backend(parts.to);
    request.flow_flags = parts.flags.into();
    request.moved_port_be = if parts.flags & FLOW_MOVED != 0 {
        parts.client_port_be
    } else {
        0
    };
    request.told = told as u16;
    StepResult::FOUND
}

/// Rewrites an ICMP error to an endpoint so that it quotes the packet that the endpoint sent. The request contains
/// the error's offset.
#[inline(always)]
pub(super) fn tell_client<T: SharedSteps<P>, P: Hook>(
    skb: *mut __sk_buff,
    request: &mut Request<T>,
) -> StepResult {
    let mut result = T::read_error(skb, request);
    if result == StepResult::FOUND {
        result = T::answer_error(skb, request);
    }
    rewrite(skb, request, result)
}

/// Rewrites an ICMP error from a client, or from an endpoint that is its own client or backend, so that it quotes the
/// packet that its receiver sent.
#[inline(always)]
pub(super) fn tell_backend<T: SharedSteps<P>, P: Hook>(
    skb: *mut __sk_buff,
    request: &mut Request<T>,
) -> StepResult {
    let mut result = T::read_error(skb, request);
    if result == StepResult::FOUND {
        result = T::send_error(skb, request);
    }
    rewrite(skb, request, result)
}

/// Rewrites an error if its flow was found, given the result of the look-up.
#[inline(always)]
fn rewrite<T: SharedSteps<P>, P: Hook>(
    skb: *mut __sk_buff,
    request: &mut Request<T>,
    mut result: StepResult,
) -> StepResult {
    if result == StepResult::FOUND {
        result = T::rewrite_quoted(skb, request);
    }
    if result == StepResult::FOUND {
        result = T::rewrite_around(skb, request);
    }
    result
}

/// The client's end of the quoted packet after rewriting.
#[inline(always)]
fn client<T: Version>(request: &Request<T>, told: Told) -> (T::Address, u16) {
    // The quoted packet's far end is the source of a reply.
    let (far, near) = (request.tuple.source(), request.tuple.destination());
    let old = if told.is_client() { near } else { far };
    let address = match told {
        Told::OwnClient => far.0,
        // It exists, since such a flow was entered through it.
        Told::OwnBackend => gateway::<T>().unwrap_or(old.0),
        Told::Client | Told::Backend => old.0,
    };
    let port_be = if request.moved_port_be != 0 {
        request.moved_port_be
    } else {
        old.1
    };
    (address, port_be)
}

/// Rewrites the packet that an ICMP error quotes, once its flow was found.
#[inline(always)]
pub(super) fn rewrite_quoted<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    let told = Told::of(request.told);
    let (client, far) = (client(request, told), request.backend());
    let quoted = Quoted::<T> {
        content_at: request.quoted_at.into(),
        content_len: request.quoted_len.into(),
        protocol: request.tuple.protocol(),
        old: [request.tuple.destination(), request.tuple.source()],
        new: if told.is_client() {
            [client, far]
        } else {
            [far, client]
        },
    };
    match rewrite::quoted(frame, request.content_at, &quoted) {
        Some(()) => StepResult::FOUND,
        None => StepResult::dropped(Reason::WriteFailed),
    }
}

/// Rewrites the ends of such an error itself. `TURNED`: it goes back to its sender.
#[inline(always)]
pub(super) fn rewrite_around<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    let told = Told::of(request.told);
    let Some(ip_at) = P::ip_at(request) else {
        return StepResult::PASSED;
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return StepResult::PASSED;
    };
    let (client, far) = (client(request, told).0, request.addr_be);
    // Errors from routers on the way keep their source.
    let sender = match told {
        Told::Client if source != request.tuple.source().0 => source,
        Told::Client | Told::OwnClient => far,
        Told::Backend => source,
        Told::OwnBackend => client,
    };
    let receiver = if told.is_client() { client } else { far };
    let is_written = rewrite::around::<T>(
        frame,
        ip_at as u32,
        request.content_at,
        [source, destination],
        [sender, receiver],
    );
    if is_written.is_none() {
        return StepResult::dropped(Reason::WriteFailed);
    }
    match told {
        Told::OwnClient | Told::OwnBackend => StepResult::TURNED,
        Told::Client | Told::Backend => StepResult::FOUND,
    }
}
