//! What has changed since the kernel was last told: the change trackers of kube-proxy
//! (`pkg/proxy/servicechangetracker.go`, `endpointschangetracker.go`, `endpointslicecache.go`).
//!
//! Sources tell a tracker of each object that they see. A sync takes what has come together since the last one and
//! merges it into the maps of all ports, in time proportional to the services that changed.

mod endpoints;
mod map;
mod service;
#[cfg(test)]
mod tests;

pub use endpoints::{EndpointsChangeTracker, EndpointsUpdates};
pub use map::{EndpointsMap, ServicePortMap};
pub use service::{ServiceChangeTracker, ServiceUpdates};
