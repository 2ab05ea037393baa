//! The ipset sets that the rules use. Their names start with `HEALTH-`, or `HEALTH-6-` for IPv6.

use std::fmt;

use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::netlink::ipset::{SetSpec, SetType};

/// Maximum number of entries in a set.
const MAX_ENTRIES: u32 = 1 << 20;

/// The purpose of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKind {
    /// Endpoints of this node that reach themselves through a service.
    LoopBack,
    /// ClusterIPs.
    ClusterIp,
    /// External addresses with masqueraded traffic.
    ExternalIp,
    /// External addresses that preserve the source.
    ExternalIpLocal,
    /// Load-balancer addresses with masqueraded traffic.
    LoadBalancer,
    /// Load-balancer addresses that preserve the source.
    LoadBalancerLocal,
    /// Load-balancer addresses that only some sources may use.
    LoadBalancerFirewall,
    /// Source addresses that may use the addresses in [`Self::LoadBalancerFirewall`].
    SourceIp,
    /// Source networks that may use the addresses in [`Self::LoadBalancerFirewall`].
    SourceCidr,
    /// TCP ports of the node with masqueraded traffic.
    NodePortTcp,
    /// UDP ports of the node with masqueraded traffic.
    NodePortUdp,
    /// SCTP ports of the node with masqueraded traffic, with each address of the node.
    NodePortSctp,
    /// TCP ports of the node that preserve the source.
    NodePortLocalTcp,
    /// UDP ports of the node that preserve the source.
    NodePortLocalUdp,
    /// SCTP ports of the node that preserve the source, with each address of the node.
    NodePortLocalSctp,
    /// Ports of the node on which load balancers check the health of a service.
    CheckNodePort,
    /// Addresses bound to our device.
    BoundIps,
    /// Destinations where new connections get an ICMP error.
    Reject,
    /// Destinations where new connections are dropped.
    Drop,
    /// Destinations where new connections from other machines are dropped.
    DropOutside,
    /// Our virtual servers.
    Servers,
}

impl SetKind {
    /// All kinds of sets.
    pub const ALL: [Self; 21] = [
        Self::LoopBack,
        Self::ClusterIp,
        Self::ExternalIp,
        Self::ExternalIpLocal,
        Self::LoadBalancer,
        Self::LoadBalancerLocal,
        Self::LoadBalancerFirewall,
        Self::SourceIp,
        Self::SourceCidr,
        Self::NodePortTcp,
        Self::NodePortUdp,
        Self::NodePortSctp,
        Self::NodePortLocalTcp,
        Self::NodePortLocalUdp,
        Self::NodePortLocalSctp,
        Self::CheckNodePort,
        Self::BoundIps,
        Self::Reject,
        Self::Drop,
        Self::DropOutside,
        Self::Servers,
    ];

    /// Returns the set's name after the prefix.
    const fn name(self) -> &'static str {
        match self {
            Self::LoopBack => "LOOP-BACK",
            Self::ClusterIp => "CLUSTER-IP",
            Self::ExternalIp => "EXTERNAL-IP",
            Self::ExternalIpLocal => "EXTERNAL-IP-LOCAL",
            Self::LoadBalancer => "LOAD-BALANCER",
            Self::LoadBalancerLocal => "LOAD-BALANCER-LOCAL",
            Self::LoadBalancerFirewall => "LOAD-BALANCER-FW",
            Self::SourceIp => "LB-SOURCE-IP",
            Self::SourceCidr => "LB-SOURCE-CIDR",
            Self::NodePortTcp => "NODE-PORT-TCP",
            Self::NodePortUdp => "NODE-PORT-UDP",
            Self::NodePortSctp => "NODE-PORT-SCTP",
            Self::NodePortLocalTcp => "NODE-PORT-LOCAL-TCP",
            Self::NodePortLocalUdp => "NODE-PORT-LOCAL-UDP",
            Self::NodePortLocalSctp => "NODE-PORT-LOCAL-SCTP",
            Self::CheckNodePort => "CHECK-NODE-PORT",
            Self::BoundIps => "IPVS-IPS",
            Self::Reject => "REJECT",
            Self::Drop => "DROP",
            Self::DropOutside => "DROP-OUTSIDE",
            Self::Servers => "IPVS-SERVERS",
        }
    }

    /// Returns the type of the set's entries.
    pub(crate) const fn set_type(self) -> SetType {
        match self {
            Self::LoopBack | Self::SourceIp => SetType::HashIpPortIp,
            Self::SourceCidr => SetType::HashIpPortNet,
            Self::NodePortTcp
            | Self::NodePortUdp
            | Self::NodePortLocalTcp
            | Self::NodePortLocalUdp
            | Self::CheckNodePort => SetType::BitmapPort,
            Self::BoundIps => SetType::HashIp,
            _ => SetType::HashIpPort,
        }
    }

    /// Returns the set for ports of the node, by protocol and by whether their traffic keeps its source.
    pub(super) const fn node_port(protocol: Protocol, keeps_source: bool) -> Self {
        match (protocol, keeps_source) {
            (Protocol::TCP, false) => Self::NodePortTcp,
            (Protocol::TCP, true) => Self::NodePortLocalTcp,
            (Protocol::UDP, false) => Self::NodePortUdp,
            (Protocol::UDP, true) => Self::NodePortLocalUdp,
            (_, false) => Self::NodePortSctp,
            (_, true) => Self::NodePortLocalSctp,
        }
    }
}

/// A set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetId {
    /// The family of the packets to match.
    pub family: Family,
    /// The purpose of the set.
    pub kind: SetKind,
}

impl SetId {
    /// Returns all sets.
    pub fn all() -> impl Iterator<Item = Self> {
        let families = Family::ALL.into_iter();
        families.flat_map(|family| SetKind::ALL.map(|kind| Self { family, kind }))
    }

    /// Returns the set's definition in ipset.
    pub fn spec(self) -> SetSpec {
        SetSpec {
            name: self.to_string(),
            kind: self.kind.set_type(),
            family: self.family,
            max_entries: MAX_ENTRIES,
        }
    }
}

impl fmt::Display for SetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = match self.family {
            Family::V4 => "HEALTH-",
            Family::V6 => "HEALTH-6-",
        };
        write!(f, "{prefix}{}", self.kind.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_set_has_a_name_of_its_own_that_the_kernel_takes() {
        let names: BTreeSet<_> = SetId::all().map(|set| set.to_string()).collect();
        assert_eq!(names.len(), 2 * SetKind::ALL.len());
        assert!(names.iter().all(|name| name.len() <= 31), "{names:?}");
    }
}
