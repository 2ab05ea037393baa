//! Ports and protocols: the part of a rule that does not concern the two sides of a packet.

use health_model::policy::{L4, Protocol};

/// A range of ports of one protocol, or of ICMP types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortRange {
    pub(super) protocol: Protocol,
    pub(super) first: u16,
    /// The last port, inclusive.
    pub(super) last: u16,
}

impl PortRange {
    pub(super) const fn all_of(protocol: Protocol) -> Self {
        Self {
            protocol,
            first: 0,
            last: u16::MAX,
        }
    }

    const fn contains(&self, l4: L4) -> bool {
        self.protocol.0 == l4.protocol.0 && self.first <= l4.port && l4.port <= self.last
    }
}

/// The ports to which a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// Every protocol and port.
    All,
    /// Only these ports.
    Ports(Vec<PortRange>),
}

impl Traffic {
    pub(super) fn contains(&self, l4: L4) -> bool {
        match self {
            Self::All => true,
            Self::Ports(ranges) => ranges.iter().any(|range| range.contains(l4)),
        }
    }
}
