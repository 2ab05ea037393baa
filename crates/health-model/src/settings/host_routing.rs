//! The requested host routing mode.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How packets from endpoints, and packets for services from outside, reach endpoints of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostRouting {
    /// Through the host's network stack
    Kernel,
    /// By the agent's programs, bypassing the host's network stack and its netfilter rules
    #[default]
    Ebpf,
}

impl fmt::Display for HostRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Ebpf => "ebpf",
        })
    }
}
