//! Packets from a backend to a client.

use health_common::ct::TUPLE_IN;
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::packet::Kind;
use health_common::tcp::IP_PROTOCOL_TCP;

use super::request::error;
use super::step::{Request, StepResult};
use crate::clock::coarse_now_secs;
use crate::fragment::find;
use crate::frame::{Frame, IP_AT};
use crate::ip_version::Version;
use crate::packet::ParsedPacket;
use crate::rewrite::{self, Ends};

/// Gives a packet to an endpoint the service's source if it answers one that went there.
#[inline(always)]
pub(super) fn answer<T: Version>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, IP_AT, TUPLE_IN)
    else {
        return StepResult::PASSED;
    };
    request.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return answer_error(frame, request),
        Kind::NoFlow => return StepResult::PASSED,
    }
    if !find(&mut packet) {
        return StepResult::PASSED;
    }
    request.is_later = packet.is_later().into();
    request.tuple = packet.tuple;
    // Keys must be on the stack.
    let key = request.tuple;
    let Some(frontend) = frontend(&key) else {
        return StepResult::PASSED;
    };
    let ends = Ends::<T> {
        end: End::Source,
        old: key.source(),
        new: frontend,
    };
    let content_at = request.content_at();
    match rewrite::packet(frame, IP_AT as u32, content_at, key.protocol(), &ends) {
        Some(()) => StepResult::PASSED,
        None => StepResult::dropped(Reason::WriteFailed),
    }
}

/// The service that a backend's packet with this tuple, of direction in, answers for.
#[inline(always)]
fn frontend<T: Version>(key: &T) -> Option<(T::Address, u16)> {
    let entry = T::service_flows().get_ptr(key)?;
    // SAFETY: a value of that map.
    let frontend = T::service_flow_parts(unsafe { &*entry }).to;
    if key.protocol() == IP_PROTOCOL_TCP {
        return Some(frontend);
    }
    // Only what the client sends makes a flow last.
    let flow = key.reply().with_destination(frontend);
    let out = T::service_flows().get_ptr(&flow)?;
    // SAFETY: as above.
    let expires = T::service_flow_parts(unsafe { &*out }).expires;
    (coarse_now_secs() < expires).then_some(frontend)
}

/// Turns an ICMP error about a packet that went to a backend into one about the packet that the client sent.
#[inline(always)]
fn answer_error<T: Version>(frame: &Frame, request: &Request<T>) -> StepResult {
    let error_at = request.content_at;
    let Some((source, _)) = T::addresses(frame, IP_AT) else {
        return StepResult::PASSED;
    };
    let Some(inner) = T::read_inner(frame, IP_AT, error_at, TUPLE_IN) else {
        return StepResult::PASSED;
    };
    // As above.
    let key = inner.reply;
    let Some(frontend) = frontend(&key) else {
        return StepResult::PASSED;
    };
    let inside = Ends::<T> {
        end: End::Destination,
        old: key.source(),
        new: frontend,
    };
    // What routers on the way send stays theirs.
    let sender = if source == key.source().0 {
        frontend.0
    } else {
        source
    };
    let around = Ends::<T> {
        end: End::Source,
        old: (source, 0),
        new: (sender, 0),
    };
    error(frame, error_at, &inner, &inside, &around)
}
