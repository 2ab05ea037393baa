//! Services and endpoint slices, read from the `Service` and `EndpointSlice` objects of Kubernetes.
//!
//! [`read_service`] and [`read_slice`] apply the defaults of Kubernetes and kube-proxy's rules on which objects to
//! serve. They report all errors at once, each with the path of its field and with how much it [concerns](Extent). A
//! list member with an error is left out; the other ports and addresses of the object are still served.

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
use health_model::settings::ServiceForwarding;
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use annotation::Algorithm;
pub use error::{Extent, Kind, SpecError};
pub use health_model::manifest::Problem;
pub use name::{PortKey, ServiceName, ServicePortName, SliceName};
pub use selection::{Selection, Skip};
pub use service::{ServiceReading, read_service};
pub use slice::{SliceReading, read_slice};

/// A service, reduced to the fields that matter for its traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The properties that all of the service's ports share.
    pub common: Arc<Common>,
    /// The service's ports, in the order of the object. No two ports share both name and protocol.
    pub ports: Vec<ServicePort>,
}

impl Service {
    /// Returns the service's ports with their names.
    pub fn by_name(&self) -> impl Iterator<Item = (ServicePortName, &ServicePort)> {
        self.ports.iter().map(|port| (port.full_name(), port))
    }
}

/// The properties that all ports of a service share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// The service's name.
    pub name: ServiceName,
    /// The service's type.
    pub kind: ServiceType,
    /// When the service was created. If two services claim an address, the older one owns it. `None` counts as older
    /// than any time.
    pub created: Option<Timestamp>,
    /// The ClusterIPs: at least one, and at most one of each family. A family without a ClusterIP is not served.
    pub cluster_ips: Vec<IpAddr>,
    /// External addresses that the network routes to the nodes, without duplicates.
    pub external_ips: Vec<IpAddr>,
    /// Addresses for which a load balancer forwards packets without changing the destination, without duplicates.
    pub load_balancer_ips: Vec<IpAddr>,
    /// The networks that may use the load balancer's addresses.
    pub source_ranges: SourceRanges,
    /// How long a client stays with its backend after it last opened a flow; `None` for no affinity.
    pub affinity: Option<Duration>,
    /// Which endpoints traffic to the ClusterIPs may use.
    pub internal_policy: TrafficPolicy,
    /// Which endpoints traffic to all other addresses may use.
    pub external_policy: TrafficPolicy,
    /// The port on which the node tells load balancers whether it has endpoints.
    pub health_check_node_port: Option<u16>,
    /// How to choose a backend; `None` for the node's default.
    pub algorithm: Option<Algorithm>,
    /// How packets from external clients reach backends on other nodes; `None` for the node's default.
    pub forwarding: Option<ServiceForwarding>,
    /// Whether this node's probes take endpoints of a service from the API out of service before the API does.
    pub local_readiness: bool,
}

/// The type of a service. Each type includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ServiceType {
    /// Reachable at addresses that the cluster assigned.
    #[default]
    ClusterIp,
    /// Also reachable at a port of each node.
    NodePort,
    /// Also reachable at addresses of a load balancer.
    LoadBalancer,
}

impl ServiceType {
    /// Returns the name in manifests and listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}

/// A port of a service, with all properties that matter for its traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// The port's name; empty if it is the service's only port.
    pub name: Arc<str>,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The port number at the addresses of the service. Never 0.
    pub port: u16,
    /// The port number at the addresses of nodes.
    pub node_port: Option<u16>,
    /// The service to which the port belongs.
    pub service: Arc<Common>,
}

impl ServicePort {
    /// Returns the port's name together with the service's name.
    pub fn full_name(&self) -> ServicePortName {
        ServicePortName {
            service: self.service.name.clone(),
            port: self.name.clone(),
            protocol: self.protocol,
        }
    }

    /// Whether the port is reachable at addresses other than ClusterIPs.
    pub(crate) fn is_external(&self) -> bool {
        self.node_port.is_some()
            || !self.service.external_ips.is_empty()
            || !self.service.load_balancer_ips.is_empty()
    }

    /// Whether some of the port's traffic may use all endpoints of the cluster. This holds for traffic from this node
    /// and its pods to an external address, whatever the policy.
    pub(crate) fn uses_cluster_endpoints(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Cluster || self.is_external()
    }

    /// Whether some of the port's traffic may only use endpoints of this node.
    pub(crate) fn uses_local_endpoints(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Local
            || (self.service.external_policy == TrafficPolicy::Local && self.is_external())
    }
}

/// Which endpoints traffic may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TrafficPolicy {
    /// All endpoints.
    #[default]
    Cluster,
    /// Endpoints on the node where the traffic arrives.
    Local,
}

impl TrafficPolicy {
    /// Returns the name in manifests and listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cluster => "Cluster",
            Self::Local => "Local",
        }
    }
}

/// The networks that may use a load balancer's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceRanges {
    /// The networks, of both families.
    pub networks: Vec<IpNet>,
    /// Whether one of the networks could not be read. Then only the readable ones are allowed, even if there are none:
    /// a typo must not open a service to everyone.
    pub has_error: bool,
}

impl SourceRanges {
    /// Returns the allowed networks of this family; `None` if all sources are allowed. As in Kubernetes, networks of
    /// one family do not restrict the other family.
    pub fn of(&self, family: Family) -> Option<Vec<IpNet>> {
        let networks = self.networks.iter().copied();
        let networks: Vec<_> = networks
            .filter(|network| Family::of(network.addr()) == family)
            .collect();
        (self.has_error || !networks.is_empty()).then_some(networks)
    }
}

/// A slice of a service's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The slice's name.
    pub name: SliceName,
    /// The service to which the slice belongs.
    pub service: ServiceName,
    /// The family of the endpoints' addresses.
    pub family: Family,
    /// The ports of each endpoint.
    pub ports: Vec<SlicePort>,
    /// The endpoints, in the order of the object.
    pub endpoints: Vec<SliceEndpoint>,
    /// The weight of each endpoint: the endpoint's share of new flows relative to the service's other endpoints. At
    /// least 1.
    pub weight: u16,
}

/// A port of the endpoints of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the service's port.
    pub name: Arc<str>,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The port number at the endpoint. Never 0.
    pub port: u16,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// The endpoint's address.
    pub address: IpAddr,
    /// Whether the endpoint is ready, serving and terminating.
    pub conditions: Conditions,
    /// The endpoint's node.
    pub node: Option<Arc<str>>,
    /// The endpoint's zone.
    pub zone: Option<Arc<str>>,
    /// The clients that should use the endpoint; `None` for all.
    pub hints: Option<Arc<Hints>>,
}

/// The conditions of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conditions {
    /// Whether the endpoint should get new flows.
    pub ready: bool,
    /// Whether the endpoint can serve, even while it is terminating.
    pub serving: bool,
    /// Whether the endpoint is terminating.
    pub terminating: bool,
}

/// The nodes and zones whose clients should use an endpoint.
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
    /// The address and port on which the endpoint listens.
    pub address: SocketAddr,
    /// Whether the endpoint is ready, serving and terminating.
    pub conditions: Conditions,
    /// Whether the endpoint is on this node.
    pub is_local: bool,
    /// The endpoint's share of new flows, relative to the other endpoints of the port. At least 1.
    pub weight: u16,
    /// The endpoint's node.
    pub node: Option<Arc<str>>,
    /// The endpoint's zone.
    pub zone: Option<Arc<str>>,
    /// The clients that should use the endpoint; `None` for all.
    pub hints: Option<Arc<Hints>>,
}
