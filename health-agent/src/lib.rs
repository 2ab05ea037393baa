//! The daemon of health-agent. Its API, metrics, command line and CNI plugin are crates of their own, which the program
//! ties together.
//!
//! Data flows one way. Sources (flags, the node registry, the kernel) become state, and state goes to the datapath;
//! maps become results, and results go to the API and the command line.

#![forbid(unsafe_code)]

pub mod agent;
pub mod logging;
pub mod pidfile;
