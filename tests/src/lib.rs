//! The test bed and the helpers that integration tests and benchmarks share: clusters of real agents on this machine,
//! crafted packets, snapshots of the machine to compare, and parsers for tool output.

pub mod apiserver;
pub mod arguments;
pub mod attached;
pub mod bed;
pub mod bench;
pub mod conntrack;
pub mod containerd;
pub mod frames;
pub mod fuzz;
pub mod hello;
pub mod hostile;
pub mod http;
pub mod liveness;
pub mod member;
pub mod offload;
pub mod outside;
pub mod packet;
pub mod ping;
pub mod plugin;
pub mod podman;
pub mod policy;
pub mod probed;
pub mod process;
pub mod processes;
pub mod readme;
pub mod relay;
pub mod served;
pub mod snapshot;
pub mod testrun;
pub mod transfer;
pub mod tun;
pub mod upgrade;
pub mod verifier;
pub mod wait;
pub mod xdp;

pub use bed::{Bed, Node};
pub use member::Member;
pub use snapshot::Snapshot;
pub use wait::{PATIENCE, RaisedAtEnd, is_long, seed, slowness, wait_for};
