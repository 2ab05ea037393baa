//! Code shared by both sides of the agent's API: the client, and the formatting of round-trip times
//! and datapath numbers, for the API and for commands that read the maps themselves. The other types of the API are in
//! `health_model::api`; the server is in `health-server`.

#![forbid(unsafe_code)]

pub mod client;
pub mod frontend_names;
pub mod rtt;
pub mod rtt_summary;
