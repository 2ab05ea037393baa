//! The agent's HTTP API on a unix socket.

pub mod client;
pub mod server;
pub mod types;
