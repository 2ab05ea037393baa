//! The prober: every address of every node, by ICMP and by HTTP, all the time.
//!
//! One task owns all state (`engine`). The parts it is made of know nothing of each other:
//! `target` says what to probe, `schedule` when, `icmp` and `http` do it, `confirm` tells a lost
//! probe from an outage, `results` keeps what came out, `accounts` counts it in the datapath's rows, and `learned` keeps the addresses that
//! peers tell of themselves. [`hello`] is the side that answers.

mod accounts;
mod confirm;
#[cfg_attr(not(test), expect(dead_code, reason = "not wired into the engine yet"))]
mod diagnosis;
mod engine;
mod failure;
pub mod hello;
#[cfg_attr(not(test), expect(dead_code, reason = "not wired into the engine yet"))]
mod history;
mod http;
mod icmp;
mod learned;
mod results;
pub mod rtt_store;
mod schedule;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use engine::{Mesh, MeshError, MeshHandle, MeshOptions};
pub use learned::FILE as LEARNED_FILE;
