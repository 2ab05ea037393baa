//! Packets from a backend to a client.

use aya_ebpf::bindings::{__sk_buff, BPF_NOEXIST};
use aya_ebpf::programs::TcContext;
use health_common::config::DatapathConfig;
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN};
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::packet::Kind;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MOVED};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use super::request::{opens, prolong};
use super::step::{Hook, Request, StepResult, UplinkSteps};
use crate::clock::coarse_now_secs;
use crate::fragment::{find, keep};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::packet::{ParsedPacket, load};
use crate::rewrite::{self, Ends};

/// Offset of the destination port in the transport header, bytes.
const DESTINATION_PORT_AT: u32 = 2;

/// Rewrites the source of a packet to a client to the service's, if it answers a packet to the service. A packet that
/// only passes at an uplink is found but not changed. ICMP errors are handled by [`super::error`].
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
        Kind::IcmpError => return StepResult::error_at(content_at),
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
    let answered = match find_answered::<T, P>(&key, Some(config)) {
        Ok(answered) => answered,
        Err(result) => return result,
    };
    if P::IS_UPLINK {
        // At an endpoint's device, it was already stored.
        keep(&packet, &config.timeouts);
        request.flow_flags = answered.flags.into();
        if request.is_passing != 0 {
            return StepResult::FOUND;
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
        return StepResult::dropped(Reason::WriteFailed);
    }
    match content_at {
        Some(content_at) if own_be != seen_be => {
            StepResult::with_port(content_at, protocol == IP_PROTOCOL_TCP, own_be)
        }
        _ => StepResult::FOUND,
    }
}

/// As [`answer`] at an uplink, but also recreates the flow's other entry if it was evicted.
#[inline(always)]
pub(super) fn answer_to_outside<T: UplinkSteps>(
    skb: *mut __sk_buff,
    request: &mut Request<T>,
) -> StepResult {
    let result = T::answer(skb, request);
    if result == StepResult::LOST && T::restore(skb, request) == StepResult::FOUND {
        return T::answer(skb, request);
    }
    result
}

/// Restores the client's own port in an answer, if the result of [`answer`] asks for it.
#[inline(always)]
pub(super) fn restore_port(skb: *mut __sk_buff, result: StepResult) -> StepResult {
    if result.has_port() {
        StepResult(service_restore_port(skb, result.0))
    } else {
        result
    }
}

/// A separate function in the kernel too, like the steps; it serves both IP versions.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn service_restore_port(skb: *mut __sk_buff, result: u32) -> u32 {
    let frame = &Frame::new(TcContext::new(skb));
    let (content_at, is_tcp, own_be) = StepResult(result).port();
    let protocol = if is_tcp {
        IP_PROTOCOL_TCP
    } else {
        IP_PROTOCOL_UDP
    };
    let mut seen_be = 0_u16;
    let is_done = load(frame, content_at + DESTINATION_PORT_AT, &mut seen_be, 2).is_some()
        && rewrite::port(
            frame,
            Some(content_at),
            protocol,
            End::Destination,
            (seen_be, own_be),
        )
        .is_some();
    if is_done {
        StepResult::FOUND.0
    } else {
        StepResult::dropped(Reason::WriteFailed).0
    }
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

/// As [`answered`]; on failure `LOST` if only the flow's other entry is missing, else `PASSED`.
#[inline(always)]
fn find_answered<T: Version, P: Hook>(
    key: &T,
    lasts: Option<&DatapathConfig>,
) -> Result<ServiceFlowParts<T::Address>, StepResult> {
    let Some(entry) = T::service_flows().get_ptr(key) else {
        return Err(StepResult::PASSED);
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    if P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return Err(StepResult::PASSED);
    }
    if key.protocol() == IP_PROTOCOL_TCP {
        return Ok(parts);
    }
    let flow = key.asked_by(&parts);
    let Some(out) = T::service_flows().get_ptr_mut(&flow) else {
        return Err(StepResult::LOST);
    };
    // SAFETY: as above.
    let sent = T::service_flow_parts(unsafe { &*out });
    if coarse_now_secs() >= sent.expires {
        return Err(StepResult::PASSED);
    }
    // Otherwise the client's packets go elsewhere by now.
    if let Some(config) = lasts
        && sent.to == key.source()
    {
        prolong::<T>(out, key, config);
    }
    Ok(parts)
}

/// Recreates the evicted `OUT` entry of a packet's flow: otherwise the client's next packets would go to
/// another backend, or use another port. `FOUND`: the entry exists again.
#[inline(always)]
pub(super) fn restore<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let packet = P::ip_at(request).and_then(|ip_at| T::read(frame, ip_at, TUPLE_IN));
    let Some(ParsedPacket { packet, .. }) = packet else {
        return StepResult::PASSED;
    };
    // Keys must be on the stack.
    let key = packet.tuple;
    let Some(entry) = T::service_flows().get_ptr(&key) else {
        return StepResult::PASSED;
    };
    // SAFETY: a value of that map.
    let mut parts = T::service_flow_parts(unsafe { &*entry });
    if coarse_now_secs() >= parts.expires {
        return StepResult::PASSED;
    }
    let flow = key.asked_by(&parts);
    parts.to = key.source();
    if parts.flags & FLOW_MOVED != 0 {
        parts.client_port_be = key.destination().1;
    }
    let flags = u64::from(BPF_NOEXIST);
    match T::service_flows().insert(&flow, &T::service_flow(&parts), flags) {
        Ok(()) => StepResult::FOUND,
        Err(_) => StepResult::PASSED,
    }
}
