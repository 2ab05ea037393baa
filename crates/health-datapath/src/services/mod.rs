//! The service maps: frontends, and the backends behind them.
//!
//! [`ServiceTables`] gives each service port a number, which identifies its frontends, backends and source ranges. A
//! port changes as a whole: first its backends are written, then a pool in slots that no program reads, then each
//! frontend atomically. Old entries are freed last, and their slots are reused only when no program can still use
//! values that it read there.
//!
//! The tables take over a former agent's entries: a port with a known address keeps its number, and backends keep the
//! indexes that flows refer to.

mod alias;
mod change;
mod free;
mod keys;
mod listing;
mod lookup;
mod maps;
mod numbers;
mod plan;
mod pool;
mod ranges;
mod read;
mod recount;
mod shares;
mod snapshot;
mod sockets;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use health_common::service::{Frontend, SourceRange};
use ipnet::IpNet;

use crate::layout;
use crate::trie::Prefix;

pub use crate::maps::ServiceMapSizes;
pub use change::{Change, Written};
pub use listing::{ListedBackend, ListedFrontend};
pub(crate) use lookup::Tuples;
pub use lookup::{Connection, ServiceFlow};
pub use maps::ServiceMaps;
pub use pool::{FillMaglev, MaglevBackend};
pub use shares::SHARE;
pub use sockets::{SocketTable, StuckSocket};

use free::Arrays;
pub(crate) use keys::read_source_range;
use keys::{FrontendKey, Socket, socket, source_range};
use numbers::Numbers;
use pool::Range;
use shares::Shares;
use snapshot::Snapshot;

/// The desired entries of a service port, for one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSpec {
    /// Owner of the port: each owner has a share of the tables.
    pub owner: Arc<str>,
    /// IP protocol number.
    pub protocol: u8,
    /// Its frontends. If two have the same address, the first one wins.
    pub frontends: Vec<FrontendSpec>,
    /// The backends of [`Target::Cluster`], each once.
    pub cluster: Vec<BackendSpec>,
    /// The backends of [`Target::Local`], each once.
    pub local: Vec<BackendSpec>,
    /// Backends that get no new flows. Those already in the maps stay, so that their flows continue.
    pub lingering: Vec<SocketAddr>,
    /// The networks that may use frontends with
    /// [`FRONTEND_RESTRICTED`](health_common::service::FRONTEND_RESTRICTED).
    pub source_ranges: Vec<IpNet>,
    /// How long a client sticks to its backend after it last opened a flow, in seconds; 0 for no affinity.
    pub affinity_secs: u32,
    /// [`ALGORITHM_RANDOM`](health_common::service::ALGORITHM_RANDOM) or another.
    pub algorithm: u8,
}

/// A frontend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontendSpec {
    /// The address.
    pub address: SocketAddr,
    /// [`KIND_CLUSTER_IP`](health_common::service::KIND_CLUSTER_IP) or another.
    pub kind: u8,
    /// Any of [`FRONTEND_RESTRICTED`](health_common::service::FRONTEND_RESTRICTED),
    /// [`FRONTEND_KEEPS_SOURCE`](health_common::service::FRONTEND_KEEPS_SOURCE) and
    /// [`FRONTEND_DIRECT`](health_common::service::FRONTEND_DIRECT); the other bits are derived.
    pub flags: u16,
    /// Where new flows from this node and its endpoints go.
    pub inside: Target,
    /// Where all other new flows go.
    pub outside: Target,
}

/// Where new flows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// To a backend of [`PortSpec::cluster`]; if that is empty, like [`Target::Reject`].
    Cluster,
    /// To a backend of [`PortSpec::local`]; if that is empty, like [`Target::Reject`].
    Local,
    /// New flows are dropped silently.
    Drop,
    /// New flows are refused with an ICMP error.
    Reject,
}

/// A backend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its share of new flows, relative to the other backends in the list. At least 1.
    pub weight: u16,
}

/// Errors of the service tables.
#[derive(Debug, thiserror::Error)]
pub enum ServicesError {
    /// A map is full. The port keeps its former entries.
    #[error(
        "{map} has no room for {wanted} more entries: {used} of {size} are in use; longest free range: {longest}"
    )]
    Full {
        /// The map.
        map: &'static str,
        /// How many more entries are needed.
        wanted: u32,
        /// How many entries are in use, or retired but possibly still in use by programs.
        used: u32,
        /// The maximum number of entries.
        size: u32,
        /// The length of the longest free range.
        longest: u32,
    },
    /// The port's owner has used up its share of a map; the remaining space is reserved for other owners. The port
    /// keeps its former entries.
    #[error(
        "{map} has no room for {wanted} more entries of {owner}, which uses {used} of {size}; the last {free} are reserved for others"
    )]
    Share {
        /// The map.
        map: &'static str,
        /// The [owner](PortSpec::owner).
        owner: String,
        /// How many more entries are needed.
        wanted: u32,
        /// How many entries the owner has.
        used: u32,
        /// How many entries are free.
        free: u32,
        /// The maximum number of entries.
        size: u32,
    },
    /// A system call failed. Some changes may have been made; [`ServiceTables::read`] finds out which.
    #[error("cannot {what} {map}{of}: {source}")]
    Kernel {
        /// The attempted operation.
        what: &'static str,
        /// The map.
        map: &'static str,
        /// ` (WHICH ENTRY)`, or empty.
        of: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl ServicesError {
    /// The map that was too full; `None` for other errors.
    pub fn full_map(&self) -> Option<&'static str> {
        match self {
            Self::Full { map, .. } | Self::Share { map, .. } => Some(map),
            Self::Kernel { .. } => None,
        }
    }

    fn kernel(what: &'static str, map: &'static str, source: io::Error) -> Self {
        Self::Kernel {
            what,
            map,
            of: String::new(),
            source,
        }
    }
}

/// The service tables. They must have a single owner, because they remember what was written.
#[derive(Debug)]
pub struct ServiceTables {
    maps: ServiceMaps,
    /// Maximum numbers of frontends of each family, and of source ranges.
    sizes: Sizes,
    numbers: Numbers,
    /// The frontends in the maps.
    frontends: HashMap<FrontendKey, Frontend>,
    /// How many of them are IPv4, and how many IPv6.
    frontend_counts: [u32; 2],
    source_range_count: u32,
    /// By number.
    ports: HashMap<u32, Port>,
    /// Numbers of ports that were set.
    claimed: HashSet<u32>,
    /// Each owner's use of the tables.
    shares: Shares,
    arrays: Arrays,
    /// Indexes of duplicate backends.
    strays: Vec<u32>,
    /// The arrays as they were read, kept until all ports have been compared with them.
    snapshot: Option<Snapshot>,
    /// Whether these fields agree with the maps.
    is_current: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    frontends: [u32; 2],
    source_ranges: u32,
}

/// The entries of a port in the maps.
#[derive(Debug, Default)]
struct Port {
    /// Its frontends, and former ones that may belong to other ports now.
    frontends: Vec<FrontendKey>,
    /// Sorted.
    backends: Vec<Known>,
    ranges: Vec<Range>,
    /// Sorted.
    source_ranges: Vec<Prefix<SourceRange>>,
}

/// A backend in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Known {
    at: Socket,
    index: u32,
    /// Whether the backend gets no new flows.
    lingers: bool,
}

impl ServiceTables {
    /// Opens the tables and reads a former agent's entries. No other process may write to the maps from now on.
    pub fn open(maps: ServiceMaps) -> Result<Self, ServicesError> {
        let mut tables = Self {
            maps,
            sizes: Sizes::default(),
            numbers: Numbers::after(0),
            frontends: HashMap::new(),
            frontend_counts: [0; 2],
            source_range_count: 0,
            ports: HashMap::new(),
            claimed: HashSet::new(),
            shares: Shares::default(),
            arrays: Arrays::default(),
            strays: Vec::new(),
            snapshot: None,
            is_current: false,
        };
        tables.read()?;
        // Port numbers in entries whose port no longer exists.
        let named = tables.maps.numbers_of_flows();
        let named =
            named.map_err(|source| ServicesError::kernel("read", "the service maps", source))?;
        let last = named.iter().chain(tables.ports.keys()).max();
        tables.numbers = Numbers::after(last.copied().unwrap_or_default());
        Ok(tables)
    }

    /// Whether the tables agree with the maps, provided that only the owner writes to the maps. `false` after
    /// [`Change::commit`] has failed, until the next [`ServiceTables::read`].
    pub fn is_current(&self) -> bool {
        self.is_current
    }

    /// Starts a change of ports.
    ///
    /// `now_ns`: `CLOCK_MONOTONIC`, in nanoseconds.
    pub fn change(&mut self, now_ns: u64) -> Change<'_> {
        Change::new(self, now_ns)
    }

    /// Removes all ports, including those of former agents. Known flows stay; TCP flows continue until they end.
    ///
    /// `now_ns`: `CLOCK_MONOTONIC`, in nanoseconds.
    pub fn remove_all(&mut self, now_ns: u64) -> Result<Written, ServicesError> {
        if !self.is_current {
            self.read()?;
        }
        let mut change = self.change(now_ns);
        change.remove_others();
        change.commit()
    }

    /// Returns the addresses of a port, including those from before its last change.
    pub fn addresses(&self, number: u32) -> impl Iterator<Item = SocketAddr> {
        let port = self.ports.get(&number).into_iter();
        port.flat_map(|port| port.frontends.iter().map(FrontendKey::address))
    }

    /// The maps, for reading.
    pub fn maps(&self) -> &ServiceMaps {
        &self.maps
    }
}

fn family(key: &FrontendKey) -> usize {
    usize::from(!key.addr.is_v4())
}

fn frontend_map(family: usize) -> &'static str {
    [layout::SVC4.name, layout::SVC6.name][family]
}
