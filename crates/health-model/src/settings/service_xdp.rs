//! The requested XDP mode for service packets.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What forwards packets between external clients and backends on other nodes, besides the tc programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceXdp {
    /// No XDP program
    #[default]
    Off,
    /// An XDP program in the drivers of the uplinks
    Native,
    /// An XDP program in the host's network stack: slower, but needs no driver support
    Generic,
}

impl fmt::Display for ServiceXdp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}
