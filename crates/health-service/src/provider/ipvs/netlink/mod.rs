//! Netlink requests: to IPVS through its generic netlink family, and to ipset, nf_tables and conntrack through
//! nfnetlink.
//!
//! A connection always works in the network namespace of the thread that opened it. Its functions block until the
//! kernel replies, which it does at once.

mod attributes;
mod connection;
pub mod conntrack;
pub mod ipset;
pub mod nft;
pub mod server;

pub use connection::{NetlinkError, Refusal};
