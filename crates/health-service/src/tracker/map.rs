//! All ports of all services, and their endpoints.

use std::sync::Arc;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use imbl::OrdMap;

use crate::spec::{Endpoint, PortKey, ServiceName, ServicePort, ServicePortName};

/// All ports of all services, by name. A clone shares everything with the original.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServicePortMap(OrdMap<ServicePortName, ServicePort>);

impl ServicePortMap {
    /// Returns the port with this name.
    pub fn get(&self, name: &ServicePortName) -> Option<&ServicePort> {
        self.0.get(name)
    }

    /// Returns the ports of a service.
    pub fn of_service<'a>(
        &'a self,
        service: &'a ServiceName,
    ) -> impl Iterator<Item = (&'a ServicePortName, &'a ServicePort)> {
        let ports = self.0.range(first_of(service)..);
        ports.take_while(move |(name, _)| name.service == *service)
    }

    /// Returns all ports.
    pub fn iter(&self) -> impl Iterator<Item = (&ServicePortName, &ServicePort)> {
        self.0.iter()
    }

    /// Returns the number of ports.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no ports.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn insert(&mut self, name: ServicePortName, port: ServicePort) {
        self.0.insert(name, port);
    }

    pub(super) fn remove(&mut self, name: &ServicePortName) {
        self.0.remove(name);
    }
}

/// The endpoints of all ports, by port and family. Each list is sorted by address as a string, and contains no address
/// twice. A clone shares everything with the original.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointsMap(OrdMap<PortKey, Arc<[Endpoint]>>);

impl EndpointsMap {
    /// Returns the endpoints of a port; empty if it has none.
    pub fn get(&self, key: &PortKey) -> &[Endpoint] {
        self.0.get(key).map(|list| &**list).unwrap_or_default()
    }

    /// Returns the endpoints of a service, by port and family.
    pub fn of_service<'a>(
        &'a self,
        service: &'a ServiceName,
    ) -> impl Iterator<Item = (&'a PortKey, &'a [Endpoint])> {
        let first = PortKey {
            name: first_of(service),
            family: Family::V4,
        };
        let ports = self.0.range(first..).map(|(key, list)| (key, &**list));
        ports.take_while(move |(key, _)| key.name.service == *service)
    }

    /// Returns the endpoints of all ports.
    pub fn iter(&self) -> impl Iterator<Item = (&PortKey, &[Endpoint])> {
        self.0.iter().map(|(key, list)| (key, &**list))
    }

    pub(super) fn insert(&mut self, key: PortKey, endpoints: Vec<Endpoint>) {
        self.0.insert(key, endpoints.into());
    }

    pub(super) fn remove(&mut self, key: &PortKey) -> Option<Arc<[Endpoint]>> {
        self.0.remove(key)
    }
}

/// Returns the name that sorts before all ports of a service.
fn first_of(service: &ServiceName) -> ServicePortName {
    ServicePortName {
        service: service.clone(),
        port: Arc::default(),
        protocol: Protocol(0),
    }
}
