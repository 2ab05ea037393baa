//! Packets from a client to a service.

use aya_ebpf::bindings::BPF_ANY;
use health_common::config::{DatapathConfig, SERVICES_HANDOVER};
use health_common::ct::{CT_RX_CLOSING, CtState, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT, lifetime};
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::nat::End;
use health_common::packet::Kind;
use health_common::service::{
    FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_OF_HOST, FLOW_PLAIN, FLOW_RELAYED,
    KIND_CLUSTER_IP,
};
use health_common::tcp::{ACK, IP_PROTOCOL_TCP, SYN};
use health_common::tuple::ServiceFlowParts;

use super::backend::{forget, forget_from_outside, frontend_of_packets, is_endpoint, is_serving};
use super::direct;
use super::step::{Hook, Request, StepResult};
use crate::clock::{are_flows_held, coarse_now_secs};
use crate::conntrack::is_known;
use crate::fragment::{find as find_fragment, forget as forget_fragment, keep};
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::packet::ParsedPacket;
use crate::rewrite::{self, Ends};

/// Reads a packet that may be for a service, and finds its flow's backend.
#[inline(always)]
pub(super) fn find<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let (Some(ip_at), Some(config)) = (P::ip_at(request), HEALTH_CONFIG.get(0)) else {
        return StepResult::PASSED;
    };
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_OUT)
    else {
        return StepResult::PASSED;
    };
    request.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return StepResult::IS_ERROR,
        Kind::NoFlow => return StepResult::PASSED,
    }
    if !find_fragment(&mut packet) {
        return StepResult::PASSED;
    }
    request.tuple = packet.tuple;
    request.is_later = packet.is_later().into();
    request.tcp_flags = packet.tcp_flags.into();
    // On the stack, as keys must be, but only once: two stack frames share 512 bytes in Linux 6.1, each in units of
    // 32.
    let flow = &packet.tuple;
    if let Some(parts) = known::<T, P>(request, flow, config) {
        keep(&packet, &config.timeouts);
        request.take_in(&parts);
        return StepResult::FOUND;
    }
    if let Some(frontend) = frontend_of_packets(flow) {
        // The connection began earlier: IPVS continues it.
        if config.flags & SERVICES_HANDOVER != 0
            && flow.protocol() == IP_PROTOCOL_TCP
            && !opens(request)
        {
            return StepResult::PASSED;
        }
        keep(&packet, &config.timeouts);
        // A ClusterIP is not an address of the host.
        return if frontend.kind == KIND_CLUSTER_IP || opens(request) {
            StepResult::IS_NEW
        } else {
            StepResult::MAY_ANSWER
        };
    }
    if opens(request) || flow.protocol() == IP_PROTOCOL_UDP {
        StepResult::HAS_NO_SERVICE
    } else {
        StepResult::PASSED
    }
}

/// Lets a SYN or a datagram that is not for a service pass, unless its answers would be mistaken for those of a flow
/// through one: then it must get another port.
#[inline(always)]
pub(super) fn pass_by<T: Version, P: Hook>(_frame: &Frame, request: &mut Request<T>) -> StepResult {
    // Keys must be on the stack.
    let flow = request.tuple;
    let answer = flow.reply();
    if opens(request) && !is_open::<T, P>(flow) {
        // Its segments and answers belong to no other flow: remove what is left of one that is over.
        let _ = T::service_flows().remove(&flow);
        let _ = T::service_flows().remove(&answer);
        return StepResult::PASSED;
    }
    let (Some(entry), Some(config)) = (
        T::service_flows().get_ptr_mut(&answer),
        HEALTH_CONFIG.get(0),
    ) else {
        return StepResult::PASSED;
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    if parts.flags & FLOW_RELAYED != 0 {
        prolong_relayed::<T>(entry, &parts, &flow, config);
        return StepResult::PASSED;
    }
    let is_over = flow.protocol() != IP_PROTOCOL_TCP && coarse_now_secs() >= parts.expires;
    // A later fragment has no port to change, and belongs to the same flow as the first one.
    if request.is_later != 0 || is_over || P::IS_UPLINK != (parts.flags & FLOW_FROM_OUTSIDE != 0) {
        return StepResult::PASSED;
    }
    // A remote backend's answers to the client's own address need not come through this node.
    let is_answered_here =
        parts.flags & FLOW_OF_HOST != 0 || is_endpoint(flow.destination().0.to_addr());
    if P::IS_UPLINK && !is_answered_here {
        return StepResult::PASSED;
    }
    if are_flows_held(config) {
        return StepResult::dropped(Reason::FlowsHeld);
    }
    request.set_backend(flow.destination());
    request.flow_flags = (FLOW_PLAIN | parts.flags & (FLOW_FROM_OUTSIDE | FLOW_OF_HOST)).into();
    StepResult::IS_NEW
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

/// The destination of a known flow's packets; `None` if it must get another backend.
#[inline(always)]
pub(super) fn known<T: Version, P: Hook>(
    request: &Request<T>,
    flow: &T,
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
        if opens(request) && !may_reopen::<T, P>(flow, &parts) {
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
        || cannot_be_told(&parts)
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
fn cannot_be_told<A>(parts: &ServiceFlowParts<A>) -> bool {
    parts.flags & FLOW_DIRECT != 0 && !direct::is_on()
}

/// From now on, directs the answers of a flow that shares them to its own frontend.
#[inline(always)]
pub(super) fn take_answers<T: Version, P: Hook>(
    _frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    // Keys must be on the stack.
    let flow = request.tuple;
    let answer = answer_key::<T, P>(&flow, request.backend());
    let (Some(sent), Some(answered)) = (
        T::service_flows().get_ptr(&flow),
        T::service_flows().get_ptr(&answer),
    ) else {
        return StepResult::FOUND;
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
    StepResult::FOUND
}

/// Whether a SYN of a known flow goes to its backend: a retransmission, or before either side closed the connection.
#[inline(always)]
fn may_reopen<T: Version, P: Hook>(flow: &T, parts: &ServiceFlowParts<T::Address>) -> bool {
    if !is_serving::<T>(parts) || cannot_be_told(parts) {
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

/// Whether an open connection is known, whichever side opened it. From outside to an endpoint or this host, it has
/// direction in.
#[inline(always)]
pub(super) fn is_open<T: Version, P: Hook>(mut flow: T) -> bool {
    if goes_on(&flow) == Some(true) || goes_on(&flow.reply()) == Some(true) {
        return true;
    }
    if !P::IS_UPLINK {
        return false;
    }
    flow = flow.with_direction(TUPLE_IN);
    goes_on(&flow) == Some(true) || goes_on(&flow.reply()) == Some(true)
}

/// As [`is_open`], for protocols other than TCP.
#[inline(always)]
pub(super) fn is_tracked<T: Version, P: Hook>(flow: &mut T) -> bool {
    if is_known(T::flows(), flow) {
        return true;
    }
    if !P::IS_UPLINK {
        return false;
    }
    *flow = flow.with_direction(TUPLE_IN);
    is_known(T::flows(), flow)
}

/// Whether the client of a connection from outside, which its backend answers directly, has closed its side.
#[inline(always)]
pub(super) fn is_closed_by_client<T: Version>(mut flow: T) -> bool {
    if goes_on(&flow) == Some(true) {
        return false;
    }
    flow = flow.with_direction(TUPLE_IN);
    let Some(tracked) = T::flows().tcp.map.get_ptr(flow) else {
        return false;
    };
    // SAFETY: a value of that map.
    unsafe { (*tracked).state().has(CT_RX_CLOSING) && (*tracked).tx_packets == 0 }
}

/// Whether the connection under this key is still open; `None` if it is not known.
#[inline(always)]
fn goes_on<T: Version>(key: &T) -> Option<bool> {
    let tracked = T::flows().tcp.map.get_ptr(key)?;
    // SAFETY: a value of that map.
    Some(unsafe { !(*tracked).state().is_closed() && !(*tracked).has_expired(coarse_now_secs()) })
}

/// The key of the backend's answers.
#[inline(always)]
pub(super) fn answer_key<T: Version, P: Hook>(flow: &T, to: (T::Address, u16)) -> T {
    match gateway::<T>() {
        // An endpoint that is its own backend gets the packet from the gateway, and answers there.
        Some(gateway) if !P::IS_UPLINK && to.0 == flow.source().0 => flow
            .with_destination((gateway, flow.source().1))
            .reply()
            .with_destination(to)
            .reply(),
        _ => flow.with_destination(to).reply(),
    }
}

/// Extends a flow, given one of its entries and the key of the other. Not for TCP.
#[inline(always)]
pub(super) fn prolong<T: Version>(entry: *mut T::ServiceFlow, other: &T, config: &DatapathConfig) {
    let expires =
        coarse_now_secs() + lifetime(other.protocol(), CtState::default(), &config.timeouts);
    // SAFETY: a value of that map.
    if T::service_flow_parts(unsafe { &*entry }).expires == expires {
        return;
    }
    extend::<T>(entry, expires);
    if let Some(other) = T::service_flows().get_ptr_mut(other) {
        extend::<T>(other, expires);
    }
}

/// Extends an entry of a flow. Writes nothing else: the entry may belong to another flow by now.
#[inline(always)]
fn extend<T: Version>(entry: *mut T::ServiceFlow, expires: u32) {
    // SAFETY: a value of that map, valid memory for the program's run; an aligned word in it.
    unsafe {
        let word = entry.cast::<u8>().add(T::SERVICE_FLOW_EXPIRES_AT);
        word.cast::<u32>().write_volatile(expires);
    }
}

/// Whether a packet opens a connection.
#[inline(always)]
pub(super) fn opens<T: Version>(request: &Request<T>) -> bool {
    request.tcp_flags as u8 & (SYN | ACK) == SYN
}

/// Rewrites a packet whose backend was found.
///
/// An endpoint that is its own backend gets the packet from the gateway, so that it does not see itself as the
/// sender. Its answers to the gateway are found as a flow too, and go back the same way.
#[inline(always)]
pub(super) fn rewrite<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    let flow = request.tuple;
    let (source, destination) = (flow.source(), flow.destination());
    let backend = request.backend();
    let moved_port_be = request.moved().source().1;
    if !P::IS_UPLINK {
        let gateway = gateway::<T>();
        if gateway.is_some_and(|gateway| gateway == destination.0) {
            let client_port_be = match request.moved_port_be {
                0 => destination.1,
                own_port_be => own_port_be,
            };
            let client = (source.0, client_port_be);
            return both::<T, P>(frame, request, (source, backend), (destination, client));
        }
        if backend.0 == source.0 {
            let Some(gateway) = gateway else {
                return StepResult::dropped(Reason::ServiceNoBackend);
            };
            let client = (gateway, moved_port_be);
            return both::<T, P>(frame, request, (source, client), (destination, backend));
        }
    }
    let (content_at, protocol) = (request.content_at(), flow.protocol());
    let ports = (source.1, moved_port_be);
    let is_written = end::<T, P>(frame, request, End::Destination, destination, backend).is_some()
        && (ports.0 == ports.1
            || rewrite::port(frame, content_at, protocol, End::Source, ports).is_some());
    if is_written {
        StepResult::FOUND
    } else {
        StepResult::dropped(Reason::WriteFailed)
    }
}

/// An end before and after rewriting.
type Change<T> = (
    (<T as health_common::tuple::Tuple>::Address, u16),
    (<T as health_common::tuple::Tuple>::Address, u16),
);

#[inline(always)]
fn both<T: Version, P: Hook>(
    frame: &Frame,
    request: &Request<T>,
    source: Change<T>,
    destination: Change<T>,
) -> StepResult {
    let is_written = end::<T, P>(frame, request, End::Source, source.0, source.1).is_some()
        && end::<T, P>(
            frame,
            request,
            End::Destination,
            destination.0,
            destination.1,
        )
        .is_some();
    if is_written {
        StepResult::TURNED
    } else {
        StepResult::dropped(Reason::WriteFailed)
    }
}

#[inline(always)]
fn end<T: Version, P: Hook>(
    frame: &Frame,
    request: &Request<T>,
    end: End,
    old: (T::Address, u16),
    new: (T::Address, u16),
) -> Option<()> {
    let ends = Ends::<T> { end, old, new };
    let protocol = request.tuple.protocol();
    let ip_at = P::ip_at(request)? as u32;
    rewrite::packet(frame, ip_at, request.content_at(), protocol, &ends)
}

/// The gateway of this node's endpoints.
#[inline(always)]
pub(super) fn gateway<T: Version>() -> Option<T::Address> {
    let config = HEALTH_CONFIG.get(0)?;
    let gateway = if T::IP_VERSION == 4 {
        &config.gateway4
    } else {
        &config.gateway6
    };
    (!gateway.is_unset()).then(|| T::Address::of_addr(gateway))
}

/// Removes the flow of a packet that was rewritten.
#[inline(always)]
pub(super) fn withdraw<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    if let Some(sent) = rewritten::<T, P>(frame, request) {
        forget(sent);
    }
    StepResult::PASSED
}

/// As [`withdraw`], if the flow is from outside.
#[inline(always)]
pub(super) fn withdraw_from_outside<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    if let Some(sent) = rewritten::<T, P>(frame, request) {
        forget_from_outside(sent);
    }
    StepResult::PASSED
}

/// Removes the stored ports of a first fragment that was rewritten.
#[inline(always)]
pub(super) fn forget_ports<T: Version, P: Hook>(
    frame: &Frame,
    request: &mut Request<T>,
) -> StepResult {
    let packet = P::ip_at(request).and_then(|ip_at| T::read(frame, ip_at, TUPLE_OUT));
    if let Some(ParsedPacket { packet, .. }) = packet {
        // The key must be on the stack.
        let answer = packet.tuple.reply();
        if let Some(back) = T::service_flows().get_ptr(&answer) {
            // SAFETY: a value of that map.
            let back = T::service_flow_parts(unsafe { &*back });
            forget_fragment(&packet, back.to);
        }
    }
    StepResult::PASSED
}

/// The tuple of a packet that was sent to a backend.
#[inline(always)]
fn rewritten<T: Version, P: Hook>(frame: &Frame, request: &Request<T>) -> Option<T> {
    let ParsedPacket { packet, .. } = T::read(frame, P::ip_at(request)?, TUPLE_OUT)?;
    (!packet.is_later()).then_some(packet.tuple)
}
