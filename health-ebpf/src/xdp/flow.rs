//! The flow of a packet: what a client outside sends through this node to a backend on another, and what that answers.

use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::masquerade::Address as _;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::packet::Packet;
use health_common::service::FLOW_MASQUERADED;
use health_common::tcp::IP_PROTOCOL_TCP;

use super::frame::{Plain, XdpFrame, read};
use crate::conntrack::Traffic;
use crate::ip_version::Version;
use crate::maps::HEALTH_PEERS;
use crate::nat::{settings, translation, whole};
use crate::service::{answered_to_outside, known_from_outside};

/// A packet's way through this node.
pub(super) struct Passage<T: Version> {
    /// The tuple under which conntrack knows the packet, in the direction that it goes: between client and backend.
    pub(super) flow: T,
    /// Of the segment, 0 for UDP.
    pub(super) tcp_flags: u8,
    /// Source address and port that the packet is to have, network byte order.
    pub(super) source: (T::Address, u16),
    /// The same of its destination.
    pub(super) destination: (T::Address, u16),
}

impl<T: Version> Passage<T> {
    /// What the packet adds to its flow, given its length from the IP header on.
    #[inline(always)]
    pub(super) fn traffic(&self, len: u32) -> Traffic {
        if self.flow.direction() == TUPLE_OUT {
            Traffic {
                tx_bytes: len,
                ..Traffic::default()
            }
        } else {
            Traffic {
                rx_bytes: len,
                ..Traffic::default()
            }
        }
    }
}

/// Finds the flow of a packet.
#[inline(always)]
pub(super) fn find<T: Plain>(frame: &XdpFrame, config: &DatapathConfig) -> Option<Passage<T>>
where
    T::Address: Default,
{
    let settings = settings::<T>()?;
    let received: Packet<T> = read(frame, TUPLE_IN)?;
    let destination = received.tuple.destination();
    let passage = if destination.0 == settings.node_be
        && settings.is_shared(received.tuple.protocol(), destination.1)
    {
        answered(&received, config)
    } else {
        None
    };
    let passage = match passage {
        Some(passage) => passage,
        None => requested(&read(frame, TUPLE_OUT)?, config)?,
    };
    // Connections to peers are timed by the programs of tc, which must see all of them for that.
    let is_timed = config.flags & PASSIVE_RTT != 0
        && received.tuple.protocol() == IP_PROTOCOL_TCP
        && (is_peer::<T>(passage.flow.source().0) || is_peer::<T>(passage.flow.destination().0));
    (!is_timed).then_some(passage)
}

/// What a client sends to a service.
#[inline(always)]
fn requested<T: Version>(packet: &Packet<T>, config: &DatapathConfig) -> Option<Passage<T>>
where
    T::Address: Default,
{
    // Keys must be on the stack.
    let sent = packet.tuple;
    let parts = known_from_outside(packet, &sent, config)?;
    if parts.flags & FLOW_MASQUERADED == 0 {
        return None;
    }
    let flow = sent.with_destination(parts.to);
    let out = whole(&flow).filter(is_of_nobody_here::<T>)?;
    Some(Passage {
        flow,
        tcp_flags: packet.tcp_flags,
        source: T::translated(&out),
        destination: parts.to,
    })
}

/// What a backend answers to this node's address.
#[inline(always)]
fn answered<T: Version>(packet: &Packet<T>, config: &DatapathConfig) -> Option<Passage<T>> {
    // As above.
    let key = packet.tuple;
    let back = translation(&key).filter(is_of_nobody_here::<T>)?;
    let client = T::translated(&back);
    let flow = key.with_destination(client);
    let (source, flags) = answered_to_outside(&flow, config)?;
    if flags & FLOW_MASQUERADED == 0 {
        return None;
    }
    // Keeps the other entry of the translation from being evicted.
    let sent = flow.reply();
    translation(&sent)?;
    Some(Passage {
        flow,
        tcp_flags: packet.tcp_flags,
        source,
        destination: client,
    })
}

/// Whether a translation is for a flow of neither an endpoint of this node nor of the host itself.
#[inline(always)]
fn is_of_nobody_here<T: Version>(entry: &T::Translation) -> bool {
    T::flags(entry) & (NAT_HOST_LOCAL | NAT_NEEDS_CT) == NAT_NEEDS_CT
}

#[inline(always)]
fn is_peer<T: Version>(address: T::Address) -> bool {
    HEALTH_PEERS.get_ptr(address.to_addr()).is_some()
}
