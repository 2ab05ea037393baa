//! Packets that leave on an uplink.

use health_common::ct::TUPLE_OUT;
use health_common::identity;
use health_common::masquerade::{Address as _, Masquerade};
use health_common::metrics::Reason;
use health_common::nat::{End, NAT_NEEDS_CT};
use health_common::packet::Kind;
use health_common::tcp::{ACK, IP_PROTOCOL_TCP, SYN};

use super::entry::{released, translation, whole};
use super::port::has_socket;
use super::settings;
use super::step::{Passage, Sender, StepResult, Steps};
use crate::clock::are_flows_held;
use crate::conntrack::{Tracked, Traffic, enter, is_known};
use crate::fragment::resolve;
use crate::frame::{Frame, MARK_SERVED};
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_ENDPOINTS, HEALTH_PEERS};
use crate::packet::ParsedPacket;
use crate::rewrite::Ends;

#[inline(always)]
pub(super) fn leaving<T: Steps>(frame: &Frame, ip_at: usize) -> StepResult {
    let skb = frame.skb();
    let mut passage = Passage::<T>::at(ip_at);
    match T::read_leaving(skb, &mut passage) {
        StepResult::FOUND => {}
        StepResult::IS_ERROR => return T::leaving_error(skb, &mut passage),
        result => return result,
    }
    if passage.sender == Sender::NodeInside {
        match T::meet(skb, &mut passage) {
            StepResult::FOUND => {}
            result => return result,
        }
    }
    let found = match T::find(skb, &mut passage) {
        StepResult::IS_NEW => translate(frame, &mut passage),
        result => result,
    };
    match found {
        StepResult::FOUND if passage.is_host_local() => StepResult::PASSED,
        StepResult::FOUND => T::rewrite_source(skb, &mut passage),
        result => result,
    }
}

/// Translates a new flow.
#[inline(always)]
fn translate<T: Steps>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let protocol = passage.tuple.protocol();
    let skb = frame.skb();
    let result = T::translations().with_room(protocol, &StepResult::HAS_NO_ROOM, || {
        match T::translate(skb, passage) {
            StepResult::IS_TAKEN if T::take_back(skb, passage) == StepResult::FOUND => {
                T::take(skb, passage)
            }
            result => result,
        }
    });
    match result {
        StepResult::FOUND => T::mark(skb, passage),
        StepResult::IS_TAKEN => StepResult::dropped(Reason::NatNoMapping),
        StepResult::HAS_NO_ROOM if passage.sender.is_node() => StepResult::PASSED,
        StepResult::HAS_NO_ROOM => StepResult::dropped(Reason::NatNoMapping),
        result => result,
    }
}

/// Reads a packet that leaves.
#[inline(always)]
pub(super) fn read_leaving<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return StepResult::PASSED;
    };
    let Some((source, destination)) = T::addresses(frame, ip_at) else {
        return StepResult::PASSED;
    };
    let Some((mut sender, ifindex)) = sender::<T>(frame, &source, settings) else {
        return StepResult::PASSED;
    };
    if sender == Sender::Node && is_native::<T>(&destination, settings) {
        sender = Sender::NodeInside;
    }
    (passage.sender, passage.ifindex) = (sender, ifindex);
    let Some(ParsedPacket {
        mut packet,
        content_at,
    }) = T::read(frame, ip_at, TUPLE_OUT)
    else {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
    };
    passage.content_at = content_at;
    match packet.kind {
        Kind::Flow | Kind::Fragment(_) => {}
        Kind::IcmpError => return StepResult::IS_ERROR,
        Kind::NoFlow => {
            return unmasqueraded::<T>(sender, &destination, settings, Reason::NatUnsupported);
        }
    }
    if !resolve(&mut packet, &config.timeouts) {
        return unmasqueraded::<T>(sender, &destination, settings, Reason::FragmentUnknown);
    }
    passage.take_in(&packet);
    if sender.is_node() && !settings.is_shared(packet.tuple.protocol(), packet.tuple.source().1) {
        return StepResult::PASSED;
    }
    StepResult::FOUND
}

/// Finds the translation of a flow. If there is none, returns whether to create one.
#[inline(always)]
pub(super) fn find<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let (Some(ip_at), Some(config), Some(settings)) =
        (passage.ip_at(), HEALTH_CONFIG.get(0), settings::<T>())
    else {
        return StepResult::PASSED;
    };
    let traffic = Traffic {
        tx_bytes: frame.length() - ip_at as u32,
        source_identity: if passage.sender.is_node() {
            identity::HOST
        } else {
            identity::UNKNOWN
        },
        ifindex: passage.ifindex,
        ..Traffic::default()
    };
    let (flags, timeouts) = (passage.packet_flags(), &config.timeouts);
    let sender = passage.sender;
    // Linux 6.1 only accepts map keys on the stack.
    let mut flow = passage.tuple;
    if let Some(entry) = whole(&flow) {
        passage.entry = entry;
        if T::flags(&entry) & NAT_NEEDS_CT != 0 {
            // A segment that does not belong to its connection is translated anyway.
            let _ = enter(T::flows(), &mut flow, flags, traffic, timeouts);
            flow = flow.outbound();
        }
        passage.tuple = flow;
        return StepResult::FOUND;
    }
    if matches!(sender, Sender::Endpoint | Sender::Routed)
        && is_native::<T>(&flow.destination().0, settings)
    {
        return StepResult::PASSED;
    }
    let tracked = if sender == Sender::Endpoint && is_known(T::flows(), &mut flow) {
        Tracked::Known
    } else {
        enter(T::flows(), &mut flow, flags, traffic, timeouts)
    };
    let is_tracked = matches!(tracked, Tracked::Known | Tracked::New);
    passage.tuple = flow;
    // An answer to a peer that already knows its source keeps that source.
    if is_tracked && flow.direction() != TUPLE_OUT {
        return StepResult::PASSED;
    }
    // The identifier of an echo reply is the request's.
    let is_echo_reply = flow.protocol() == T::ICMP && flow.destination().1 != 0;
    if is_tracked && !is_echo_reply {
        return if are_flows_held(config) {
            StepResult::dropped(Reason::FlowsHeld)
        } else {
            StepResult::IS_NEW
        };
    }
    match tracked {
        _ if sender.is_node() => StepResult::PASSED,
        Tracked::Full => StepResult::dropped(Reason::NatNoMapping),
        _ => StepResult::dropped(Reason::NatUnsupported),
    }
}

/// Lets a flow of this host pass that is not masqueraded, unless it would receive another flow's answers: then it is
/// translated. If this host had the port before the other flow began, that flow did not get it: see
/// [`super::port::take`].
#[inline(always)]
pub(super) fn meet<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    // As in `find`.
    let flow = passage.tuple;
    if translation(&flow).is_some() {
        return StepResult::FOUND;
    }
    let may_begin =
        flow.protocol() != IP_PROTOCOL_TCP || passage.tcp_flags as u8 & (SYN | ACK) == SYN;
    // Without a socket, the packet was already translated, at a port of this bridge.
    if !may_begin || !has_socket(frame) {
        return StepResult::PASSED;
    }
    let key = flow.reply();
    match translation(&key) {
        Some(back) if T::translated(&back) != flow.source() && !released(&key, &back) => {
            StepResult::FOUND
        }
        _ => StepResult::PASSED,
    }
}

#[inline(always)]
pub(super) fn rewrite_source<T: Version>(frame: &Frame, passage: &mut Passage<T>) -> StepResult {
    let ends = Ends::<T> {
        end: End::Source,
        old: passage.tuple.source(),
        new: T::translated(&passage.entry),
    };
    passage.rewrite(frame, &ends)
}

/// The sender of a packet with this source, and the device whose programs enter its flow: for an endpoint its own
/// device, so that they recognise the entry as theirs. `None` for packets that are not masqueraded.
#[inline(always)]
fn sender<T: Version>(
    frame: &Frame,
    source: &T::Address,
    settings: &Masquerade<T::Address>,
) -> Option<(Sender, u32)> {
    if frame.was_marked(MARK_SERVED) {
        return Some((Sender::Served, frame.ifindex()));
    }
    if *source == settings.node_be {
        return Some((Sender::Node, frame.ifindex()));
    }
    if let Some(endpoint) = HEALTH_ENDPOINTS.get_ptr(source.to_addr()) {
        // SAFETY: a value of that map; a single word.
        return Some((Sender::Endpoint, unsafe { (*endpoint).ifindex }));
    }
    settings
        .is_behind(source)
        .then_some((Sender::Routed, frame.ifindex()))
}

/// Whether packets to this address keep their source.
#[inline(always)]
fn is_native<T: Version>(destination: &T::Address, settings: &Masquerade<T::Address>) -> bool {
    settings.is_native(destination) || HEALTH_PEERS.get_ptr(destination.to_addr()).is_some()
}

/// The result for a packet that cannot be masqueraded: it is dropped if it had to be.
#[inline(always)]
pub(super) fn unmasqueraded<T: Version>(
    sender: Sender,
    destination: &T::Address,
    settings: &Masquerade<T::Address>,
    reason: Reason,
) -> StepResult {
    if sender.is_node() || sender != Sender::Served && is_native::<T>(destination, settings) {
        StepResult::PASSED
    } else {
        StepResult::dropped(reason)
    }
}
