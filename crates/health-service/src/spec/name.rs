//! Names of services, endpoint slices and ports.

use std::fmt;
use std::sync::Arc;

use health_model::ipam::Family;
use health_model::policy::Protocol;

/// The name of a service, with its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    /// The service's namespace.
    pub namespace: Arc<str>,
    /// The service's name within the namespace.
    pub name: Arc<str>,
}

impl ServiceName {
    /// Creates the name of a service in a namespace.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Whether `wanted` matches this name, given as the name alone or as namespace and name.
    pub fn is_named(&self, wanted: &str) -> bool {
        match wanted.split_once('/') {
            Some((namespace, name)) => *self.namespace == *namespace && *self.name == *name,
            None => *self.name == *wanted,
        }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The name of an endpoint slice, with its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceName {
    /// The slice's namespace, which is also the service's.
    pub namespace: Arc<str>,
    /// The slice's name within the namespace.
    pub name: Arc<str>,
}

impl SliceName {
    /// Creates the name of a slice in a namespace.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for SliceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The name of a service's port, which identifies the port in endpoint slices. Displayed as
/// `NAMESPACE/NAME:PORT/PROTOCOL`, or as `NAMESPACE/NAME/PROTOCOL` if the port has no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    /// The service.
    pub service: ServiceName,
    /// The port's name; empty if it is the service's only port.
    pub port: Arc<str>,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = if self.port.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{}/{}", self.service, self.port, self.protocol)
    }
}

/// A port of a service in one family. The two families of a port share nothing but the name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortKey {
    /// The port.
    pub name: ServicePortName,
    /// The family.
    pub family: Family,
}

impl fmt::Display for PortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.family.name())
    }
}
