//! Policy terms shared by settings, requests and rules: when policy is enforced, and a packet's direction, protocol and
//! port.

mod l4;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::l4::{L4, ParseL4Error, Protocol};

/// When policy is enforced.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    clap::ValueEnum,
)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PolicyMode {
    /// For the directions of an endpoint that a rule selects
    #[default]
    Default,
    /// For both directions of every endpoint
    Always,
    /// Only for endpoints whose labels are not known yet, if a rule selects them
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

/// Where a policy comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PolicyOrigin {
    /// Somebody imported it into this agent.
    Imported,
    /// It is an object of the Kubernetes cluster.
    Kubernetes,
}

impl fmt::Display for PolicyOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Imported => "imported",
            Self::Kubernetes => "kubernetes",
        })
    }
}

/// Direction of a packet, seen from the endpoint that the policy applies to.
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
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// To the endpoint.
    Ingress,
    /// From the endpoint.
    Egress,
}

impl Direction {
    /// Both directions.
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
