//! The agent's HTTP API on a unix socket.

pub mod client;
pub mod liveness;
pub mod monitor;
pub mod server;
pub mod types;
