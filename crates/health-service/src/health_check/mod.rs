//! Health checks for load balancers and supervisors (`pkg/proxy/healthcheck` of Kubernetes): the state behind its HTTP
//! servers, and their answers with the same field names.
//!
//! [`ProxyHealth`] tells whether changes reach the kernel in time (`/healthz`, `/livez`). [`ServiceHealth`] tells, on the
//! health-check node port of a service, whether this node has endpoints of it.

mod proxy;
mod service;
#[cfg(test)]
mod tests;

pub use proxy::{FamilyStatus, HealthAnswer, NodeStanding, ProxyHealth};
pub use service::{Listeners, ServiceAnswer, ServiceHealth, ServiceId};
