//! What the programs know of services: frontends, and the backends that they lead to.
//!
//! [`ServiceTables`] has for each port of a service a number, by which its frontends, backends and source ranges are
//! told from others'. A port is changed as a whole: backends first, then the pool of their slots, in places that no
//! program reads, then the frontends, each at once; and what was left then is freed. It is used again only when no program
//! can hold what it read there before.
//!
//! What a former agent left is taken over: ports that are reached where they were keep their numbers, and backends their
//! indexes, by which flows know them.

mod alias;
mod change;
mod free;
mod listing;
mod maps;
mod numbers;
mod place;
mod pool;
mod ranges;
mod read;
mod sockets;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;

use health_common::service::{Frontend, SourceRange};
use ipnet::IpNet;

use super::layout;
use super::trie::Prefix;

pub use change::{Change, Written};
pub use listing::{ListedBackend, ListedFrontend};
pub use maps::{ServiceMapSizes, ServiceMaps};
pub use pool::{FillMaglev, MaglevBackend};
pub use sockets::{SocketTable, StuckSocket};

use free::Arrays;
use numbers::Numbers;
pub(crate) use place::read_source_range;
use place::{Place, Socket, socket, source_range};
use pool::Range;

/// What a port of a service is to have, in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSpec {
    /// IP protocol number.
    pub protocol: u8,
    /// Where it is reached. Of two at one address the first counts.
    pub frontends: Vec<FrontendSpec>,
    /// The backends of [`Target::Cluster`], each once.
    pub cluster: Vec<BackendSpec>,
    /// The backends of [`Target::Local`], each once.
    pub local: Vec<BackendSpec>,
    /// Backends that stay known, if they are, so that flows which were sent there may go on.
    pub lingering: Vec<SocketAddr>,
    /// Who may use frontends with
    /// [`FRONTEND_RESTRICTED`](health_common::service::FRONTEND_RESTRICTED).
    pub source_ranges: Vec<IpNet>,
    /// How long a client stays with its backend after its last packet, seconds; 0 for no affinity.
    pub affinity_secs: u32,
    /// [`ALGORITHM_RANDOM`](health_common::service::ALGORITHM_RANDOM) or another.
    pub algorithm: u8,
}

/// Where a port is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontendSpec {
    /// The address.
    pub address: SocketAddr,
    /// [`KIND_CLUSTER_IP`](health_common::service::KIND_CLUSTER_IP) or another.
    pub kind: u8,
    /// Any of [`FRONTEND_RESTRICTED`](health_common::service::FRONTEND_RESTRICTED) and
    /// [`FRONTEND_KEEPS_SOURCE`](health_common::service::FRONTEND_KEEPS_SOURCE); other bits follow from the rest.
    pub flags: u16,
    /// What becomes of new flows from this node and its endpoints.
    pub inside: Target,
    /// What becomes of all others.
    pub outside: Target,
}

/// What becomes of new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A backend of [`PortSpec::cluster`]; if that is empty, as [`Target::Reject`].
    Cluster,
    /// A backend of [`PortSpec::local`]; if that is empty, as [`Target::Reject`].
    Local,
    /// Nothing, silently.
    Drop,
    /// An ICMP error.
    Reject,
}

/// A backend of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its share of new flows relative to others of the list. At least 1.
    pub weight: u16,
}

/// What can go wrong with the tables of services.
#[derive(Debug, thiserror::Error)]
pub enum ServicesError {
    /// A map has no room. The port has what it had before.
    #[error(
        "{map} has no room for {wanted} more entries: {used} of {size} are taken, {longest} are free in a row"
    )]
    Full {
        /// The map.
        map: &'static str,
        /// How many it would have to have room for.
        wanted: u32,
        /// How many it has, or keeps a while until nothing can use them any more.
        used: u32,
        /// How many it has room for.
        size: u32,
        /// The length of the longest range that is free.
        longest: u32,
    },
    /// The kernel refused. Some changes are made; [`ServiceTables::read`] finds out which.
    #[error("cannot {what} {map}{of}: {source}")]
    Kernel {
        /// What was attempted.
        what: &'static str,
        /// The map.
        map: &'static str,
        /// ` (WHICH ENTRY)`, or empty.
        of: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl ServicesError {
    fn kernel(what: &'static str, map: &'static str, source: io::Error) -> Self {
        Self::Kernel {
            what,
            map,
            of: String::new(),
            source,
        }
    }
}

/// The tables of services. Has one owner: it knows what it wrote.
#[derive(Debug)]
pub struct ServiceTables {
    maps: ServiceMaps,
    /// Room for frontends of each family, and for source ranges.
    sizes: Sizes,
    numbers: Numbers,
    /// What is in the maps.
    frontends: HashMap<Place, Frontend>,
    /// How many of them are of IPv4, and of IPv6.
    frontend_counts: [u32; 2],
    source_range_count: u32,
    /// By number.
    ports: HashMap<u32, Port>,
    /// Numbers that the owner knows.
    claimed: HashSet<u32>,
    arrays: Arrays,
    /// Backends that are there twice.
    strays: Vec<u32>,
    /// The arrays as they were read; until all ports have been compared with them.
    snapshot: Option<Snapshot>,
    /// Whether all of this is so.
    is_current: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    frontends: [u32; 2],
    source_ranges: u32,
}

/// What is in the maps for a port.
#[derive(Debug, Default)]
struct Port {
    /// Those whose entry has its number, and former ones.
    frontends: Vec<Place>,
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
    /// Whether it gets no new flows.
    lingers: bool,
}

/// Arrays as they were read.
#[derive(Debug)]
struct Snapshot {
    slots: Vec<u32>,
    maglev: Vec<u32>,
}

impl ServiceTables {
    /// Reads what a former agent left, which must not be written by another one any more.
    pub fn open(maps: ServiceMaps) -> Result<Self, ServicesError> {
        let named = maps.named_numbers();
        let named = named
            .map_err(|source| ServicesError::kernel("read", "the maps of services", source))?;
        let mut tables = Self {
            maps,
            sizes: Sizes::default(),
            numbers: Numbers::after(named.into_iter().max().unwrap_or_default()),
            frontends: HashMap::new(),
            frontend_counts: [0; 2],
            source_range_count: 0,
            ports: HashMap::new(),
            claimed: HashSet::new(),
            arrays: Arrays::default(),
            strays: Vec::new(),
            snapshot: None,
            is_current: false,
        };
        tables.read()?;
        Ok(tables)
    }

    /// Whether what is known is what is in the maps, as far as only the owner writes them: not after an error of
    /// [`Change::commit`], until [`ServiceTables::read`].
    pub fn is_current(&self) -> bool {
        self.is_current
    }

    /// Begins to change ports.
    ///
    /// `now_ns`: nanoseconds of `CLOCK_MONOTONIC`.
    pub fn change(&mut self, now_ns: u64) -> Change<'_> {
        Change::new(self, now_ns)
    }

    /// Takes all ports away, whoever gave them. Flows that are known stay, and those of TCP go on until they end.
    ///
    /// `now_ns`: nanoseconds of `CLOCK_MONOTONIC`.
    pub fn remove_all(&mut self, now_ns: u64) -> Result<Written, ServicesError> {
        if !self.is_current {
            self.read()?;
        }
        let mut change = self.change(now_ns);
        change.remove_others();
        change.commit()
    }

    /// Where a port is reached, and was before it was last changed.
    pub fn addresses(&self, number: u32) -> impl Iterator<Item = SocketAddr> {
        let port = self.ports.get(&number).into_iter();
        port.flat_map(|port| port.frontends.iter().map(Place::address))
    }

    /// The maps, to be read.
    pub fn maps(&self) -> &ServiceMaps {
        &self.maps
    }
}

fn family(place: &Place) -> usize {
    usize::from(!place.addr.is_v4())
}

fn frontend_map(family: usize) -> &'static str {
    [layout::SVC4.name, layout::SVC6.name][family]
}
