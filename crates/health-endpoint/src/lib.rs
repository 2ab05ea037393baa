//! This node's endpoints, and the routes to other nodes' endpoints.

#![forbid(unsafe_code)]

pub mod enforcement;
pub mod error;
pub mod health;
pub mod identities;
pub mod lifecycle;
pub mod log;
pub mod manager;
mod outer;
pub mod peer_routes;
pub mod pod_routes;
pub mod queue;
pub mod regenerate;
mod stack;
pub mod workload;
