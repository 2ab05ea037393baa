//! What services and their ports are told apart by.

use std::fmt;
use std::sync::Arc;

use health_model::ipam::Family;
use health_model::policy::Protocol;

/// A service, by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name in it.
    pub name: Arc<str>,
}

impl ServiceName {
    /// The service of this name.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Whether `wanted` means it: by its name, or by its namespace and name.
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

/// An endpoint slice, by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceName {
    /// Its namespace, which is that of its service.
    pub namespace: Arc<str>,
    /// Its name in it.
    pub name: Arc<str>,
}

impl SliceName {
    /// The slice of this name.
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

/// A port of a service, by its name: what endpoints and traffic are matched by. Shown as `NAMESPACE/NAME:PORT/PROTOCOL`,
/// without the colon for a port without a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    /// The service.
    pub service: ServiceName,
    /// The port's name; empty for the only port of a service.
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

/// A port of a service in one family: the two share nothing but their name.
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
