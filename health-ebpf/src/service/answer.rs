//! Packets from a backend to a client.

use aya_ebpf::bindings::BPF_NOEXIST;
use health_common::config::DatapathConfig;
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN};
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MOVED};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use super::flow::prolong;
use super::request::Request;
use crate::clock::coarse_now_secs;
use crate::fragment::{Resolved, keep};
use crate::frame::{Frame, IP_AT};
use crate::hook::{AtEndpoint, AtUplink, Hook};
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::packet::{ParsedPacket, load};
use crate::rewrite::{self, Ends};
use crate::subprogram::{Stage, subprogram};

/// Offset of the destination port in the transport header, in bytes.
const DESTINATION_PORT_AT: u32 = 2;

/// What a packet answers.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(super) enum Answered {
    /// No packet to a service: it passes unchanged.
    Passed,
    /// A packet to a service. It has the service's source now, or only passes.
    Done,
    /// The same, but the client's own port must still be [restored](restore_port).
    ButPort,
    /// A packet of a flow whose `OUT` entry is missing.
    Lost,
    /// It is an ICMP error: see [`super::error`].
    Error,
}

// SAFETY: `repr(u32)`, five variants without fields.
unsafe impl Stage for Answered {}

/// What is left to do for an answer.
#[repr(C)]
#[derive(Default)]
pub(super) struct Rest {
    /// Offset of the transport header or the ICMP error.
    pub(super) content_at: u32,
    /// IP protocol of the transport header.
    protocol: u16,
    /// The client's own port, network byte order.
    own_be: u16,
}

/// Rewrites the source of a packet to an endpoint to the service's, if it answers a packet to the service.
#[subprogram(service4_answer, service6_answer)]
fn answer_inside<T: Version>(frame: &Frame, rest: &mut Rest) -> Result<Answered, Reason> {
    answer::<T, AtEndpoint>(frame, &mut Request::new(), rest)
}

/// Like [`answer_inside`], at an uplink. A packet that only passes is found but not changed.
#[subprogram(uplink4_answer, uplink6_answer)]
fn answer_outside<T: Version>(
    frame: &Frame,
    request: &mut Request<T>,
    rest: &mut Rest,
) -> Result<Answered, Reason> {
    answer::<T, AtUplink>(frame, request, rest)
}

#[inline(always)]
fn answer<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
    rest: &mut Rest,
) -> Result<Answered, Reason> {
    let (Some(ip_at), Some(config)) = (request.ip_at::<P>(), HEALTH_CONFIG.get(0)) else {
        return Ok(Answered::Passed);
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_IN)
    else {
        return Ok(Answered::Passed);
    };
    request.content_at = content_at;
    match Resolved::of(&mut packet) {
        Resolved::Flow => {}
        Resolved::Error => {
            rest.content_at = content_at;
            return Ok(Answered::Error);
        }
        Resolved::Other | Resolved::UnknownFragment => return Ok(Answered::Passed),
    }
    request.take_in(&packet);
    if request.opens() {
        return Ok(Answered::Passed);
    }
    // Keys must be on the stack.
    let key = request.tuple;
    let answered = match find_answered::<T, P>(&key, Some(config)) {
        Ok(answered) => answered,
        Err(Unanswered::Other) => return Ok(Answered::Passed),
        Err(Unanswered::Lost) => return Ok(Answered::Lost),
    };
    if P::IS_UPLINK {
        // At an endpoint's device, it was already stored.
        keep(&packet, &config.timeouts);
        request.flow_flags = answered.flags.into();
        if request.is_passing != 0 {
            return Ok(Answered::Done);
        }
    }
    let (content_at, protocol) = (request.content_at(), key.protocol());
    let service = Ends::<T> {
        end: End::Source,
        old: key.source(),
        new: answered.to,
    };
    let is_written = rewrite::packet(frame, ip_at as u32, content_at, protocol, &service).is_some();
    let seen_be = key.destination().1;
    let own_be = answered.port_beyond(seen_be);
    if !is_written {
        return Err(Reason::WriteFailed);
    }
    match content_at {
        Some(content_at) if own_be != seen_be => {
            (rest.content_at, rest.own_be) = (content_at, own_be);
            rest.protocol = protocol.into();
            Ok(Answered::ButPort)
        }
        _ => Ok(Answered::Done),
    }
}

/// Rewrites an answer to an endpoint, and recreates the flow's other entry if it was evicted.
#[inline(always)]
pub(super) fn answer_to_inside<T: Version>(
    frame: &Frame,
    rest: &mut Rest,
) -> Result<Answered, Reason> {
    match answer_inside::<T>(frame, rest)? {
        Answered::Lost if restore_inside::<T>(frame) => answer_inside::<T>(frame, rest),
        answered => Ok(answered),
    }
}

/// Like [`answer_to_inside`], at an uplink.
#[inline(always)]
pub(super) fn answer_to_outside<T: Version>(
    frame: &Frame,
    request: &mut Request<T>,
    rest: &mut Rest,
) -> Result<Answered, Reason> {
    match answer_outside(frame, request, rest)? {
        Answered::Lost if restore_outside(frame, request) => answer_outside(frame, request, rest),
        answered => Ok(answered),
    }
}

/// Restores the client's own port in an answer.
#[subprogram(service_restore_port)]
pub(super) fn restore_port(frame: &Frame, rest: &mut Rest) -> Result<(), Reason> {
    let (content_at, own_be) = (rest.content_at, rest.own_be);
    let protocol = if rest.protocol == IP_PROTOCOL_TCP.into() {
        IP_PROTOCOL_TCP
    } else {
        IP_PROTOCOL_UDP
    };
    let mut seen_be = 0_u16;
    load(frame, content_at + DESTINATION_PORT_AT, &mut seen_be, 2)
        .and_then(|()| {
            let ports = (seen_be, own_be);
            rewrite::port(frame, Some(content_at), protocol, End::Destination, ports)
        })
        .ok_or(Reason::WriteFailed)
}

/// The flow that a backend's packet to an outside client answers; the packet's tuple has direction in.
#[inline(always)]
pub(crate) fn answered_to_outside<T: Version>(
    key: &T,
    config: &DatapathConfig,
) -> Option<ServiceFlowParts<T::Address>> {
    answered::<T, AtUplink>(key, Some(config))
}

/// The flow that a backend's packet with this `IN` tuple answers, by the flow's `IN` entry. If the
/// settings are given, the packet extends its flow, as the client's packets do.
#[inline(always)]
pub(super) fn answered<T: Version, P: Hook>(
    key: &T,
    lasts: Option<&DatapathConfig>,
) -> Option<ServiceFlowParts<T::Address>> {
    find_answered::<T, P>(key, lasts).ok()
}

/// Why a packet answers no packet to a service.
enum Unanswered {
    /// Only the `OUT` entry of its flow is missing.
    Lost,
    /// Anything else.
    Other,
}

/// Like [`answered`], with the reason if there is none.
#[inline(always)]
fn find_answered<T: Version, P: Hook>(
    key: &T,
    lasts: Option<&DatapathConfig>,
) -> Result<ServiceFlowParts<T::Address>, Unanswered> {
    let Some(entry) = T::service_flows().get_ptr(key) else {
        return Err(Unanswered::Other);
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    if P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return Err(Unanswered::Other);
    }
    if key.protocol() == IP_PROTOCOL_TCP {
        return Ok(parts);
    }
    let flow = key.asked_by(&parts);
    let Some(out) = T::service_flows().get_ptr_mut(&flow) else {
        return Err(Unanswered::Lost);
    };
    // SAFETY: as above.
    let sent = T::service_flow_parts(unsafe { &*out });
    if coarse_now_secs() >= sent.expires {
        return Err(Unanswered::Other);
    }
    // Otherwise the client's packets go elsewhere by now.
    if let Some(config) = lasts
        && sent.to == key.source()
    {
        prolong::<T>(out, key, config);
    }
    Ok(parts)
}

#[subprogram(service4_restore, service6_restore)]
fn restore_inside<T: Version>(frame: &Frame) -> bool {
    restore::<T>(frame, IP_AT)
}

#[subprogram(uplink4_restore, uplink6_restore)]
fn restore_outside<T: Version>(frame: &Frame, request: &mut Request<T>) -> bool {
    match request.ip_at::<AtUplink>() {
        Some(ip_at) => restore::<T>(frame, ip_at),
        None => false,
    }
}

/// Recreates the evicted `OUT` entry of a packet's flow: otherwise the client's next packets would go to
/// another backend, or use another port. Returns whether the entry exists again.
#[inline(always)]
fn restore<T: Version>(frame: &Frame, ip_at: usize) -> bool {
    let Some(ParsedPacket { packet, .. }) = T::read(frame, ip_at, TUPLE_IN) else {
        return false;
    };
    // Keys must be on the stack.
    let key = packet.tuple;
    let Some(entry) = T::service_flows().get_ptr(&key) else {
        return false;
    };
    // SAFETY: a value of that map.
    let mut parts = T::service_flow_parts(unsafe { &*entry });
    if coarse_now_secs() >= parts.expires {
        return false;
    }
    let flow = key.asked_by(&parts);
    parts.to = key.source();
    if parts.flags & FLOW_MOVED != 0 {
        parts.client_port_be = key.destination().1;
    }
    let flags = u64::from(BPF_NOEXIST);
    T::service_flows()
        .insert(&flow, &T::service_flow(&parts), flags)
        .is_ok()
}
