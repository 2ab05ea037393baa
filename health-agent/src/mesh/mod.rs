//! The prober: every address of every node, by ICMP and by HTTP, all the time.

pub mod rtt_store;
