//! Virtual servers and real servers.

use std::fmt;
use std::net::SocketAddr;

use health_model::ipam::Family;
use health_model::policy::Protocol;

/// The destination that a virtual server handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerKey {
    /// The address and port.
    pub address: SocketAddr,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
}

impl fmt::Display for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.protocol)
    }
}

/// Which packets a virtual server gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServerId {
    /// Packets to an address.
    Address(ServerKey),
    /// Packets of a family with this mark.
    Mark(Family, u32),
}

impl ServerId {
    /// Returns the family of the packets.
    pub fn family(&self) -> Family {
        match self {
            Self::Address(key) => Family::of(key.address.ip()),
            Self::Mark(family, _) => *family,
        }
    }
}

impl From<ServerKey> for ServerId {
    fn from(key: ServerKey) -> Self {
        Self::Address(key)
    }
}

/// How a virtual server chooses a real server for a new connection: one of the kernel's `ip_vs_*` modules.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// Round robin.
    RoundRobin,
    /// Round robin by weight.
    WeightedRoundRobin,
    /// The server with the fewest connections.
    LeastConnection,
    /// The server with the fewest connections relative to its weight.
    WeightedLeastConnection,
    /// The server with the highest weight.
    WeightedFailover,
    /// The server with the highest weight that has fewer active connections than its weight.
    WeightedOverflow,
    /// By destination: a destination without a server, or with an overloaded one, gets the server with the fewest
    /// connections.
    LocalityLeastConnection,
    /// Like [`Self::LocalityLeastConnection`], with a set of servers for each destination.
    LocalityLeastConnectionReplicated,
    /// By a hash of the destination.
    DestinationHash,
    /// By a hash of the source.
    SourceHash,
    /// By a Maglev table: few connections move when real servers change.
    Maglev,
    /// The server with the shortest expected delay.
    ShortestExpectedDelay,
    /// An idle server or, if there is none, the one with the shortest expected delay.
    NeverQueue,
    /// The less loaded of two servers picked at random by weight.
    PowerOfTwo,
    /// A scheduler from another module.
    Other(Box<str>),
}

impl Scheduler {
    /// The schedulers that we know, with their names in the kernel.
    pub const KNOWN: [(Self, &str); 14] = [
        (Self::RoundRobin, "rr"),
        (Self::WeightedRoundRobin, "wrr"),
        (Self::LeastConnection, "lc"),
        (Self::WeightedLeastConnection, "wlc"),
        (Self::WeightedFailover, "fo"),
        (Self::WeightedOverflow, "ovf"),
        (Self::LocalityLeastConnection, "lblc"),
        (Self::LocalityLeastConnectionReplicated, "lblcr"),
        (Self::DestinationHash, "dh"),
        (Self::SourceHash, "sh"),
        (Self::Maglev, "mh"),
        (Self::ShortestExpectedDelay, "sed"),
        (Self::NeverQueue, "nq"),
        (Self::PowerOfTwo, "twos"),
    ];

    /// Returns the scheduler's name in the kernel.
    pub fn name(&self) -> &str {
        match self {
            Self::Other(name) => name,
            known => {
                let mut all = Self::KNOWN.iter();
                all.find(|(one, _)| one == known)
                    .map_or("", |(_, name)| name)
            }
        }
    }

    /// Returns the scheduler that does the same with weights.
    #[must_use]
    pub fn weighted(&self) -> Self {
        match self {
            Self::RoundRobin => Self::WeightedRoundRobin,
            Self::LeastConnection => Self::WeightedLeastConnection,
            other => other.clone(),
        }
    }
}

impl From<&str> for Scheduler {
    fn from(name: &str) -> Self {
        let mut known = Self::KNOWN.into_iter();
        let found = known.find(|(_, known)| *known == name);
        found.map_or_else(|| Self::Other(name.into()), |(scheduler, _)| scheduler)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Flags of a virtual server (`IP_VS_SVC_F_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u32);

impl Flags {
    /// A client stays with its real server until the timeout.
    pub(crate) const PERSISTENT: Self = Self(0x1);
    /// The server is in the kernel's tables; the kernel sets this itself.
    pub(crate) const HASHED: Self = Self(0x2);
    /// The second of three flags whose meaning depends on the scheduler: `sh` and `mh` then include the source port.
    pub(crate) const SCHEDULER_2: Self = Self(0x10);

    /// Returns the flags without those that the kernel sets itself.
    #[must_use]
    pub const fn asked(self) -> Self {
        Self(self.0 & !Self::HASHED.0)
    }
}

impl std::ops::BitOr for Flags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A virtual server, whose connections real servers handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualServer {
    /// The packets that the server gets.
    pub id: ServerId,
    /// The server's scheduler.
    pub scheduler: Scheduler,
    /// The server's flags.
    pub flags: Flags,
    /// If the server is persistent, how long a client stays with its real server after its last packet, in seconds.
    pub timeout: u32,
}

/// How packets reach a real server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forwarding {
    /// The destination of packets is rewritten.
    Masquerade,
    /// The server is this node itself.
    Local,
    /// Packets go through a tunnel.
    Tunnel,
    /// Packets go unchanged to the server's hardware address.
    Direct,
    /// Packets go past the cache.
    Bypass,
    /// A method that this version does not know.
    Other(u32),
}

impl From<u32> for Forwarding {
    fn from(number: u32) -> Self {
        // `IP_VS_CONN_F_FWD_MASK`; the other bits belong to connections.
        match number & 7 {
            0 => Self::Masquerade,
            1 => Self::Local,
            2 => Self::Tunnel,
            3 => Self::Direct,
            4 => Self::Bypass,
            other => Self::Other(other),
        }
    }
}

impl From<Forwarding> for u32 {
    fn from(forwarding: Forwarding) -> Self {
        match forwarding {
            Forwarding::Masquerade => 0,
            Forwarding::Local => 1,
            Forwarding::Tunnel => 2,
            Forwarding::Direct => 3,
            Forwarding::Bypass => 4,
            Forwarding::Other(number) => number,
        }
    }
}

/// A real server of a virtual server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealServer {
    /// The address and port on which the server listens.
    pub address: SocketAddr,
    /// How packets reach the server.
    pub forwarding: Forwarding,
    /// The server's share of new connections; 0 for none.
    pub weight: u32,
    /// The number of connections at which the server gets no new ones; 0 for no limit.
    pub upper_threshold: u32,
    /// Once limited, the server gets new connections again when it has fewer than this.
    pub lower_threshold: u32,
    /// Number of established connections.
    pub active: u32,
    /// Number of connections that are not or no longer established.
    pub inactive: u32,
    /// Number of persistent clients.
    pub persistent: u32,
}

impl RealServer {
    /// Creates a masqueraded server without limits.
    pub fn new(address: SocketAddr, weight: u32) -> Self {
        Self {
            address,
            forwarding: Forwarding::Masquerade,
            weight,
            upper_threshold: 0,
            lower_threshold: 0,
            active: 0,
            inactive: 0,
            persistent: 0,
        }
    }
}

/// Information about the kernel's IPVS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// The IPVS version: major, minor, patch.
    pub version: (u8, u8, u8),
    /// Number of rows in the connection table.
    pub table_size: u32,
}

/// How long the kernel keeps idle connections, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP connections.
    pub tcp: u32,
    /// TCP connections after a FIN.
    pub tcp_fin: u32,
    /// UDP flows.
    pub udp: u32,
}
