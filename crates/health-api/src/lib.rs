//! What both sides of the agent's API share: the client for its Unix socket, and how round-trip times and numbers of
//! the datapath are shown, by the API and by commands that read the maps themselves. The other types of the API are in
//! `health_model::api`; the server is in `health-server`.

#![forbid(unsafe_code)]

pub mod client;
pub mod frontend_names;
pub mod rtt;
pub mod rtt_summary;
