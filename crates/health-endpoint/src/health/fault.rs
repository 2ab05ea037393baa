//! Faults of a health endpoint that was in order before.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use health_net::mac::MacAddr;
use health_net::route::Route;
use health_net::sysctl::Setting;

use super::{DEVICE, INNER_DEVICE};

/// One end of the veth pair, and the namespace in which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The host's end.
    Outer,
    /// The endpoint's end.
    Inner,
}

impl End {
    /// Returns the device's name.
    pub const fn device(self) -> &'static str {
        match self {
            Self::Outer => DEVICE,
            Self::Inner => INNER_DEVICE,
        }
    }
}

/// A difference from the intended state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The host's end of the veth pair does not exist.
    VethGone,
    /// A different device now has the name of the host's end.
    VethReplaced,
    /// The namespace's file is missing, or refers to another namespace.
    NetnsGone(PathBuf),
    /// The endpoint's end of the veth pair does not exist.
    PeerGone,
    /// An end of the veth pair is down.
    Down(End),
    /// The loopback in the namespace is down.
    LoopbackDown,
    /// The hardware address of an end of the veth pair was changed.
    MacChanged {
        /// The end.
        end: End,
        /// The intended address.
        wanted: MacAddr,
    },
    /// The MTU of an end of the veth pair was changed.
    MtuChanged {
        /// The end.
        end: End,
        /// The intended MTU in bytes.
        wanted: u32,
    },
    /// The endpoint lacks its address.
    AddressMissing(IpAddr),
    /// The endpoint still has an address that it should no longer have.
    AddressOutdated(IpAddr),
    /// The host's neighbour table lacks the endpoint's hardware address.
    NeighbourMissing(IpAddr),
    /// A route is missing or leads elsewhere.
    RouteLost {
        /// The namespace.
        end: End,
        /// The intended route.
        wanted: Route,
    },
    /// A kernel setting of the host was changed.
    SettingChanged {
        /// The current value.
        value: String,
        /// The intended setting.
        wanted: Setting,
    },
}

impl Fault {
    /// Returns a short constant name for counters.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::VethGone => "veth-gone",
            Self::VethReplaced => "veth-replaced",
            Self::NetnsGone(_) => "netns-gone",
            Self::PeerGone => "peer-gone",
            Self::Down(End::Outer) => "veth-down",
            Self::Down(End::Inner) => "peer-down",
            Self::LoopbackDown => "loopback-down",
            Self::MacChanged { .. } => "mac-changed",
            Self::MtuChanged { .. } => "mtu-changed",
            Self::AddressMissing(_) => "address-missing",
            Self::AddressOutdated(_) => "address-outdated",
            Self::NeighbourMissing(_) => "neighbour-missing",
            Self::RouteLost { .. } => "route-lost",
            Self::SettingChanged { .. } => "sysctl-changed",
        }
    }

    fn describe(&self, verb: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VethGone => write!(f, "veth {DEVICE} {verb} gone"),
            Self::VethReplaced => write!(f, "veth {DEVICE} {verb} replaced by another device"),
            Self::NetnsGone(path) => write!(f, "network namespace {} {verb} gone", path.display()),
            Self::PeerGone => write!(f, "veth {INNER_DEVICE} {verb} gone from the namespace"),
            Self::Down(end) => write!(f, "veth {} {verb} down", end.device()),
            Self::LoopbackDown => write!(f, "loopback in the namespace {verb} down"),
            Self::MacChanged { end, wanted } => {
                let device = end.device();
                write!(f, "hardware address of {device} {verb} not {wanted}")
            }
            Self::MtuChanged { end, wanted } => {
                write!(f, "MTU of {} {verb} not {wanted}", end.device())
            }
            Self::AddressMissing(address) => {
                write!(f, "address {address} {verb} missing on {INNER_DEVICE}")
            }
            Self::AddressOutdated(address) => {
                write!(f, "address {address} {verb} no longer this endpoint's")
            }
            Self::NeighbourMissing(address) => {
                write!(f, "neighbour entry of {address} {verb} missing on {DEVICE}")
            }
            Self::RouteLost { end, wanted } => {
                let (destination, device) = (wanted.destination, end.device());
                write!(
                    f,
                    "route {destination} dev {device} {verb} missing or changed"
                )
            }
            Self::SettingChanged { value, wanted } => {
                let Setting { key, value: want } = wanted;
                write!(f, "/proc/sys/net/{key} {verb} {value} instead of {want}")
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe("is", f)
    }
}

/// A fault that was repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair(pub Fault);

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("was", f)
    }
}
