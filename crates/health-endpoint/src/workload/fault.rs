//! What can be wrong with the devices of an endpoint that once were in order.

use std::fmt;
use std::net::IpAddr;

use health_net::mac::MacAddr;
use health_net::route::Route;

/// Something that is not as it shall be. Where no end is named, it is the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// The host's route to an address of the endpoint is missing, or leads elsewhere.
    RouteLost(Route),
    /// The host lacks the entry with the endpoint's hardware address.
    NeighbourMissing(IpAddr),
    /// The inner end is down.
    InnerDown,
    /// The inner end has another hardware address.
    InnerMacChanged(MacAddr),
    /// The inner end lacks an address.
    AddressMissing(IpAddr),
    /// A route in the endpoint's namespace is missing, or leads elsewhere.
    InnerRouteLost(Route),
}

impl DeviceFault {
    /// A short fixed word, to count by.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::RouteLost(_) | Self::InnerRouteLost(_) => "route-lost",
            Self::NeighbourMissing(_) => "neighbour-missing",
            Self::InnerDown => "peer-down",
            Self::InnerMacChanged(_) => "mac-changed",
            Self::AddressMissing(_) => "address-missing",
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
            Self::InnerDown => f.write_str("the device in its namespace is down"),
            Self::InnerMacChanged(wanted) => write!(
                f,
                "the hardware address of the device in its namespace is not {wanted}"
            ),
            Self::AddressMissing(address) => {
                write!(f, "address {address} is missing in its namespace")
            }
            Self::InnerRouteLost(route) => write!(
                f,
                "the route to {} is missing or changed in its namespace",
                route.destination
            ),
        }
    }
}
