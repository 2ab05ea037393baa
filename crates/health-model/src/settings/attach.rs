//! The requested attach mode.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How programs are attached to their devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMode {
    /// TCX on the node's devices and clsact on endpoint devices, where it is faster to attach; if the kernel has only
    /// one of them, that one
    #[default]
    Auto,
    /// TCX links
    Tcx,
    /// Filters of clsact qdiscs
    Clsact,
}

impl fmt::Display for AttachMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}
