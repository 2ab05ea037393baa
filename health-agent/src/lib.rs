//! The daemon of health-agent. Its API, metrics, command line and CNI plugin are separate crates, which the program
//! ties together.
//!
//! Data flows one way: sources (flags, the node registry, the kernel) determine the state, which goes to the datapath;
//! the maps yield results, which go to the API and the command line.

#![forbid(unsafe_code)]

pub mod agent;
pub mod logging;
pub mod pidfile;
