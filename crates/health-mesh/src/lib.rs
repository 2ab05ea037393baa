//! The prober: every address of every node, by ICMP and by HTTP, all the time.
//!
//! One task owns all state (`engine`). The parts it is made of know nothing of each other:
//! `target` says what to probe, `schedule` when, within a `budget`, `relief` when not; `icmp` and `http` do it, `confirm`
//! tells a lost probe from an outage, `results` keeps what came out, with a `history` of each target,
//! `direction` compares it with what peers tell of their side, `exchange`d with HTTP probes,
//! `diagnosis` says what it means, `accounts` counts it in the datapath's rows, and `learned` keeps the
//! addresses that peers tell of themselves. `path_mtu` finds the MTU of paths. A `handle` is what others hold of it; `sweep` is a request
//! to probe everything. [`hello`] is the side that answers.

#![forbid(unsafe_code)]

mod accounts;
mod budget;
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
mod path_mtu;
pub mod probe_key;
mod relief;
mod results;
mod schedule;
mod sweep;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use counters::{IgnoredReplyCounts, MalformedHeaderCounts};
pub use handle::{Mesh, MeshError, MeshHandle, MeshOptions};
pub use learned::FILE as LEARNED_FILE;
