//! Backend selection for a new flow.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{CtState, IP_PROTOCOL_UDP, TUPLE_IN, TUPLE_OUT, lifetime};
use health_common::masquerade::{Address, Masquerade};
use health_common::metrics::Reason;
use health_common::nat::{Ports, can_change_port};
use health_common::service::choice::{flow_hash, ports_and_protocol, scaled, weighted};
use health_common::service::outside::is_own;
use health_common::service::{
    ALGORITHM_LEAST_CONNECTION, ALGORITHM_MAGLEV, ALGORITHM_ROUND_ROBIN, Affinity, AffinityKey,
    Backend, FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, FLOW_MOVED, FLOW_PAST_STACK,
    FLOW_PLAIN, FLOW_SHARED, FRONTEND_DIRECT, FRONTEND_HOST_ONLY, FRONTEND_RESTRICTED,
    FRONTEND_WEIGHTED, Frontend, Pool, SourceRange,
};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use super::request::{answer_key, gateway, is_closed_by_client, is_open, is_tracked, opens};
use super::step::{Hook, Request, StepResult};
use crate::clock::{are_flows_held, coarse_now_secs};
use crate::delivery;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::ipcache::{TrieKey, identity_of};
use crate::maps::{
    HEALTH_AFFINITY, HEALTH_BACKENDS, HEALTH_CONFIG, HEALTH_ENDPOINTS, HEALTH_MAGLEV, HEALTH_SLOTS,
    HEALTH_SOURCE_RANGES,
};
use crate::nat::settings as masquerade;

/// Maximum number of ports tried for a flow, its own first, as long as the backend's answers to them belong to another
/// flow.
pub(super) const PORT_ATTEMPTS: u16 = 33;
/// Maximum number of backends selected for a flow whose port cannot change.
const BACKEND_ATTEMPTS: u16 = 5;
/// Ports for flows whose own port is taken, except for privileged ones: those get [`PRIVILEGED`]. The kernel's own
/// NAT has three ranges, 1-511, 600-1023 and 1024-65535, for ports below 512, below 1024 and others
/// (`net/netfilter/nf_nat_core.c`).
const UNPRIVILEGED: Ports = Ports {
    min: 1024,
    max: u16::MAX,
};
const PRIVILEGED: Ports = Ports {
    min: 512,
    max: 1023,
};
/// Spreads adjacent numbers: `GOLDEN_RATIO_32` of `include/linux/hash.h`.
const GOLDEN_RATIO: u32 = 0x61c8_8647;
/// Length of a key of `HEALTH_SOURCE_RANGES`, bits.
const SOURCE_BITS: u32 = 8 * size_of::<SourceRange>() as u32;

/// Selects a backend for a new flow.
#[inline(always)]
pub(super) fn choose<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> StepResult {
    // The flow keeps its backend, and gets another port.
    if request.moved_port_be != 0 || request.flow_flags as u16 & FLOW_PLAIN != 0 {
        return StepResult::CHOSEN;
    }
    let flow = request.tuple;
    let Some(frontend) = frontend_of_packets(&flow) else {
        return StepResult::PASSED;
    };
    if HEALTH_CONFIG.get(0).is_some_and(are_flows_held) {
        return StepResult::dropped(Reason::FlowsHeld);
    }
    let client = flow.source().0.to_addr();
    if P::IS_UPLINK && is_own(is_endpoint(client), || identity_of(flow.source().0)) {
        return StepResult::PASSED;
    }
    let client = Client {
        source: client,
        stays_as: client,
    };
    let (index, to) = match elect::<T, P>(&flow, &client, &frontend, request.attempt.into()) {
        Ok(chosen) => chosen,
        Err(refused) => return refused,
    };
    if to.1 != flow.destination().1 && !can_change_port(flow.protocol()) {
        return StepResult::dropped(Reason::ServiceNoBackend);
    }
    request.set_backend(to);
    if P::IS_UPLINK {
        let way = frontend.way(is_endpoint(to.0.to_addr()), || identity_of(to.0));
        let mut flags = FLOW_FROM_OUTSIDE | way;
        if frontend.flags & FRONTEND_DIRECT != 0 && way == FLOW_MASQUERADED {
            flags |= FLOW_DIRECT;
        }
        if way == 0 && request.is_untagged(frame) && delivery::is_on() {
            flags |= FLOW_PAST_STACK;
        }
        if flags & FLOW_MASQUERADED != 0 && !masquerade::<T>().is_some_and(Masquerade::is_on) {
            return StepResult::dropped(Reason::ServiceNoBackend);
        }
        request.flow_flags = flags.into();
    }
    (request.backend, request.service) = (index, frontend.service);
    request.has_affinity = u16::from(frontend.affinity_secs != 0);
    StepResult::CHOSEN
}

/// Takes the backend that was selected for a packet, unless its answers belong to another flow of the client between
/// the same ports: then another port is tried. If ports cannot change, another backend is selected; at the last
/// attempt, both flows share the answers.
#[inline(always)]
pub(super) fn take<T: Version, P: Hook>(_frame: &Frame, request: &mut Request<T>) -> StepResult {
    // Keys must be on the stack.
    let flow = request.tuple;
    if is_taken::<T, P>(request, &flow) {
        let is_tcp = flow.protocol() == IP_PROTOCOL_TCP;
        // No flow starts in the middle of a connection.
        if is_tcp && !opens(request) {
            return StepResult::dropped(Reason::ServiceNoBackend);
        }
        if can_move(flow.protocol()) {
            return move_on(request);
        }
        request.attempt += 1;
        if request.attempt < BACKEND_ATTEMPTS {
            return StepResult::TAKEN;
        }
        share::<T>(&flow, &answer_key::<T, P>(&flow, request.backend()));
        request.flow_flags |= u32::from(FLOW_SHARED);
    }
    if request.moved_port_be != 0 {
        request.flow_flags |= u32::from(FLOW_MOVED);
    }
    // A client that got a backend other than its own for one flow keeps its affinity.
    if request.has_affinity != 0 && (request.attempt == 0 || request.moved_port_be != 0) {
        stay(flow.source().0.to_addr(), request.service, request.backend);
    }
    StepResult::CHOSEN
}

/// Makes the caller try another port for a flow.
#[inline(always)]
pub(super) fn move_on<T: Version>(request: &mut Request<T>) -> StepResult {
    request.attempt += 1;
    if request.attempt >= PORT_ATTEMPTS {
        return StepResult::dropped(Reason::ServiceNoBackend);
    }
    request.moved_port_be = other_port(&request.tuple, request.attempt.into()).to_be();
    StepResult::TAKEN
}

/// Whether flows of a protocol may get another source port here.
#[inline(always)]
fn can_move(protocol: u8) -> bool {
    matches!(protocol, IP_PROTOCOL_TCP | IP_PROTOCOL_UDP)
}

/// A port to try for a flow, host byte order; `attempt`: how many were tried before. A flow that lost its entry tries
/// the same ports again, and so finds the one that its answers use.
#[inline(always)]
fn other_port<T: Version>(flow: &T, attempt: u32) -> u16 {
    let ports = if u16::from_be(flow.source().1) < UNPRIVILEGED.min {
        PRIVILEGED
    } else {
        UNPRIVILEGED
    };
    let spread = (hash(flow, false) ^ attempt).wrapping_mul(GOLDEN_RATIO);
    ports.min + scaled(spread, ports.count()) as u16
}

/// Gives a client affinity to a backend.
#[inline(always)]
pub(super) fn stay(client: Addr, service: u32, backend: u32) {
    let affinity = Affinity {
        backend,
        last_used: coarse_now_secs(),
    };
    // If there is no space, the next flow may go elsewhere.
    let _ = HEALTH_AFFINITY.insert(
        AffinityKey { client, service },
        affinity,
        u64::from(BPF_ANY),
    );
}

/// The frontend that a packet is for, if any. Loopback frontends serve only sockets (CVE-2020-8558).
#[inline(always)]
pub(super) fn frontend_of_packets<T: Version>(flow: &T) -> Option<Frontend> {
    // SAFETY: entries are replaced as a whole.
    let frontend = unsafe { T::frontends().get(flow.frontend_key()) }?;
    (frontend.flags & FRONTEND_HOST_ONLY == 0).then_some(*frontend)
}

/// The client that opens a flow.
pub(super) struct Client {
    /// The address that source ranges check.
    pub(super) source: Addr,
    /// The address that affinity uses.
    pub(super) stays_as: Addr,
}

/// A backend for a new flow, its index first; on failure, what to do with the flow. `attempt`: how many backends were
/// selected before and are taken.
#[inline(always)]
pub(super) fn elect<T: Version, P: Hook>(
    flow: &T,
    client: &Client,
    frontend: &Frontend,
    attempt: u32,
) -> Result<(u32, (T::Address, u16)), StepResult> {
    if frontend.flags & FRONTEND_RESTRICTED != 0 && !is_in_range(client.source, frontend.service) {
        return Err(StepResult::dropped(Reason::ServiceSourceRange));
    }
    let pool = frontend.pool(P::ORIGIN);
    if pool.len == 0 {
        return Err(if frontend.drops(P::ORIGIN) {
            StepResult::dropped(Reason::ServiceNoLocal)
        } else {
            StepResult::REJECTED
        });
    }
    let index = match attempt {
        0 => match lasting(client.stays_as, frontend) {
            // The client may have got a remote backend at another frontend of the service.
            Some(index) if !frontend.is_local(P::ORIGIN) || is_here::<T>(index) => Some(index),
            _ => by_algorithm(flow, frontend, pool),
        },
        // The backend that the client has affinity to is taken, and the port cannot change.
        1 if frontend.affinity_secs != 0 => by_algorithm(flow, frontend, pool),
        // In sequence, so that a small pool is tried completely.
        _ => (hash(flow, false) + attempt)
            .checked_rem(pool.len)
            .and_then(|place| at_place(frontend, pool, place)),
    };
    let chosen = index.and_then(|index| Some((index, address::<T>(index, frontend.service)?)));
    chosen.ok_or(StepResult::dropped(Reason::ServiceNoBackend))
}

/// Whether a backend's answers belong to another flow between the same ports as the backend sees them: one through
/// another frontend, one without a service, or one that the backend opened.
#[inline(always)]
fn is_taken<T: Version, P: Hook>(request: &Request<T>, flow: &T) -> bool {
    let to = request.backend();
    let sent = request.moved();
    let answer = T::service_flows().get_ptr(&answer_key::<T, P>(&sent, to));
    // SAFETY: a value of that map.
    let answer = answer.map(|entry| T::service_flow_parts(unsafe { &*entry }));
    if answer.is_some_and(|parts| is_of_flow(&parts, flow, &sent)) {
        return false;
    }
    let mut sent = sent.with_destination(to);
    if flow.protocol() != IP_PROTOCOL_TCP {
        return answer.is_some_and(|parts| coarse_now_secs() < parts.expires)
            || can_move(flow.protocol()) && is_tracked::<T, P>(&mut sent);
    }
    // In the middle of an endpoint's connection, the entries may have been evicted. From outside, anyone can send
    // such a segment in a client's name.
    let opens = opens(request);
    // Conntrack knows nothing of a connection of an endpoint that is its own backend.
    if !P::IS_UPLINK && to.0 == flow.source().0 {
        // So it does not know its end either: the last port tried is taken over from a connection that may be over.
        return answer.is_some() && opens && request.attempt + 1 < PORT_ATTEMPTS;
    }
    let is_evicted = answer.is_none() && !opens && !P::IS_UPLINK;
    if is_evicted || !is_open::<T, P>(sent) {
        return false;
    }
    // If a connection's backend answers the client directly, this node does not see its end. A client that has closed
    // its side and opens another connection between the same ports has finished with it; otherwise the backend's node
    // drops the SYN.
    !(P::IS_UPLINK && opens && is_closed_by_client(sent))
}

/// Whether an `IN` entry belongs to this flow, given the flow with the port that the backend sees.
#[inline(always)]
pub(super) fn is_of_flow<T: Version>(
    parts: &ServiceFlowParts<T::Address>,
    flow: &T,
    moved: &T,
) -> bool {
    parts.to == flow.destination() && parts.port_beyond(moved.source().1) == flow.source().1
}

/// Counts a flow that was sent to a backend.
#[inline(always)]
pub(super) fn count_flow(index: u32) {
    if let Some(backend) = HEALTH_BACKENDS.get_ptr_mut(index) {
        // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`.
        unsafe {
            atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(&raw mut (*backend).flows, 1)
        };
    }
}

/// Uncounts a flow, unless the index holds another service's backend by now.
#[inline(always)]
pub(super) fn discount_flow(index: u32, service: u32) {
    if let Some(backend) = HEALTH_BACKENDS.get_ptr_mut(index)
        // SAFETY: aligned words of a map value.
        && unsafe { (*backend).service == service && (*backend).flows > 0 }
    {
        // SAFETY: as above; adds -1.
        unsafe {
            atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(
                &raw mut (*backend).flows,
                u32::MAX,
            )
        };
    }
}

/// Whether a backend is on this node.
#[inline(always)]
fn is_here<T: Version>(index: u32) -> bool {
    HEALTH_BACKENDS.get(index).is_some_and(|backend| {
        let address = T::Address::of_addr(&backend.addr);
        is_own(is_endpoint(backend.addr), || identity_of(address))
    })
}

/// Whether an address belongs to an endpoint of this node.
#[inline(always)]
pub(super) fn is_endpoint(address: Addr) -> bool {
    HEALTH_ENDPOINTS.get_ptr(address).is_some()
}

/// Enters the new flow, in both directions.
#[inline(always)]
pub(super) fn enter<T: Version, P: Hook>(_frame: &Frame, request: &mut Request<T>) -> StepResult {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return StepResult::PASSED;
    };
    // Keys must be on the stack.
    let flow = request.tuple;
    let is_moved = request.moved_port_be != 0;
    let parts = ServiceFlowParts {
        to: flow.destination(),
        backend: request.backend,
        service: request.service,
        expires: first_expiry(flow.protocol(), config),
        flags: request.flow_flags as u16,
        client_port_be: if is_moved { flow.source().1 } else { 0 },
    };
    let answer = answer_key::<T, P>(&request.moved(), request.backend());
    if !enter_both(
        &flow,
        &answer,
        parts,
        request.backend(),
        request.moved_port_be,
    ) {
        return StepResult::HAS_NO_ROOM;
    }
    if parts.service != 0 {
        count_flow(parts.backend);
    }
    StepResult::FOUND
}

/// When a flow of a single packet expires.
#[inline(always)]
pub(super) fn first_expiry(protocol: u8, config: &DatapathConfig) -> u32 {
    coarse_now_secs() + lifetime(protocol, CtState::default(), &config.timeouts)
}

/// Enters a flow, given the keys of its packets and of their answers, which are on the stack, the parts of the
/// answers' entry, and the backend and client port of the packets' entry. Returns whether there was space.
#[inline(always)]
pub(super) fn enter_both<T: Version>(
    flow: &T,
    answer: &T,
    mut parts: ServiceFlowParts<T::Address>,
    backend: (T::Address, u16),
    moved_port_be: u16,
) -> bool {
    let flows = T::service_flows();
    let Ok(is_new) = flows.insert_unnoted(answer, &T::service_flow(&parts), u64::from(BPF_ANY))
    else {
        return false;
    };
    parts.to = backend;
    parts.client_port_be = moved_port_be;
    let is_entered = flows
        .insert(flow, &T::service_flow(&parts), u64::from(BPF_ANY))
        .is_ok();
    if is_new {
        if is_entered {
            flows.note(answer);
        } else {
            let _ = flows.remove(answer);
        }
    }
    is_entered
}

/// Makes the flow that owns a backend's answers share them with a new one.
#[inline(always)]
fn share<T: Version>(flow: &T, answer: &T) {
    let Some(entry) = T::service_flows().get_ptr(answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let to = T::service_flow_parts(unsafe { &*entry }).to;
    // The key must be on the stack.
    let other = flow.with_destination(to);
    if let Some(entry) = T::service_flows().get_ptr(&other) {
        // SAFETY: as above.
        let mut parts = T::service_flow_parts(unsafe { &*entry });
        parts.flags |= FLOW_SHARED;
        let _ = T::service_flows().insert(&other, &T::service_flow(&parts), u64::from(BPF_ANY));
    }
}

/// Removes both entries of a flow. `sent`: the tuple of its packets to the backend, direction out.
#[inline(always)]
pub(crate) fn forget<T: Version>(sent: T) {
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let back = T::service_flow_parts(unsafe { &*back });
    let flow = answer.asked_by(&back);
    if let Some(out) = T::service_flows().get_ptr(&flow)
        // SAFETY: as above.
        && is_sent_by(&flow, &sent, &T::service_flow_parts(unsafe { &*out }))
    {
        let _ = T::service_flows().remove(&flow);
    }
    if T::service_flows().remove(&answer).is_ok() {
        discount_flow(back.backend, back.service);
    }
}

/// Whether a flow's packets go to its backend with this tuple. The flow may have another backend or port by now.
#[inline(always)]
fn is_sent_by<T: Version>(flow: &T, sent: &T, parts: &ServiceFlowParts<T::Address>) -> bool {
    parts.to == sent.destination() && parts.port_beyond(flow.source().1) == sent.source().1
}

/// Whether an entry belongs to a flow of an endpoint that is its own backend: conntrack sees one side of it, between
/// the gateway and the endpoint.
#[inline(always)]
fn is_turned<T: Version>(key: &T, entry: &T::ServiceFlow) -> bool {
    let parts = T::service_flow_parts(entry);
    let is_gateway = gateway::<T>().is_some_and(|gateway| gateway == key.destination().0);
    parts.flags & (FLOW_FROM_OUTSIDE | FLOW_PLAIN) == 0
        && (is_gateway || parts.to.0 == key.source().0)
}

/// Whether conntrack tracks a flow with these flags in direction in: from outside, with the client visible to the
/// backend.
#[inline(always)]
fn comes_in(flags: u16) -> bool {
    flags & (FLOW_FROM_OUTSIDE | FLOW_MASQUERADED) == FLOW_FROM_OUTSIDE
}

/// The flow as conntrack knows it, given one of its entries; `None` if conntrack cannot tell.
#[inline(always)]
pub(crate) fn tracked_flow<T: Version>(key: &T, entry: &T::ServiceFlow) -> Option<T> {
    if is_turned(key, entry) {
        return None;
    }
    let flow = key.sent(entry);
    Some(if comes_in(T::service_flow_parts(entry).flags) {
        flow.with_direction(TUPLE_IN)
    } else {
        flow
    })
}

/// As [`forget`], for a flow from outside whose packets went to this node's backend with this tuple; not for others,
/// which the programs at the client's device remove.
#[inline(always)]
pub(crate) fn forget_from_outside<T: Version>(sent: T) {
    let sent = sent.with_direction(TUPLE_OUT);
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let back = T::service_flow_parts(unsafe { &*back });
    if back.flags & FLOW_FROM_OUTSIDE != 0 {
        forget(sent);
    }
}

/// As [`forget`], for the flow that conntrack knew by this key. By now, the entries may belong to another flow, which
/// goes the other way to the same backend.
#[inline(always)]
pub(crate) fn forget_untracked<T: Version>(key: T) {
    let sent = key.with_direction(TUPLE_OUT);
    let answer = sent.reply();
    let Some(back) = T::service_flows().get_ptr(&answer) else {
        return;
    };
    // SAFETY: a value of that map.
    let flags = T::service_flow_parts(unsafe { &*back }).flags;
    if comes_in(flags) == (key.direction() != TUPLE_OUT) {
        forget(sent);
    }
}

/// Whether a flow's backend still serves its service.
#[inline(always)]
pub(super) fn is_serving<T: Version>(parts: &ServiceFlowParts<T::Address>) -> bool {
    parts.flags & FLOW_PLAIN != 0
        || address::<T>(parts.backend, parts.service).is_some_and(|to| to == parts.to)
}

/// The address and port that a service's backend listens on.
#[inline(always)]
pub(super) fn address<T: Version>(index: u32, service: u32) -> Option<(T::Address, u16)> {
    let backend: &Backend = HEALTH_BACKENDS.get(index)?;
    let is_of_version = backend.addr.is_v4() == (T::IP_VERSION == 4);
    (backend.service == service && is_of_version)
        .then(|| (T::Address::of_addr(&backend.addr), backend.port_be))
}

/// Whether a client is within the source ranges of a service.
#[inline(always)]
fn is_in_range(client: Addr, service: u32) -> bool {
    let key = TrieKey {
        prefix_len: SOURCE_BITS,
        data: SourceRange {
            service_be: service.to_be(),
            addr: client,
        },
    };
    HEALTH_SOURCE_RANGES.get(key.as_key()).is_some()
}

/// The backend that a client has affinity to.
#[inline(always)]
fn lasting(client: Addr, frontend: &Frontend) -> Option<u32> {
    if frontend.affinity_secs == 0 {
        return None;
    }
    let key = AffinityKey {
        client,
        service: frontend.service,
    };
    // SAFETY: entries are replaced as a whole.
    let affinity = unsafe { HEALTH_AFFINITY.get(key) }?;
    let is_fresh = affinity.is_fresh(coarse_now_secs(), frontend.affinity_secs);
    let backend = HEALTH_BACKENDS.get(affinity.backend)?;
    (is_fresh && backend.gets_flows(frontend.service)).then_some(affinity.backend)
}

#[inline(always)]
fn by_algorithm<T: Version>(flow: &T, frontend: &Frontend, pool: Pool) -> Option<u32> {
    match frontend.algorithm {
        ALGORITHM_MAGLEV => {
            let place = hash(flow, frontend.affinity_secs != 0).checked_rem(pool.len)?;
            HEALTH_MAGLEV.get(pool.at + place).copied()
        }
        ALGORITHM_ROUND_ROBIN if frontend.flags & FRONTEND_WEIGHTED == 0 => {
            let turn = HEALTH_SLOTS.get_ptr_mut(pool.at)?;
            // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`; with relaxed ordering,
            // LLVM would emit an add that does not return the old value.
            let turn = unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::SeqCst }>(turn, 1) };
            slot(pool, turn.checked_rem(pool.len)?)
        }
        ALGORITHM_LEAST_CONNECTION => {
            let (one, other) = (by_chance(frontend, pool)?, by_chance(frontend, pool)?);
            // Two CPUs that uncount the last flow at once leave -1.
            let flows = |index| Some(HEALTH_BACKENDS.get(index)?.flows as i32);
            Some(if flows(one)? > flows(other)? {
                other
            } else {
                one
            })
        }
        _ => by_chance(frontend, pool),
    }
}

/// A random backend. For a Maglev table, the one in a random slot.
#[inline(always)]
fn by_chance(frontend: &Frontend, pool: Pool) -> Option<u32> {
    let first = scaled(random(), pool.len);
    if frontend.algorithm == ALGORITHM_MAGLEV || frontend.flags & FRONTEND_WEIGHTED == 0 {
        return at_place(frontend, pool, first);
    }
    let threshold = *HEALTH_SLOTS.get(pool.at + 1 + pool.len + first)?;
    let alias = *HEALTH_SLOTS.get(pool.at + 1 + 2 * pool.len + first)?;
    slot(pool, weighted(first, threshold, alias, random()))
}

/// The backend in a slot of a Maglev table or of the list.
#[inline(always)]
fn at_place(frontend: &Frontend, pool: Pool, place: u32) -> Option<u32> {
    if frontend.algorithm == ALGORITHM_MAGLEV {
        return HEALTH_MAGLEV.get(pool.at + place).copied();
    }
    slot(pool, place)
}

#[inline(always)]
fn slot(pool: Pool, place: u32) -> Option<u32> {
    HEALTH_SLOTS.get(pool.at + 1 + place).copied()
}

#[inline(always)]
fn hash<T: Version>(flow: &T, is_by_client: bool) -> u32 {
    let (source, destination) = (flow.source(), flow.destination());
    flow_hash(
        &source.0.to_addr().words_be,
        &destination.0.to_addr().words_be,
        ports_and_protocol(source.1, destination.1, flow.protocol(), is_by_client),
    )
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_get_prandom_u32() }
}
