//! The words that settings, requests and rules of policy share: when it is enforced, which way a packet goes, and
//! its protocol and port.

mod l4;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::l4::{L4, ParseL4Error, Protocol};

/// When policy is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyMode {
    /// For the directions of an endpoint that a rule selects
    #[default]
    Default,
    /// For both directions of every endpoint
    Always,
    /// For no endpoint but those that a rule selects while their labels are not known yet
    Never,
}

impl fmt::Display for PolicyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Always => "always",
            Self::Never => "never",
        })
    }
}

/// Which way a packet goes, seen from the endpoint that policy holds for.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// To the endpoint.
    Ingress,
    /// From the endpoint.
    Egress,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}
