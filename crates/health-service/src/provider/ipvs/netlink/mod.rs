//! What the kernel is asked by netlink: IPVS by its generic family, ipset and nf_tables by nfnetlink.
//!
//! A connection is bound for life to the network namespace of the thread that opened it, and waits for the kernel's
//! answers: they are there at once.

mod attributes;
mod connection;
pub mod ipset;
pub mod nft;
pub mod server;

pub use connection::{NetlinkError, Refusal};
