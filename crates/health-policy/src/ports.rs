//! Ports and protocols: the part of a rule that does not concern the two sides of a packet, except that the destination
//! gives port names their numbers.

use health_model::labels::LabelSet;
use health_model::labels::pod::ports_by_name;
use health_model::policy::{L4, Protocol};

/// A range of ports of one protocol, or of ICMP types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PortRange {
    pub(super) protocol: Protocol,
    pub(super) first: u16,
    /// The last port, inclusive.
    pub(super) last: u16,
}

impl PortRange {
    const fn only(l4: L4) -> Self {
        Self {
            protocol: l4.protocol,
            first: l4.port,
            last: l4.port,
        }
    }

    const fn contains(&self, l4: L4) -> bool {
        self.protocol.0 == l4.protocol.0 && self.first <= l4.port && l4.port <= self.last
    }
}

/// The ports of one protocol that have a name. Which ports these are depends on the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedPort {
    protocol: Protocol,
    name: String,
}

impl NamedPort {
    /// Returns the ports to which a destination with these labels gives the name; often none.
    pub(super) fn resolve(&self, destination: &LabelSet) -> impl Iterator<Item = PortRange> {
        ports_by_name(destination, &self.name)
            .filter(move |port| port.protocol == self.protocol)
            .map(PortRange::only)
    }
}

/// A rule's ports, without their protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PortSpec {
    /// The first and the last port.
    Range(u16, u16),
    /// The name of ports.
    Name(String),
}

impl PortSpec {
    pub(super) const ALL: Self = Self::Range(0, u16::MAX);
}

/// Ports by number and by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ports {
    pub(super) ranges: Vec<PortRange>,
    pub(super) named: Vec<NamedPort>,
}

impl Ports {
    /// Adds ports of this protocol.
    pub(super) fn add(&mut self, protocol: Protocol, ports: PortSpec) {
        match ports {
            PortSpec::Range(first, last) => self.ranges.push(PortRange {
                protocol,
                first,
                last,
            }),
            PortSpec::Name(name) => self.named.push(NamedPort { protocol, name }),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.named.is_empty()
    }

    fn contains(&self, destination: &LabelSet, l4: L4) -> bool {
        let mut named = self.named.iter();
        self.ranges.iter().any(|range| range.contains(l4))
            || named.any(|port| port.resolve(destination).any(|range| range.contains(l4)))
    }
}

/// The ports to which a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// Every protocol and port.
    All,
    /// Only these ports.
    Ports(Ports),
}

impl Traffic {
    /// Whether a packet to a destination with these labels is part of the traffic.
    pub(super) fn contains(&self, destination: &LabelSet, l4: L4) -> bool {
        match self {
            Self::All => true,
            Self::Ports(ports) => ports.contains(destination, l4),
        }
    }

    /// Returns the ports that have a name.
    pub(super) fn named(&self) -> &[NamedPort] {
        match self {
            Self::All => &[],
            Self::Ports(ports) => &ports.named,
        }
    }
}
