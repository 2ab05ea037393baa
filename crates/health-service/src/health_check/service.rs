//! The health of a service: whether this node has endpoints of the service.

use std::collections::BTreeMap;

use serde::Serialize;

use super::proxy::code;
use crate::spec::ServiceName;
use crate::state::{HealthCheck, HealthChecks};

/// The state reported by the health-check node ports of one family.
#[derive(Clone, Debug, Default)]
pub struct ServiceHealth {
    open: BTreeMap<ServiceName, HealthCheck>,
}

/// The listeners to close and to open. Close first, as another service may get the port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    /// The services whose listener must be closed, and its port.
    pub close: Vec<(ServiceName, u16)>,
    /// The services that need a new listener, and its port.
    pub open: Vec<(ServiceName, u16)>,
}

/// A response on a health-check node port, with the fields of its JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAnswer {
    /// The service.
    pub service: ServiceId,
    /// The number of distinct addresses of the service's ready endpoints on this node.
    pub local_endpoints: usize,
    /// Whether changes reach the kernel in time.
    pub service_proxy_healthy: bool,
}

/// The name of a service, with the fields of its JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServiceId {
    /// The service's namespace.
    pub namespace: String,
    /// The service's name.
    pub name: String,
}

impl ServiceAnswer {
    /// The header that carries [`ServiceAnswer::local_endpoints`]: `X-Load-Balancing-Endpoint-Weight`. Header names
    /// ignore case.
    pub const WEIGHT_HEADER: &str = "x-load-balancing-endpoint-weight";

    /// Returns the HTTP status: 200 or 503.
    pub const fn code(&self) -> u16 {
        code(self.local_endpoints > 0 && self.service_proxy_healthy)
    }
}

impl ServiceHealth {
    /// Takes over the health checks of the state. Returns the listeners to close and to open. A listener whose port
    /// changes is closed and reopened.
    pub fn sync(&mut self, checks: &HealthChecks) -> Listeners {
        let mut listeners = Listeners::default();
        self.open.retain(|service, known| {
            let is_kept = checks
                .get(service)
                .is_some_and(|check| check.port == known.port);
            if !is_kept {
                listeners.close.push((service.clone(), known.port));
            }
            is_kept
        });
        for (service, check) in checks {
            if self.open.insert(service.clone(), *check).is_none() {
                listeners.open.push((service.clone(), check.port));
            }
        }
        listeners
    }

    /// Records that a listener could not be opened. The next sync retries it.
    pub fn failed(&mut self, service: &ServiceName) {
        self.open.remove(service);
    }

    /// Returns the response to a request; `None` if the service no longer has a listener.
    pub fn answer(&self, service: &ServiceName, is_proxy_healthy: bool) -> Option<ServiceAnswer> {
        let check = self.open.get(service)?;
        Some(ServiceAnswer {
            service: ServiceId {
                namespace: service.namespace.to_string(),
                name: service.name.to_string(),
            },
            local_endpoints: check.local_endpoints,
            service_proxy_healthy: is_proxy_healthy,
        })
    }
}
