//! The prober: probes every address of every node, by ICMP and by HTTP, continuously.
//!
//! One task owns all state (`engine`). Its parts are independent of each other. `target` defines what to probe,
//! `schedule` when, within a budget, and `relief` when not to. `icmp` and `http` send the probes; `confirm`
//! distinguishes a lost probe from an outage. `results` keeps the results, with a `history` per target. `direction`
//! compares them with the reports of peers, which HTTP probes `exchange`; `diagnosis` interprets them; `accounts`
//! counts them in the datapath's rows; `learned` keeps the addresses that peers report. `path_mtu` finds path MTUs.
//! Other crates use a `handle`; `sweep` is a request to probe everything. [`hello`] is the answering side. With
//! [`proof`] both sides prove that they belong to the mesh.

#![forbid(unsafe_code)]

mod accounts;
mod confirm;
mod connect;
mod counters;
mod diagnosis;
mod direction;
mod engine;
pub mod exchange;
mod failure;
mod handle;
pub mod hello;
mod history;
mod http;
mod icmp;
mod learned;
pub mod mesh_key;
mod path_mtu;
pub mod proof;
mod relief;
mod results;
mod schedule;
mod sending;
mod sweep;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use counters::{HelloRequestCounts, HelloRequests, IgnoredReplyCounts};
pub use handle::{Mesh, MeshError, MeshHandle, MeshOptions, Tuning};
pub use learned::FILE as LEARNED_FILE;
