//! The test bed and the helpers that integration tests and benchmarks share: clusters of real agents on this machine,
//! crafted packets, snapshots of the machine to compare, and parsers for tool output.
//!
//! Without the `all` feature, this crate contains only what the `bed` program needs.

#[cfg(feature = "all")]
pub mod apiserver;
pub mod arguments;
#[cfg(feature = "all")]
pub mod attached;
pub mod bed;
#[cfg(feature = "all")]
pub mod bench;
pub mod conntrack;
pub mod containerd;
#[cfg(feature = "all")]
pub mod deploy;
#[cfg(feature = "all")]
pub mod frames;
#[cfg(feature = "all")]
pub mod fuzz;
#[cfg(feature = "all")]
pub mod hello;
#[cfg(feature = "all")]
pub mod hostile;
pub mod http;
pub mod image;
#[cfg(feature = "all")]
pub mod kubernetes;
#[cfg(feature = "all")]
pub mod liveness;
pub mod member;
#[cfg(feature = "all")]
pub mod namespace;
#[cfg(feature = "all")]
pub mod offload;
#[cfg(feature = "all")]
pub mod outside;
pub mod packet;
#[cfg(feature = "all")]
pub mod ping;
#[cfg(feature = "all")]
pub mod plugin;
#[cfg(feature = "all")]
pub mod podman;
#[cfg(feature = "all")]
pub mod policy;
pub mod probed;
pub mod process;
#[cfg(feature = "all")]
pub mod processes;
#[cfg(feature = "all")]
pub mod readme;
pub mod relay;
pub mod served;
#[cfg(feature = "all")]
pub mod snapshot;
#[cfg(feature = "all")]
pub mod testrun;
#[cfg(feature = "all")]
pub mod transfer;
#[cfg(feature = "all")]
pub mod tun;
#[cfg(feature = "all")]
pub mod upgrade;
#[cfg(feature = "all")]
pub mod verifier;
pub mod wait;
#[cfg(feature = "all")]
pub mod xdp;

pub use bed::{Bed, Node};
pub use member::Member;
#[cfg(feature = "all")]
pub use snapshot::Snapshot;
pub use wait::{PATIENCE, RaisedAtEnd, is_long, seed, slowness, wait_for};
