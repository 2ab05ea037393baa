//! The daemon of health-agent and its command line.
//!
//! Data flows one way. Sources (flags, the node registry, the kernel) become state, and state goes to the datapath;
//! maps become results, and results go to the API and the command line.

#![forbid(unsafe_code)]

pub mod agent;
pub mod api;
mod causes;
pub mod cli;
pub mod cni;
pub mod deletions;
mod frontend_names;
pub mod logging;
pub mod metrics;
pub mod pidfile;
mod task;
