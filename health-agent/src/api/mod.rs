//! The agent's HTTP API on a Unix socket.

mod answer;
pub mod client;
mod endpoints;
pub mod liveness;
pub mod monitor;
mod node_feed;
mod places;
mod policies;
mod probes;
pub mod rtt;
pub mod rtt_summary;
mod serve;
pub mod server;
pub mod services;
pub mod socket;
pub mod source;
mod streamed;
