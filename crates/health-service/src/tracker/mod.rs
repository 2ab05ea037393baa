//! Changes since the last sync: the change trackers of kube-proxy (`pkg/proxy/servicechangetracker.go`,
//! `endpointschangetracker.go`, `endpointslicecache.go`).
//!
//! Sources report each object to a tracker. A sync takes the changes since the last sync and merges them into the maps
//! of all ports, in time proportional to the number of changed services.

mod endpoints;
mod map;
mod service;
#[cfg(test)]
mod tests;

pub use endpoints::{EndpointsChangeTracker, EndpointsUpdates};
pub use map::{EndpointsMap, ServicePortMap};
pub use service::{ServiceChangeTracker, ServiceUpdates};
