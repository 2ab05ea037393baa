//! Sets and their entries.

use std::fmt;
use std::net::IpAddr;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use ipnet::IpNet;

/// The type of a set's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetType {
    /// Addresses.
    HashIp,
    /// Addresses with a port.
    HashIpPort,
    /// Addresses with a port, and a second address.
    HashIpPortIp,
    /// Addresses with a port, and a network.
    HashIpPortNet,
    /// Ports, of any protocol and family.
    BitmapPort,
}

impl SetType {
    /// Returns the kernel's name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HashIp => "hash:ip",
            Self::HashIpPort => "hash:ip,port",
            Self::HashIpPortIp => "hash:ip,port,ip",
            Self::HashIpPortNet => "hash:ip,port,net",
            Self::BitmapPort => "bitmap:port",
        }
    }

    /// Returns the number of parts in an entry.
    pub(crate) const fn dimensions(self) -> u8 {
        match self {
            Self::HashIp | Self::BitmapPort => 1,
            Self::HashIpPort => 2,
            Self::HashIpPortIp | Self::HashIpPortNet => 3,
        }
    }

    /// Returns a revision that kernels have supported since 3.18, and that all `ipset` tool versions in use can list.
    pub(super) const fn revision(self) -> u8 {
        match self {
            Self::BitmapPort => 3,
            Self::HashIp => 4,
            Self::HashIpPort | Self::HashIpPortIp => 5,
            Self::HashIpPortNet => 7,
        }
    }
}

/// A set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSpec {
    /// The set's name, at most 31 bytes.
    pub name: String,
    /// The type of the set's entries.
    pub kind: SetType,
    /// The address family of the set's entries.
    pub family: Family,
    /// Maximum number of entries; ignored for ports.
    pub max_entries: u32,
}

/// An entry of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// An address.
    Ip(IpAddr),
    /// A port.
    Port(u16),
    /// An address with a port.
    IpPort(IpAddr, Protocol, u16),
    /// An address with a port, and a second address.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// An address with a port, and a network. The prefix length is never 0, which the kernel does not support.
    IpPortNet(IpAddr, Protocol, u16, IpNet),
}

impl fmt::Display for Entry {
    /// Formats the entry like the `ipset` tool.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |protocol: &Protocol| protocol.to_string().to_lowercase();
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Port(port) => port.fmt(f),
            Self::IpPort(ip, protocol, port) => write!(f, "{ip},{}:{port}", name(protocol)),
            Self::IpPortIp(ip, protocol, port, second) => {
                write!(f, "{ip},{}:{port},{second}", name(protocol))
            }
            Self::IpPortNet(ip, protocol, port, net) => {
                write!(f, "{ip},{}:{port},", name(protocol))?;
                if net.prefix_len() == net.max_prefix_len() {
                    net.addr().fmt(f)
                } else {
                    net.fmt(f)
                }
            }
        }
    }
}
