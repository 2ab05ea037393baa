//! The requested forwarding mode for services.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How packets from external clients reach backends on other nodes, and how the answers return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceForwarding {
    /// From this node's address, and answers return through this node
    #[default]
    Snat,
    /// From the client's address, and the backend's node answers the client directly
    Dsr,
    /// TCP as with `dsr`, and UDP as with `snat`
    Hybrid,
}

impl ServiceForwarding {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Snat, Self::Dsr, Self::Hybrid];
    /// Their names, in the same order.
    pub const NAMES: [&str; 3] = ["snat", "dsr", "hybrid"];

    /// Its name in flags, annotations and listings.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl fmt::Display for ServiceForwarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
