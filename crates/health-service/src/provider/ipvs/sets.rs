//! The ipset sets that the rules use. Their names start with `HEALTH-`, or with `HEALTH-6-` for IPv6.

use std::fmt;

use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::netlink::ipset::{SetSpec, SetType};

/// Maximum number of entries in a set.
const MAX_ENTRIES: u32 = 1 << 20;

/// What a set is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKind {
    /// Endpoints of this node that reach themselves through a service.
    LoopBack,
    /// ClusterIPs.
    ClusterIp,
    /// External addresses whose traffic is masqueraded.
    ExternalIp,
    /// External addresses that keep the source.
    ExternalIpLocal,
    /// Addresses of load balancers whose traffic is masqueraded.
    LoadBalancer,
    /// Addresses of load balancers that keep the source.
    LoadBalancerLocal,
    /// Addresses of load balancers that only some sources may use.
    LoadBalancerFirewall,
    /// Source addresses that may use the addresses in the previous set.
    SourceIp,
    /// Source networks that may use the addresses in that set.
    SourceCidr,
    /// Ports of the node whose traffic is masqueraded.
    NodePortTcp,
    /// The same for UDP.
    NodePortUdp,
    /// The same for SCTP, with each address of the node.
    NodePortSctp,
    /// Ports of the node that keep the source.
    NodePortLocalTcp,
    /// The same for UDP.
    NodePortLocalUdp,
    /// The same for SCTP, with each address of the node.
    NodePortLocalSctp,
    /// Ports of the node where load balancers check the health of a service.
    CheckNodePort,
    /// Addresses that are bound to our device.
    BoundIps,
    /// Where new connections get an ICMP error.
    Reject,
    /// Where new connections get no answer.
    Drop,
    /// Where new connections from other machines get no answer.
    DropOutside,
    /// Our virtual servers.
    Servers,
}

impl SetKind {
    /// All of them.
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

    /// The name after the prefix.
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

    /// The type of its entries.
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

    /// The set for ports of the node, by protocol, and by whether their traffic keeps its source.
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
    /// The family of the packets that it is matched against.
    pub family: Family,
    /// What it is for.
    pub kind: SetKind,
}

impl SetId {
    /// All sets.
    pub fn all() -> impl Iterator<Item = Self> {
        let families = Family::ALL.into_iter();
        families.flat_map(|family| SetKind::ALL.map(|kind| Self { family, kind }))
    }

    /// The set's definition in ipset.
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
