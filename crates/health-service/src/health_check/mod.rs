//! What load balancers and supervisors are told (`pkg/proxy/healthcheck` of Kubernetes): the state and the answers of
//! its HTTP servers, with their field names.
//!
//! [`ProxyHealth`] says whether changes reach the kernel in time (`/healthz`, `/livez`); [`ServiceHealth`] says on the
//! health-check node port of a service whether this node has endpoints of it.

mod proxy;
mod service;
#[cfg(test)]
mod tests;

pub use proxy::{FamilyStatus, HealthAnswer, NodeStanding, ProxyHealth};
pub use service::{Listeners, ServiceAnswer, ServiceHealth, ServiceId};
