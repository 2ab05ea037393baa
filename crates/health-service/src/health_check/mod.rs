//! Health checks for load balancers and supervisors (`pkg/proxy/healthcheck` of Kubernetes): the state behind their
//! HTTP servers, and the responses, with the same field names.
//!
//! [`ProxyHealth`] reports whether changes reach the kernel in time (`/healthz`, `/livez`). [`ServiceHealth`] reports,
//! on the health-check node port of a service, whether this node has endpoints of that service.

mod proxy;
mod service;
#[cfg(test)]
mod tests;

pub use proxy::{FamilyStatus, HealthAnswer, NodeStanding, ProxyHealth};
pub use service::{Listeners, ServiceAnswer, ServiceHealth, ServiceId};
