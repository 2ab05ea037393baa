//! A node with its trackers, and objects to apply to it.

use std::net::IpAddr;
use std::sync::Arc;

use health_model::policy::Protocol;
use jiff::Timestamp;

use super::super::*;
use crate::spec::{
    Common, Conditions, EndpointSlice, Service, ServicePort, ServiceType, SliceEndpoint, SliceName,
    SlicePort, SourceRanges, TrafficPolicy,
};

pub(crate) const READY: Conditions = Conditions {
    ready: true,
    serving: true,
    terminating: false,
};
pub(crate) const ENDING: Conditions = Conditions {
    ready: false,
    serving: true,
    terminating: true,
};
/// Conditions of an endpoint that is terminating and no longer serves.
pub(crate) const ENDED: Conditions = Conditions {
    ready: false,
    serving: false,
    terminating: true,
};
pub(crate) const ILL: Conditions = Conditions {
    ready: false,
    serving: false,
    terminating: false,
};

/// The node `here` in zone `z1`.
pub(crate) struct Bed {
    pub(crate) state: State,
    pub(crate) services: ServiceChangeTracker,
    pub(crate) endpoints: EndpointsChangeTracker,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self {
            state: State::new(topology("z1")),
            services: ServiceChangeTracker::default(),
            endpoints: EndpointsChangeTracker::new("here", Timestamp::UNIX_EPOCH),
        }
    }

    pub(crate) fn set(&mut self, service: Service) {
        let name = service.common.name.clone();
        self.services.update(&name, Some(Arc::new(service)));
    }

    pub(crate) fn unset(&mut self, name: &str) {
        self.services.update(&ServiceName::new("shop", name), None);
    }

    pub(crate) fn slice(&mut self, slice: EndpointSlice) {
        self.endpoints.update(Arc::new(slice), None);
    }

    /// Syncs, and describes the changes.
    pub(crate) fn sync(&mut self) -> Vec<String> {
        let changes = self.state.sync(&mut self.services, &mut self.endpoints);
        changes.ports.iter().map(ToString::to_string).collect()
    }

    /// Returns the IPv4 state of a service's port `http`.
    pub(crate) fn port(&self, service: &str) -> &PortState {
        self.state
            .port(&key(service))
            .expect("a port that is served")
    }
}

pub(crate) fn topology(zone: &str) -> Topology {
    Topology {
        node: "here".into(),
        zone: Some(zone.into()),
    }
}

pub(crate) fn key(service: &str) -> PortKey {
    PortKey {
        name: ServicePortName {
            service: ServiceName::new("shop", service),
            port: "http".into(),
            protocol: Protocol::TCP,
        },
        family: Family::V4,
    }
}

/// The reservations of a node that has these addresses, serves NodePorts at all of them, and allows services any
/// external address except one in its pod CIDR. Its agent uses TCP port 81.
pub(crate) fn reserved(own: BTreeSet<IpAddr>) -> Reserved {
    let cidr = "192.0.2.2/32".parse().unwrap();
    Reserved {
        pod_cidrs: [([192, 0, 2, 2].into(), (cidr, "west/there".to_owned()))].into(),
        node: "west/here".to_owned(),
        own: own.clone(),
        node_ports: own,
        ports: [((Protocol::TCP, 81), "--health-port".to_owned())].into(),
        external_ips: ExternalIps::All,
        ..Reserved::default()
    }
}

/// A service with the port `http` (80), created at this Unix time in seconds.
pub(crate) fn service(name: &str, created: i64, change: impl FnOnce(&mut Common)) -> Service {
    let last = name.bytes().last().unwrap_or_default();
    let mut common = Common {
        name: ServiceName::new("shop", name),
        kind: ServiceType::ClusterIp,
        created: Some(Timestamp::from_second(created).unwrap()),
        cluster_ips: vec![[10, 96, 0, last].into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        source_ranges: SourceRanges::default(),
        affinity: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        algorithm: None,
        forwarding: None,
        local_readiness: false,
    };
    change(&mut common);
    let common = Arc::new(common);
    Service {
        ports: vec![port(&common, "http", Protocol::TCP, 80, None)],
        common,
    }
}

pub(crate) fn port(
    service: &Arc<Common>,
    name: &str,
    protocol: Protocol,
    port: u16,
    node_port: Option<u16>,
) -> ServicePort {
    ServicePort {
        name: name.into(),
        protocol,
        port,
        node_port,
        service: service.clone(),
    }
}

/// Adds a node port to the port of a service.
pub(crate) fn at_node_port(mut service: Service, number: u16) -> Service {
    service.ports[0].node_port = Some(number);
    service
}

/// A slice of a service whose port `http` is 8080. For each endpoint: the last byte of the address, the conditions, and
/// the node.
pub(crate) fn slice(service: &str, endpoints: &[(u8, Conditions, &str)]) -> EndpointSlice {
    let endpoint = |&(last, conditions, node): &(u8, Conditions, &str)| SliceEndpoint {
        address: [10, 1, 0, last].into(),
        conditions,
        node: Some(node.into()),
        zone: None,
        hints: None,
    };
    EndpointSlice {
        name: SliceName::new("shop", service),
        service: ServiceName::new("shop", service),
        family: Family::V4,
        ports: vec![SlicePort {
            name: "http".into(),
            protocol: Protocol::TCP,
            port: 8080,
        }],
        endpoints: endpoints.iter().map(endpoint).collect(),
        weight: 1,
    }
}
