//! Faults of the host's part of an endpoint that was in order before.

use std::fmt;
use std::net::IpAddr;

use health_net::route::Route;

/// A difference from the intended state on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// The host's route to an address of the endpoint is missing or leads elsewhere.
    RouteLost(Route),
    /// The host's neighbour table lacks the endpoint's hardware address.
    NeighbourMissing(IpAddr),
}

impl DeviceFault {
    /// Returns a short constant name for counters.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::RouteLost(_) => "route-lost",
            Self::NeighbourMissing(_) => "neighbour-missing",
        }
    }
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RouteLost(route) => {
                write!(
                    f,
                    "the route to {} is missing or changed",
                    route.destination
                )
            }
            Self::NeighbourMissing(address) => {
                write!(f, "the neighbour entry of {address} is missing")
            }
        }
    }
}
