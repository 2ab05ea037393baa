//! The agent's HTTP servers: the API on Unix sockets and over TLS, and the pages for monitoring, load balancers and
//! supervisors on TCP ports. Responses come from a [`source`], which the agent implements. This crate keeps no state of
//! the agent.

#![forbid(unsafe_code)]

mod answer;
mod audience;
mod body;
pub mod certificates;
mod endpoints;
pub mod liveness;
mod node_feed;
#[cfg(test)]
mod openapi;
mod pacing;
pub mod page_server;
mod path_id;
mod policies;
mod probes;
mod routes;
mod rtt;
mod serve;
pub mod server;
pub mod services;
mod slots;
pub mod socket;
pub mod source;
mod streamed;
