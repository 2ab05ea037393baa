//! What is to be served, from the `Service` and `EndpointSlice` objects of Kubernetes.
//!
//! [`read_service`] and [`read_slice`] apply the defaults of Kubernetes and the rules by which kube-proxy takes an
//! object or leaves it, and report every error at once, each with the path of its field. A field with an error is left
//! out; the ports and addresses beside it go on.

mod address;
pub mod annotation;
mod error;
mod name;
mod selection;
mod service;
mod slice;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use annotation::{Algorithm, AlgorithmError};
pub use error::{Kind, SpecError};
pub use health_model::manifest::Problem;
pub use name::{PortKey, ServiceName, ServicePortName, SliceName};
pub use selection::{Selection, Skip};
pub use service::{ServiceReading, read_service};
pub use slice::{SliceReading, read_slice};

/// A service, as far as its traffic needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// What holds for all its ports.
    pub common: Arc<Common>,
    /// Its ports in the order of the object. No two have one name and protocol.
    pub ports: Vec<ServicePort>,
}

impl Service {
    /// Its ports, by name.
    pub fn by_name(&self) -> impl Iterator<Item = (ServicePortName, &ServicePort)> {
        self.ports.iter().map(|port| (port.full_name(), port))
    }
}

/// What holds for all ports of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// Its name.
    pub name: ServiceName,
    /// How it is to be reached.
    pub kind: ServiceType,
    /// When it was made: of two that claim an address, the older has it. None counts as older than any time.
    pub created: Option<Timestamp>,
    /// Its ClusterIPs, at most one of each family; there is one at least. A family without one is not served.
    pub cluster_ips: Vec<IpAddr>,
    /// External addresses that somebody routes to the nodes, each once.
    pub external_ips: Vec<IpAddr>,
    /// Addresses that a load balancer delivers without change of the destination, each once.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Who may use the addresses of the load balancer.
    pub source_ranges: SourceRanges,
    /// How long a client stays with its backend after its last packet; none for no affinity.
    pub affinity: Option<Duration>,
    /// Which endpoints traffic to the ClusterIPs may use.
    pub internal_policy: TrafficPolicy,
    /// Which endpoints traffic to all other addresses may use.
    pub external_policy: TrafficPolicy,
    /// The port on which the node tells load balancers whether it has endpoints.
    pub health_check_node_port: Option<u16>,
    /// How a backend is chosen; none for the node's default.
    pub algorithm: Option<Algorithm>,
}

/// How a service is to be reached: each type by what those before it have, and more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ServiceType {
    /// At addresses that the cluster gave it.
    #[default]
    ClusterIp,
    /// At ports of each node.
    NodePort,
    /// At addresses of a load balancer.
    LoadBalancer,
}

impl ServiceType {
    /// Its name in manifests and listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}

/// A port of a service, with all that its traffic needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; empty for the only port of a service.
    pub name: Arc<str>,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// Its number at the addresses of the service. Never 0.
    pub port: u16,
    /// Its number at the addresses of nodes.
    pub node_port: Option<u16>,
    /// The service.
    pub service: Arc<Common>,
}

impl ServicePort {
    /// Its name with that of its service.
    pub fn full_name(&self) -> ServicePortName {
        ServicePortName {
            service: self.service.name.clone(),
            port: self.name.clone(),
            protocol: self.protocol,
        }
    }

    /// Whether it is reached by more than ClusterIPs.
    pub fn is_external(&self) -> bool {
        self.node_port.is_some()
            || !self.service.external_ips.is_empty()
            || !self.service.load_balancer_ips.is_empty()
    }

    /// Whether some of its traffic may use all endpoints of the cluster. What reaches an external address from this
    /// node or its pods may, whatever the policy.
    pub fn uses_cluster_endpoints(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Cluster || self.is_external()
    }

    /// Whether some of its traffic may use endpoints of this node only.
    pub fn uses_local_endpoints(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Local
            || (self.service.external_policy == TrafficPolicy::Local && self.is_external())
    }
}

/// Which endpoints traffic may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TrafficPolicy {
    /// All.
    #[default]
    Cluster,
    /// Those on the node where it arrives.
    Local,
}

impl TrafficPolicy {
    /// Its name in manifests and listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cluster => "Cluster",
            Self::Local => "Local",
        }
    }
}

/// Who may use the addresses of a load balancer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceRanges {
    /// The networks, of both families.
    pub networks: Vec<IpNet>,
    /// Whether one could not be read. Then nobody is let in whom no network has: a slip of the pen must not open a
    /// service to all.
    pub has_error: bool,
}

impl SourceRanges {
    /// The networks of this family that are let in; none if all are. Networks of the other family do not restrict this
    /// one, as in Kubernetes.
    pub fn of(&self, family: Family) -> Option<Vec<IpNet>> {
        let networks = self.networks.iter().copied();
        let networks: Vec<_> = networks
            .filter(|network| Family::of(network.addr()) == family)
            .collect();
        (self.has_error || !networks.is_empty()).then_some(networks)
    }
}

/// A slice of the endpoints of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Its name.
    pub name: SliceName,
    /// The service that they are of.
    pub service: ServiceName,
    /// The family of their addresses.
    pub family: Family,
    /// The ports that each of them has.
    pub ports: Vec<SlicePort>,
    /// They, in the order of the object.
    pub endpoints: Vec<SliceEndpoint>,
    /// The weight of each: its share of new flows relative to others of the service. At least 1.
    pub weight: u16,
}

/// A port of the endpoints of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the service's port.
    pub name: Arc<str>,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// Its number at the endpoint. Never 0.
    pub port: u16,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Its address.
    pub address: IpAddr,
    /// How it does.
    pub conditions: Conditions,
    /// The node that it is on.
    pub node: Option<Arc<str>>,
    /// The zone that it is in.
    pub zone: Option<Arc<str>>,
    /// For whom it is; none for all.
    pub hints: Option<Arc<Hints>>,
}

/// How an endpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conditions {
    /// Whether it is meant to get new flows.
    pub ready: bool,
    /// Whether it can serve, ending or not.
    pub serving: bool,
    /// Whether it is ending.
    pub terminating: bool,
}

/// For whom an endpoint is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// The nodes.
    pub nodes: Vec<Arc<str>>,
    /// The zones.
    pub zones: Vec<Arc<str>>,
}

/// An endpoint of a port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Where it listens.
    pub address: SocketAddr,
    /// How it does.
    pub conditions: Conditions,
    /// Whether it is on this node.
    pub is_local: bool,
    /// Its share of new flows relative to others of the port. At least 1.
    pub weight: u16,
    /// The node that it is on.
    pub node: Option<Arc<str>>,
    /// The zone that it is in.
    pub zone: Option<Arc<str>>,
    /// For whom it is; none for all.
    pub hints: Option<Arc<Hints>>,
}
