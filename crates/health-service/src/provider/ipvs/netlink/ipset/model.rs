//! Sets and their entries.

use std::fmt;
use std::net::IpAddr;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use ipnet::IpNet;

/// What a set has for entries.
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
    /// The kernel's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HashIp => "hash:ip",
            Self::HashIpPort => "hash:ip,port",
            Self::HashIpPortIp => "hash:ip,port,ip",
            Self::HashIpPortNet => "hash:ip,port,net",
            Self::BitmapPort => "bitmap:port",
        }
    }

    /// Of how many parts an entry consists.
    pub const fn dimensions(self) -> u8 {
        match self {
            Self::HashIp | Self::BitmapPort => 1,
            Self::HashIpPort => 2,
            Self::HashIpPortIp | Self::HashIpPortNet => 3,
        }
    }

    /// A revision that kernels have since 3.18, and all versions of the tool `ipset` in use can list.
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
    /// At most 31 bytes.
    pub name: String,
    /// What its entries are.
    pub kind: SetType,
    /// Of the addresses of its entries.
    pub family: Family,
    /// How many entries it can have; ports do not count.
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
    /// An address with a port, and a network, which is not of prefix 0: the kernel has none.
    IpPortNet(IpAddr, Protocol, u16, IpNet),
}

impl fmt::Display for Entry {
    /// As the tool `ipset` writes it.
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
