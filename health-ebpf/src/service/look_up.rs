//! Packets from a client to a service: the look-up of their flow.

use aya_ebpf::bindings::BPF_ANY;
use health_common::config::{DatapathConfig, SERVICES_HANDOVER};
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::packet::Packet;
use health_common::service::{
    FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_OF_HOST, FLOW_PLAIN, FLOW_RELAYED,
    KIND_CLUSTER_IP,
};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use super::backend::is_serving;
use super::choice::frontend_of_packets;
use super::direct;
use super::flow::{answer_key, gateway, prolong};
use super::request::{Request, opens};
use super::tracked::{goes_on, is_open};
use crate::clock::{are_flows_held, coarse_now_secs};
use crate::fragment::{Resolved, keep};
use crate::frame::Frame;
use crate::hook::{AtUplink, Hook};
use crate::ip_version::Version;
use crate::ipcache::is_endpoint;
use crate::maps::HEALTH_CONFIG;
use crate::packet::ParsedPacket;
use crate::subprogram::{Stage, subprogram};

/// What is known about a packet's destination.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(super) enum Found {
    /// The packet passes unchanged.
    Passed,
    /// The request contains the backend of its flow.
    Backend,
    /// It is for a service, and its flow has no backend yet.
    New,
    /// Like [`Self::New`], unless the packet answers a process of the host that uses the service's port too.
    NewUnlessAnswer,
    /// It is not for a service, but may open a connection without one, or belong to a flow that another node forwarded
    /// here.
    NoService,
    /// It is an ICMP error.
    Error,
}

// SAFETY: `repr(u32)`, six variants without fields.
unsafe impl Stage for Found {}

/// Reads a packet that may be for a service, and finds its flow's backend.
#[subprogram(service4_find, service6_find, uplink4_find, uplink6_find)]
pub(super) fn find<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> Found {
    let (Some(ip_at), Some(config)) = (request.ip_at::<P>(), HEALTH_CONFIG.get(0)) else {
        return Found::Passed;
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_OUT)
    else {
        return Found::Passed;
    };
    request.content_at = content_at;
    match Resolved::of(&mut packet) {
        Resolved::Flow => {}
        Resolved::Error => return Found::Error,
        Resolved::Other | Resolved::UnknownFragment => return Found::Passed,
    }
    request.take_in(&packet);
    // On the stack, as keys must be, but only once: two stack frames share 512 bytes in Linux 6.1, each in units of
    // 32.
    let flow = &packet.tuple;
    if let Some(parts) = known::<T, P>(flow, request.opens(), config) {
        keep(&packet, &config.timeouts);
        request.follow(&parts);
        return Found::Backend;
    }
    if let Some(frontend) = frontend_of_packets(flow) {
        // The connection began earlier: IPVS continues it.
        if config.flags & SERVICES_HANDOVER != 0
            && flow.protocol() == IP_PROTOCOL_TCP
            && !request.opens()
        {
            return Found::Passed;
        }
        keep(&packet, &config.timeouts);
        // A ClusterIP is not an address of the host.
        return if frontend.kind == KIND_CLUSTER_IP || request.opens() {
            Found::New
        } else {
            Found::NewUnlessAnswer
        };
    }
    if request.opens() || flow.protocol() == IP_PROTOCOL_UDP {
        Found::NoService
    } else {
        Found::Passed
    }
}

/// Whether a SYN or a datagram that is not for a service must get another port, since its answers would be mistaken
/// for those of a flow through one. Otherwise it passes.
#[subprogram(
    service4_must_move,
    service6_must_move,
    uplink4_must_move,
    uplink6_must_move
)]
pub(super) fn must_move<T: Version, P: Hook>(
    _frame: &Frame,
    request: &mut Request<T>,
) -> Result<bool, Reason> {
    // Keys must be on the stack.
    let flow = request.tuple;
    let answer = flow.reply();
    if request.opens() && !is_open::<T, P>(flow) {
        // Its segments and answers belong to no other flow: remove what is left of one that is over.
        let _ = T::service_flows().remove(&flow);
        let _ = T::service_flows().remove(&answer);
        return Ok(false);
    }
    let (Some(entry), Some(config)) = (
        T::service_flows().get_ptr_mut(&answer),
        HEALTH_CONFIG.get(0),
    ) else {
        return Ok(false);
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    if parts.flags & FLOW_RELAYED != 0 {
        prolong_relayed::<T>(entry, &parts, &flow, config);
        return Ok(false);
    }
    let is_over = flow.protocol() != IP_PROTOCOL_TCP && coarse_now_secs() >= parts.expires;
    // A later fragment has no port to change, and belongs to the same flow as the first one.
    if request.is_later != 0 || is_over || P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return Ok(false);
    }
    // A remote backend's answers to the client's own address need not come through this node.
    let is_answered_here =
        parts.flags & FLOW_OF_HOST != 0 || is_endpoint(flow.destination().0.to_addr());
    if P::IS_UPLINK && !is_answered_here {
        return Ok(false);
    }
    if are_flows_held(config) {
        return Err(Reason::FlowsHeld);
    }
    request.set_backend(flow.destination());
    request.flow_flags = (FLOW_PLAIN | parts.flags & (FLOW_FROM_OUTSIDE | FLOW_OF_HOST)).into();
    Ok(true)
}

/// Extends a flow that [another node](super::direct::accept) forwards to a backend here: not every datagram has space
/// for the option.
#[inline(always)]
fn prolong_relayed<T: Version>(
    entry: *mut T::ServiceFlow,
    parts: &ServiceFlowParts<T::Address>,
    sent: &T,
    config: &DatapathConfig,
) {
    if sent.protocol() != IP_PROTOCOL_TCP && coarse_now_secs() < parts.expires {
        prolong::<T>(entry, &sent.with_destination(parts.to), config);
    }
}

/// From now on, directs the answers of a flow that shares them to its own frontend.
#[subprogram(
    service4_take_answers,
    service6_take_answers,
    uplink4_take_answers,
    uplink6_take_answers
)]
pub(super) fn take_answers<T: Version, P: Hook>(_frame: &Frame, request: &mut Request<T>) {
    // Keys must be on the stack.
    let flow = request.tuple;
    let answer = answer_key::<T, P>(&flow, request.backend());
    let (Some(sent), Some(answered)) = (
        T::service_flows().get_ptr(&flow),
        T::service_flows().get_ptr(&answer),
    ) else {
        return;
    };
    // SAFETY: values of that map.
    let (mut parts, answered) = unsafe {
        (
            T::service_flow_parts(&*sent),
            T::service_flow_parts(&*answered),
        )
    };
    parts.to = flow.destination();
    if answered.to != parts.to {
        let answers = T::service_flow(&parts);
        let _ = T::service_flows().insert(&answer, &answers, u64::from(BPF_ANY));
    }
}

/// The destination of packets of a known flow from outside, with the other parts of its entry.
#[inline(always)]
pub(crate) fn known_from_outside<T: Version>(
    packet: &Packet<T>,
    flow: &T,
    config: &DatapathConfig,
) -> Option<ServiceFlowParts<T::Address>> {
    known::<T, AtUplink>(flow, opens(packet.tcp_flags), config)
}

/// The destination of a known flow's packets; `None` if it must get another backend. `opens`: the packet opens a
/// connection.
#[inline(always)]
fn known<T: Version, P: Hook>(
    flow: &T,
    opens: bool,
    config: &DatapathConfig,
) -> Option<ServiceFlowParts<T::Address>> {
    let entry = T::service_flows().get_ptr_mut(flow)?;
    // SAFETY: a value of that map, valid memory for the program's run. Another CPU may replace it meanwhile, but only
    // for a packet of the same client between the same ports: a mix of both affects no one else.
    let parts = T::service_flow_parts(unsafe { &*entry });
    // No outside host sends in the name of an endpoint of this node.
    if P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return None;
    }
    let protocol = flow.protocol();
    if protocol == IP_PROTOCOL_TCP {
        if opens && !may_reopen::<T, P>(flow, &parts) {
            return None;
        }
        return Some(parts);
    }
    // The answers of an endpoint that is its own backend go to the client, whatever serves now.
    let is_answer =
        !P::IS_UPLINK && gateway::<T>().is_some_and(|gateway| gateway == flow.destination().0);
    let must_serve = protocol == IP_PROTOCOL_UDP && !is_answer;
    if coarse_now_secs() >= parts.expires
        || must_serve && !is_serving::<T>(&parts)
        || cannot_be_notified(&parts)
    {
        return None;
    }
    let other = if is_answer {
        let client = (flow.source().0, parts.port_beyond(flow.destination().1));
        let asked = flow.with_destination(client).reply();
        asked.with_destination(parts.to).with_direction(TUPLE_OUT)
    } else {
        answer_key::<T, P>(&moved(flow, &parts), parts.to)
    };
    prolong::<T>(entry, &other, config);
    Some(parts)
}

/// A flow with the source port that its backend sees, given the parts of its `OUT` entry.
#[inline(always)]
fn moved<T: Version>(flow: &T, parts: &ServiceFlowParts<T::Address>) -> T {
    flow.with_source_port(parts.port_beyond(flow.source().1))
}

/// Whether the backend's node must be notified of a flow, but this node no longer has a key for that.
#[inline(always)]
fn cannot_be_notified<A>(parts: &ServiceFlowParts<A>) -> bool {
    parts.flags & FLOW_DIRECT != 0 && !direct::is_on()
}

/// Whether a SYN of a known flow goes to its backend: a retransmission, or before either side closed the connection.
#[inline(always)]
fn may_reopen<T: Version, P: Hook>(flow: &T, parts: &ServiceFlowParts<T::Address>) -> bool {
    if !is_serving::<T>(parts) || cannot_be_notified(parts) {
        return false;
    }
    // Evicted, or taken over by a connection of the client without a service or through another frontend.
    let sent = moved(flow, parts);
    let Some(answer) = T::service_flows().get_ptr(&answer_key::<T, P>(&sent, parts.to)) else {
        return false;
    };
    // SAFETY: a value of that map.
    let answer = T::service_flow_parts(unsafe { &*answer });
    if answer.to != flow.destination() || answer.port_beyond(sent.source().1) != flow.source().1 {
        return false;
    }
    let mut translated = sent.with_destination(parts.to);
    if P::IS_UPLINK && parts.flags & FLOW_MASQUERADED == 0 {
        translated = translated.with_direction(TUPLE_IN);
    }
    goes_on(&translated).unwrap_or(true)
}
