//! Determines who sent a leaving packet, and whether the packet must be masqueraded.

use health_common::masquerade::{Address as _, Masquerade};
use health_common::metrics::Reason;

use crate::frame::{Frame, MARK_SERVED};
use crate::ip_version::Version;
use crate::maps::{HEALTH_ENDPOINTS, HEALTH_PEERS};

/// The sender of a leaving packet.
#[repr(u16)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// The node's own address: this host, or a sender that was already masqueraded.
    Node,
    /// The node's own address, to a destination that is not masqueraded: only clients of services share its ports.
    NodeInside,
    /// An endpoint of this node, whose packets are in conntrack.
    Endpoint,
    /// A host behind this gateway.
    Routed,
    /// A client of a service, whose packet goes to a backend elsewhere.
    Served,
}

impl Sender {
    /// Whether the packet has the node's own address.
    #[inline(always)]
    pub(super) fn is_node(self) -> bool {
        matches!(self, Self::Node | Self::NodeInside)
    }
}

/// The sender of a packet with this source, and the device to enter its flow with: for an endpoint, its own device, so
/// that the programs there recognise the entry as theirs. `None` for packets that are not masqueraded.
#[inline(always)]
pub(super) fn sender<T: Version>(
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
pub(super) fn is_native<T: Version>(
    destination: &T::Address,
    settings: &Masquerade<T::Address>,
) -> bool {
    settings.is_native(destination) || HEALTH_PEERS.get_ptr(destination.to_addr()).is_some()
}

/// Decides on a packet that cannot be masqueraded: drops it if it had to be.
#[inline(always)]
pub(super) fn unmasqueraded<T: Version>(
    sender: Sender,
    destination: &T::Address,
    settings: &Masquerade<T::Address>,
    reason: Reason,
) -> Result<(), Reason> {
    if sender.is_node() || sender != Sender::Served && is_native::<T>(destination, settings) {
        Ok(())
    } else {
        Err(reason)
    }
}
