//! Endpoints of this node, and the routes that lead to other nodes' endpoints.

pub mod health;
pub mod peer_routes;
