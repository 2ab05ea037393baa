//! Endpoints of this node, and the routes that lead to other nodes' endpoints.

pub mod health;
pub mod lifecycle;
pub mod log;
pub mod peer_routes;
pub mod queue;
pub mod workload;
