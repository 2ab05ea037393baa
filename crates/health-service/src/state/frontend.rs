//! Where the traffic of a port arrives, and what becomes of it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use health_model::ipam::Family;
use ipnet::IpNet;

use crate::choice::Choice;
use crate::spec::{ServicePort, TrafficPolicy};

/// What traffic is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Listen {
    /// An address of the service.
    Address(SocketAddr),
    /// A port at the addresses of the node, whichever of them serve NodePorts.
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

/// What an address is to a service. Of two kinds that have one address the first counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrontendKind {
    /// The address that the cluster gave it.
    ClusterIp,
    /// An address of its load balancer.
    LoadBalancer,
    /// An address that somebody routes to the nodes.
    ExternalIp,
    /// A port of the node.
    NodePort,
}

/// What becomes of new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A backend of the cluster list.
    Cluster,
    /// A backend of the local list.
    Local,
    /// Nothing, silently: there are endpoints, but not here.
    Drop,
    /// An ICMP error: there are no endpoints at all.
    Reject,
}

/// Where traffic of a port arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// What it is sent to.
    pub listen: Listen,
    /// What that is to the service.
    pub kind: FrontendKind,
    /// The policy for traffic from outside. Under `Local`, an external frontend keeps the source address.
    pub policy: TrafficPolicy,
    /// What becomes of traffic from this node and its pods. External frontends give it all endpoints, whatever the
    /// policy.
    pub inside: Target,
    /// What becomes of all other traffic.
    pub outside: Target,
    /// Who may use it; none for all. Only a load balancer's addresses have it.
    pub source_ranges: Option<Arc<[IpNet]>>,
}

/// Where a port is to be reached in a family, each place once; nowhere if the service has no ClusterIP of it.
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

/// Whether a port may have frontends whose users are restricted, and to whom.
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
