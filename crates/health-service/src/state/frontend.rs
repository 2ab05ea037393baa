//! Frontends: the destinations at which the traffic of a port arrives, and where the traffic goes.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use health_model::ipam::Family;
use ipnet::IpNet;

use crate::choice::Choice;
use crate::spec::{ServicePort, TrafficPolicy};

/// The destination address of a client's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Listen {
    /// An address of the service.
    Address(SocketAddr),
    /// A port of the node, at all node addresses that serve NodePorts.
    NodePort(u16),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::NodePort(port) => write!(f, "node port {port}"),
        }
    }
}

/// The kind of a frontend. If an address is of two kinds, the first one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrontendKind {
    /// An address that the cluster assigned.
    ClusterIp,
    /// An address of the service's load balancer.
    LoadBalancer,
    /// An address that the network routes to the nodes.
    ExternalIp,
    /// A port of the node.
    NodePort,
}

/// Where new flows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A backend of the cluster list.
    Cluster,
    /// A backend of the local list.
    Local,
    /// New flows are dropped silently: there are endpoints, but none on this node.
    Drop,
    /// New flows get an ICMP error: there are no endpoints at all.
    Reject,
}

/// A destination at which traffic of a port arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The destination of the traffic.
    pub listen: Listen,
    /// The kind of the destination.
    pub kind: FrontendKind,
    /// The policy for external traffic. Under `Local`, an external frontend preserves the source address.
    pub policy: TrafficPolicy,
    /// Where traffic from this node and its pods goes. At external frontends, such traffic may use all endpoints,
    /// whatever the policy.
    pub inside: Target,
    /// Where all other traffic goes.
    pub outside: Target,
    /// The networks that may use the frontend; `None` for all. Set only at load-balancer addresses.
    pub source_ranges: Option<Arc<[IpNet]>>,
}

/// Returns the frontends that a port should have in a family, without duplicates; empty if the service has no ClusterIP
/// of that family.
pub(super) fn wanted(port: &ServicePort, family: Family) -> Vec<(Listen, FrontendKind)> {
    let service = &port.service;
    let is_ours = |ip: &&IpAddr| Family::of(**ip) == family;
    if !service
        .cluster_ips
        .iter()
        .any(|ip| Family::of(*ip) == family)
    {
        return Vec::new();
    }
    let mut wanted: Vec<(Listen, FrontendKind)> = Vec::new();
    for (addresses, kind) in [
        (&service.cluster_ips, FrontendKind::ClusterIp),
        (&service.load_balancer_ips, FrontendKind::LoadBalancer),
        (&service.external_ips, FrontendKind::ExternalIp),
    ] {
        for ip in addresses.iter().filter(is_ours) {
            let listen = Listen::Address(SocketAddr::new(*ip, port.port));
            if !wanted.iter().any(|(known, _)| *known == listen) {
                wanted.push((listen, kind));
            }
        }
    }
    if let Some(number) = port.node_port {
        wanted.push((Listen::NodePort(number), FrontendKind::NodePort));
    }
    wanted
}

/// Returns the networks that may use a port's load-balancer addresses; `None` if there are no such addresses, or if
/// every network may use them.
pub(super) fn source_ranges(port: &ServicePort, family: Family) -> Option<Arc<[IpNet]>> {
    if port.service.load_balancer_ips.is_empty() {
        return None;
    }
    port.service.source_ranges.of(family).map(Arc::from)
}

impl Frontend {
    pub(super) fn new(
        (listen, kind): (Listen, FrontendKind),
        port: &ServicePort,
        choice: &Choice<'_>,
        source_ranges: Option<&Arc<[IpNet]>>,
    ) -> Self {
        let service = &port.service;
        let (policy, inside_policy) = match kind {
            FrontendKind::ClusterIp => (service.internal_policy, service.internal_policy),
            _ => (service.external_policy, TrafficPolicy::Cluster),
        };
        Self {
            listen,
            kind,
            policy,
            inside: target(inside_policy, choice),
            outside: target(policy, choice),
            source_ranges: source_ranges
                .filter(|_| kind == FrontendKind::LoadBalancer)
                .cloned(),
        }
    }
}

fn target(policy: TrafficPolicy, choice: &Choice<'_>) -> Target {
    let (target, list) = match policy {
        TrafficPolicy::Cluster => (Target::Cluster, &choice.cluster),
        TrafficPolicy::Local => (Target::Local, &choice.local),
    };
    match (list.is_empty(), choice.has_any) {
        (false, _) => target,
        (true, true) => Target::Drop,
        (true, false) => Target::Reject,
    }
}
