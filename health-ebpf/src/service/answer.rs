//! Packets from a backend to a client.

use health_common::config::DatapathConfig;
use health_common::ct::TUPLE_IN;
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::packet::Kind;
use health_common::service::FLOW_FROM_OUTSIDE;
use health_common::tcp::IP_PROTOCOL_TCP;

use super::request::{error, opens, prolong};
use super::step::{Hook, Request, StepResult};
use crate::clock::coarse_now_secs;
use crate::fragment::{find, keep};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::packet::ParsedPacket;
use crate::rewrite::{self, Ends};

/// Gives a packet to a client the service's source if it answers one that went there. One that only passes at an uplink is
/// found, and not changed.
#[inline(always)]
pub(super) fn answer<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let (Some(ip_at), Some(config)) = (P::ip_at(request), HEALTH_CONFIG.get(0)) else {
        return StepResult::PASSED;
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_IN)
    else {
        return StepResult::PASSED;
    };
    request.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return answer_error::<T, P>(frame, request, ip_at),
        Kind::NoFlow => return StepResult::PASSED,
    }
    if !find(&mut packet) {
        return StepResult::PASSED;
    }
    request.is_later = packet.is_later().into();
    request.tcp_flags = packet.tcp_flags.into();
    request.tuple = packet.tuple;
    if opens(request) {
        return StepResult::PASSED;
    }
    // Keys must be on the stack.
    let key = request.tuple;
    let Some((frontend, flags)) = frontend::<T, P>(&key, Some(config)) else {
        return StepResult::PASSED;
    };
    if P::IS_UPLINK {
        // At an endpoint's device it was kept before.
        keep(&packet, &config.timeouts);
        request.flow_flags = flags.into();
        if request.is_passing != 0 {
            return StepResult::FOUND;
        }
    }
    let ends = Ends::<T> {
        end: End::Source,
        old: key.source(),
        new: frontend,
    };
    let content_at = request.content_at();
    match rewrite::packet(frame, ip_at as u32, content_at, key.protocol(), &ends) {
        Some(()) => StepResult::FOUND,
        None => StepResult::dropped(Reason::WriteFailed),
    }
}

/// The service that a backend's packet with this tuple, of direction in, answers for, and the flags of the flow. With the
/// settings, the packet has its flow last, as what the client sends does.
#[inline(always)]
pub(super) fn frontend<T: Version, P: Hook>(
    key: &T,
    lasts: Option<&DatapathConfig>,
) -> Option<((T::Address, u16), u16)> {
    let entry = T::service_flows().get_ptr(key)?;
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    if P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return None;
    }
    let (frontend, flags) = (parts.to, parts.flags);
    if key.protocol() == IP_PROTOCOL_TCP {
        return Some((frontend, flags));
    }
    let flow = key.reply().with_destination(frontend);
    let out = T::service_flows().get_ptr_mut(&flow)?;
    // SAFETY: as above.
    let sent = T::service_flow_parts(unsafe { &*out });
    if coarse_now_secs() >= sent.expires {
        return None;
    }
    // Otherwise the client's packets go elsewhere by now.
    if let Some(config) = lasts
        && sent.to == key.source()
    {
        prolong::<T>(out, key, config);
    }
    Some((frontend, flags))
}

/// Turns an ICMP error about a packet that went to a backend into one about the packet that the client sent.
#[inline(always)]
fn answer_error<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
    ip_at: usize,
) -> StepResult {
    let error_at = request.content_at;
    let Some((source, _)) = T::addresses(frame, ip_at) else {
        return StepResult::PASSED;
    };
    let Some(inner) = T::read_inner(frame, ip_at, error_at, TUPLE_IN) else {
        return StepResult::PASSED;
    };
    // As above.
    let key = inner.reply;
    let Some((frontend, flags)) = frontend::<T, P>(&key, None) else {
        return StepResult::PASSED;
    };
    if P::IS_UPLINK {
        request.flow_flags = flags.into();
        if request.is_passing != 0 {
            return StepResult::FOUND;
        }
    }
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
    error(frame, (ip_at, error_at), &inner, &inside, &around)
}
