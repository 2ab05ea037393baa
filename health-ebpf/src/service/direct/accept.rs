//! Direct server return, on the backend's node: another node names the frontend of a packet to an endpoint here.

use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_BLACKHOLE, BPF_FIB_LKUP_RET_PROHIBIT};
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::packet::Kind;
use health_common::service::direct::{DirectConfig, DirectOption};
use health_common::service::outside::is_own;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_RELAYED};
use health_common::tcp::{ACK, IP_PROTOCOL_TCP, SYN};
use health_common::tuple::ServiceFlowParts;

use super::{Direct, covered, direct_tag, resize};
use crate::clock::are_flows_held;
use crate::conntrack::is_answered;
use crate::fib::FibLookup;
use crate::frame::Frame;
use crate::hook::AtUplink;
use crate::ipcache::{identity_of, is_endpoint};
use crate::maps::{HEALTH_CONFIG, HEALTH_DIRECT};
use crate::packet::{ParsedPacket, load};
use crate::rewrite::store_recomputed;
use crate::service::flow::{enter_both, first_expiry, forget, prolong};
use crate::service::new_flow::Entered;
use crate::service::request::Request;
use crate::service::tracked::is_open;
use crate::subprogram::subprogram;

/// Whether a packet's header may be followed by the option.
#[inline(always)]
pub(in crate::service) fn may_have_option<T: Direct>(frame: &Frame, ip_at: usize) -> bool {
    ip_at == frame.link_header_len()
        && frame
            .at::<T::Header>(ip_at)
            .is_some_and(|ip| T::Option::may_follow(ip))
}

/// Reads another node's option in a packet to an endpoint here. `true`: the request has the packet's tuple, with the
/// frontend in place of a backend. `false`: it is not such a packet.
#[subprogram(uplink4_accept, uplink6_accept)]
pub(in crate::service) fn accept<T: Direct>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<bool, Reason> {
    let Some(direct) = HEALTH_DIRECT.get(0) else {
        return Ok(false);
    };
    let Some((source, destination)) = T::addresses(frame, frame.link_header_len()) else {
        return Ok(false);
    };
    if direct.count == 0 {
        return Ok(false);
    }
    let Some((frontend, tag)) = option::<T>(frame).and_then(|option| option.read()) else {
        return Ok(false);
    };
    if !is_endpoint(destination.to_addr()) {
        // An error about it would reveal to the client the tag, and an address that it did not send to.
        return if leads_nowhere::<T>(frame, source, destination) {
            Err(Reason::ServiceNoBackend)
        } else {
            Ok(false)
        };
    }
    if is_own(is_endpoint(source.to_addr()), || identity_of(source)) {
        return Err(Reason::DirectInvalid);
    }
    request.set_backend(frontend);
    if is_genuine(frame, request, tag, direct) {
        Ok(true)
    } else {
        Err(Reason::DirectInvalid)
    }
}

/// The bytes where the option would be.
#[inline(always)]
fn option<T: Direct>(frame: &Frame) -> Option<T::Option> {
    let mut option = T::Option::default();
    let at = (frame.link_header_len() + T::HEADER_LEN) as u32;
    load(frame, at, &mut option, T::OPTION_LEN)?;
    Some(option)
}

/// Whether a node of the mesh created the tag of a packet, which must open a connection or be a datagram. If so, the
/// request has its tuple.
#[inline(always)]
fn is_genuine<T: Direct>(
    frame: &Frame,
    request: &mut Request<T>,
    tag: u64,
    direct: &DirectConfig,
) -> bool {
    let ip_at = frame.link_header_len();
    let Some(ParsedPacket { packet, content_at }) = T::read(frame, ip_at, TUPLE_OUT) else {
        return false;
    };
    let protocol = packet.tuple.protocol();
    let is_first = match protocol {
        IP_PROTOCOL_TCP => packet.tcp_flags & (SYN | ACK) == SYN,
        IP_PROTOCOL_UDP => true,
        _ => false,
    };
    let is_whole = matches!(packet.kind, Kind::Flow)
        && content_at == (ip_at + T::HEADER_LEN) as u32 + T::OPTION_LEN;
    if !is_first || !is_whole {
        return false;
    }
    (request.tuple, request.tcp_flags) = (packet.tuple, packet.tcp_flags.into());
    let backend = request.tuple.destination();
    let asked = request.tuple.with_destination(request.backend());
    let Some(covered) = covered(frame, &asked, backend, content_at) else {
        return false;
    };
    tag == direct_tag(&raw const covered, 0)
        || direct.count > 1 && tag == direct_tag(&raw const covered, 1)
}

/// Whether the host would answer that the destination is unreachable.
#[inline(always)]
fn leads_nowhere<T: Direct>(frame: &Frame, source: T::Address, destination: T::Address) -> bool {
    const BLACK_HOLE: i64 = BPF_FIB_LKUP_RET_BLACKHOLE as i64;
    const PROHIBITED: i64 = BPF_FIB_LKUP_RET_PROHIBIT as i64;
    let mut route = FibLookup::of::<T>(frame.ifindex(), source, destination);
    // SAFETY: a valid context.
    let found = unsafe { route.ask(frame.skb().cast()) };
    // These two and the code between them: unreachable.
    (BLACK_HOLE..=PROHIBITED).contains(&found)
}

/// Enters the flow of such a packet in both directions, as if this node had selected the backend.
#[subprogram(uplink4_relay, uplink6_relay)]
pub(in crate::service) fn relay<T: Direct>(
    _frame: &Frame,
    request: &mut Request<T>,
) -> Result<Entered, Reason> {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return Ok(Entered::Passed);
    };
    request.flow_flags = (FLOW_FROM_OUTSIDE | FLOW_RELAYED).into();
    let (sent, frontend) = (request.tuple, request.backend());
    let is_tcp = sent.protocol() == IP_PROTOCOL_TCP;
    // Keys must be on the stack.
    let answer = sent.reply();
    let flow = sent.with_destination(frontend);
    let opened = answer.with_direction(TUPLE_OUT);
    let known = T::service_flows().get_ptr_mut(&answer);
    // SAFETY: a value of that map.
    let known = known.map(|entry| (entry, T::service_flow_parts(unsafe { &*entry })));
    match known {
        Some((entry, parts)) if parts.to == frontend => {
            if !is_tcp {
                prolong::<T>(entry, &flow, config);
            }
            if T::service_flows().get_ptr(&flow).is_some() {
                return Ok(Entered::Done);
            }
        }
        // Both flows' answers would look the same.
        _ if is_tcp && is_open::<T, AtUplink>(sent) => {
            return Err(Reason::ServiceNoBackend);
        }
        // The backend's packets belong to a flow that it opened itself.
        _ if is_answered(T::flows(), &opened) => {
            return Err(Reason::ServiceNoBackend);
        }
        Some(_) => forget(sent),
        None => {}
    }
    if are_flows_held(config) {
        return Err(Reason::FlowsHeld);
    }
    if !is_tcp {
        // An entry from a datagram that was sent after its flow had expired: the next one belongs to that flow, which
        // the client opened.
        let _ = T::flows().remove(&opened);
    }
    // Later segments would follow a flow of the client directly to the backend, which was given another port.
    if is_tcp && let Some(other) = T::service_flows().get_ptr(&sent) {
        // SAFETY: a value of that map.
        let parts = T::service_flow_parts(unsafe { &*other });
        if is_open::<T, AtUplink>(sent.sent_by(&parts)) {
            return Err(Reason::ServiceNoBackend);
        }
        let _ = T::service_flows().remove(&sent);
    }
    let parts = ServiceFlowParts {
        to: frontend,
        backend: 0,
        service: 0,
        expires: first_expiry(sent.protocol(), config),
        flags: FLOW_FROM_OUTSIDE | FLOW_RELAYED,
        client_port_be: 0,
    };
    let is_entered = enter_both(&flow, &answer, parts, sent.destination(), 0);
    Ok(if is_entered {
        Entered::Done
    } else {
        Entered::NoRoom
    })
}

/// Restores a packet as the client sent it, except for the destination.
#[subprogram(uplink4_take_off, uplink6_take_off)]
pub(in crate::service) fn take_off<T: Direct>(frame: &Frame) -> Result<(), Reason> {
    without_option::<T>(frame).ok_or(Reason::WriteFailed)
}

#[inline(always)]
fn without_option<T: Direct>(frame: &Frame) -> Option<()> {
    let option = option::<T>(frame)?;
    let ip_at = frame.link_header_len();
    let ip = option.take_off(frame.at::<T::Header>(ip_at)?)?;
    resize(frame, -(T::OPTION_LEN as i32))?;
    store_recomputed(frame, ip_at as u32, &ip)
}
