//! The flow of a packet: from an outside client through this node to a backend on another, and the backend's answers.

use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::ct::TUPLE_OUT;
use health_common::masquerade::Address as _;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::packet::Packet;
use health_common::service::{FLOW_MASQUERADED, FLOW_MOVED, FLOW_SHARED};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::ServiceFlowParts;

use crate::ip_version::Version;
use crate::maps::HEALTH_PEERS;
use crate::nat::{settings, translation, whole};
use crate::service::{answered_to_outside, known_from_outside};

/// A packet's way through this node.
pub(super) struct Passage<T: Version> {
    /// The packet's tuple as known to conntrack, in the packet's direction: between client and backend.
    pub(super) flow: T,
    /// The packet's new source address and port, network byte order.
    pub(super) source: (T::Address, u16),
    /// The packet's new destination address and port.
    pub(super) destination: (T::Address, u16),
}

/// A packet from a client to a service.
#[inline(always)]
pub(super) fn requested<T: Version>(
    packet: &Packet<T>,
    config: &DatapathConfig,
) -> Option<Passage<T>> {
    // Keys must be on the stack.
    let sent = packet.tuple.with_direction(TUPLE_OUT);
    let parts = known_from_outside(packet, &sent, config)?;
    if !is_followed(parts.flags) || is_timed(config, &sent, parts.to.0) {
        return None;
    }
    let flow = sent.with_destination(parts.to);
    let out = whole(&flow).filter(is_of_nobody_here::<T>)?;
    Some(Passage {
        flow,
        source: T::translated(&out),
        destination: parts.to,
    })
}

/// A backend's answer to this node's address.
#[inline(always)]
pub(super) fn answered<T: Version>(
    packet: &Packet<T>,
    config: &DatapathConfig,
) -> Option<Passage<T>> {
    let settings = settings::<T>()?;
    // As above.
    let key = packet.tuple;
    let (node, port_be) = key.destination();
    if node != settings.node_be || !settings.is_shared(key.protocol(), port_be) {
        return None;
    }
    let back = translation(&key).filter(is_of_nobody_here::<T>)?;
    let client = T::translated(&back);
    if is_timed(config, &key, client.0) {
        return None;
    }
    let flow = key.with_destination(client);
    let ServiceFlowParts {
        to: source, flags, ..
    } = answered_to_outside(&flow, config)?;
    if !is_followed(flags) {
        return None;
    }
    // Keeps an LRU map from evicting the other entry of the translation.
    let sent = flow.reply();
    translation(&sent)?;
    Some(Passage {
        flow,
        source,
        destination: client,
    })
}

/// Whether a flow with these flags is followed here. If flows share their answers, each packet changes which flow
/// gets them. Flows with another port are few.
#[inline(always)]
fn is_followed(flags: u16) -> bool {
    flags & (FLOW_MASQUERADED | FLOW_SHARED | FLOW_MOVED) == FLOW_MASQUERADED
}

/// Whether the tc programs time a connection between the sender and this host. They must see all of it.
#[inline(always)]
fn is_timed<T: Version>(config: &DatapathConfig, sent: &T, to: T::Address) -> bool {
    config.flags & PASSIVE_RTT != 0
        && sent.protocol() == IP_PROTOCOL_TCP
        && (is_peer::<T>(sent.source().0) || is_peer::<T>(to))
}

/// Whether a translation belongs to neither an endpoint of this node nor the host itself.
#[inline(always)]
fn is_of_nobody_here<T: Version>(entry: &T::Translation) -> bool {
    T::flags(entry) & (NAT_HOST_LOCAL | NAT_NEEDS_CT) == NAT_NEEDS_CT
}

#[inline(always)]
fn is_peer<T: Version>(address: T::Address) -> bool {
    HEALTH_PEERS.get_ptr(address.to_addr()).is_some()
}
