//! Addresses that this node uses itself.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

/// What an address of this node is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReservedFor {
    /// The way out of all endpoints.
    Gateway,
    /// An endpoint of this node, by its name.
    Endpoint(String),
}

impl fmt::Display for ReservedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gateway => f.write_str("the gateway of this node's endpoints"),
            Self::Endpoint(name) => write!(f, "the address of the endpoint {name} of this node"),
        }
    }
}

/// The addresses that no service may take from their users, and what they are for.
pub type ReservedAddresses = BTreeMap<IpAddr, ReservedFor>;
