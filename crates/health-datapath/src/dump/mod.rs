//! Reads the pinned maps and programs, with or without an agent.

mod flow;
mod flush;
mod in_use;
mod kind;
mod lookup;
mod map;
mod objects;
mod raw;
mod rings;
mod rtt_rows;
mod services;
mod xdp;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use health_common::addr::Addr;
use health_common::arrivals::{Arrivals, Prober};
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::events::MonitorFilter;
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_common::inflight::Inflight;
use health_common::ipcache::IpcacheEntry;
use health_common::masquerade::MasqueradeConfig;
use health_common::metrics::Counter;
use health_common::own::OwnPrefix;
use health_common::policy::{PolicyEntry, PolicyKey};
use health_common::rtt::{RttKey, RttRow};
use health_common::service::direct::DirectConfig;
use health_common::tcp::{self, FlowKey, Peer};
use health_model::settings::Location;
use ipnet::IpNet;
use map::decode;

use crate::layout::{self, MapLayout};
use crate::pin_folder::program_pin;
use crate::policy::PolicyMatch;
use crate::program::DatapathProgram;
use crate::{ipcache, kernel_rtt, own, sys, trie};

pub use crate::services::ServiceFlow;
pub use crate::walk::Batch;
pub use flow::{Flow, Translation};
pub use flush::FlushedMap;
pub use kind::MapKind;
pub use lookup::PolicyQuery;
pub use map::{Decode, OpenMap, Rows};
pub use objects::{MapInfo, ProgInfo};
pub use rtt_rows::RttRows;
pub use services::ServiceClient;
pub use xdp::KnownWay;

/// Why a dump failed.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// Nothing is pinned for this instance.
    #[error(
        "no maps are pinned at {0}: is an agent of this instance running, and is --bpf-root right?"
    )]
    NothingPinned(PathBuf),
    /// The map does not exist.
    #[error("no map {name} at {dir}; existing maps: {known}")]
    NoSuchMap {
        /// The requested name.
        name: String,
        /// The searched folder.
        dir: PathBuf,
        /// The existing maps, comma-separated.
        known: String,
    },
    /// Another version of the agent created the map.
    #[error(
        "{0} has a different layout than this version expects; use the health-agent binary that \
         created it, or `bpftool map dump pinned {0}`"
    )]
    OtherLayout(PathBuf),
    /// Something else is pinned there, or nothing.
    #[error("{0} is not a pinned map")]
    NotAMap(PathBuf),
    /// A map that this version of the agent does not have.
    #[error("{0} is not a map of this version of the agent; use `bpftool map dump pinned {0}`")]
    UnknownMap(PathBuf),
    /// The entries of maps of this kind cannot be listed.
    #[error("cannot dump {path}: the entries of {kind} maps cannot be listed")]
    NothingToList {
        /// Where it is pinned.
        path: PathBuf,
        /// Its kind, as bpftool names it.
        kind: &'static str,
    },
    /// The kernel refused.
    #[error("cannot {what} {path}: {source}")]
    Kernel {
        /// The attempted operation.
        what: &'static str,
        /// The pin.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
}

/// One counter, summed over all CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricRow {
    /// A [`health_common::metrics::Reason`] as a byte.
    pub reason: u8,
    /// A [`health_common::metrics::Direction`] as a byte.
    pub direction: u8,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl MetricRow {
    /// Sums a counter over all CPUs; `None` if it is zero.
    fn sum(key: &[u8], values: &[u8]) -> Option<Self> {
        let (index, Counter { packets, bytes }) = sum(key, values)?;
        Some(Self {
            reason: (index >> 2) as u8,
            direction: (index & 3) as u8,
            packets,
            bytes,
        })
    }
}

/// An entry of `HEALTH_POLICY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyRow {
    /// The entry's table.
    pub table: u32,
    /// What it matches.
    pub what: PolicyMatch,
    /// Verdict, counter, and the owner of the policy.
    pub entry: PolicyEntry,
}

/// Sums a counter over all CPUs; `None` if it is zero.
fn sum(key: &[u8], values: &[u8]) -> Option<(u32, Counter)> {
    let mut total = Counter::default();
    for counter in values
        .chunks_exact(size_of::<Counter>())
        .filter_map(sys::read::<Counter>)
    {
        total.packets += counter.packets;
        total.bytes += counter.bytes;
    }
    (total.packets > 0).then_some((sys::read(key)?, total))
}

/// Keys and values of a map as bytes.
pub type RawEntries = Vec<(Vec<u8>, Vec<u8>)>;

/// The pinned objects of one instance.
#[derive(Clone, Debug)]
pub struct Pinned {
    dir: PathBuf,
}

impl Pinned {
    /// Finds an instance's pins.
    pub fn open(location: &Location) -> Result<Self, DumpError> {
        let dir = location.pins();
        match fs::metadata(&dir) {
            Ok(_) => Ok(Self { dir }),
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                Err(DumpError::Kernel {
                    what: "inspect",
                    path: dir,
                    source,
                })
            }
            Err(_) => Err(DumpError::NothingPinned(dir)),
        }
    }

    /// Conntrack entries: for TCP over IPv4 and over IPv6, then for other protocols.
    pub fn conntrack_rows(&self) -> Result<[Rows<(Flow, CtEntry)>; 4], DumpError> {
        Ok([
            self.rows(&layout::CT4, flow::conntrack::<Tuple4>)?,
            self.rows(&layout::CT6, flow::conntrack::<Tuple6>)?,
            self.rows(&layout::CT_ANY4, flow::conntrack::<Tuple4>)?,
            self.rows(&layout::CT_ANY6, flow::conntrack::<Tuple6>)?,
        ])
    }

    /// All conntrack entries at once.
    pub fn conntrack(&self) -> Result<Vec<(Flow, CtEntry)>, DumpError> {
        all(&self.conntrack_rows()?)
    }

    /// NAT entries, in the order of [`Pinned::conntrack_rows`].
    pub fn nat_rows(&self) -> Result<[Rows<(Flow, Translation)>; 4], DumpError> {
        Ok([
            self.rows(&layout::NAT4, flow::translation::<Tuple4>)?,
            self.rows(&layout::NAT6, flow::translation::<Tuple6>)?,
            self.rows(&layout::NAT_ANY4, flow::translation::<Tuple4>)?,
            self.rows(&layout::NAT_ANY6, flow::translation::<Tuple6>)?,
        ])
    }

    /// All NAT entries at once.
    pub fn nat(&self) -> Result<Vec<(Flow, Translation)>, DumpError> {
        all(&self.nat_rows()?)
    }

    /// Round-trip times.
    pub fn rtt(&self) -> Result<Vec<(RttKey, RttRow)>, DumpError> {
        let mut rows = Vec::new();
        self.each_rtt(&mut |key, row| rows.push((*key, *row)))?;
        Ok(rows)
    }

    /// Round-trip times, row by row: with many peers there are too many to hold at once.
    pub fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        self.rtt_rows()?.each(each)
    }

    /// Round-trip times, for reading by several threads.
    pub fn rtt_rows(&self) -> Result<RttRows, DumpError> {
        RttRows::new(self.open_as(&layout::RTT)?)
    }

    /// Resets rows of round-trip times, each atomically. Returns how many of these keys have a row.
    pub fn reset_rtt(&self, keys: &[RttKey]) -> Result<usize, DumpError> {
        let path = program_pin(&self.dir, DatapathProgram::RttAccount);
        let account = kernel_rtt::Account::open(&path).map_err(|error| DumpError::Kernel {
            what: "open",
            path: path.clone(),
            source: io::Error::other(error),
        })?;
        let mut reset = 0;
        for &key in keys {
            let done = account.reset(key).map_err(|source| DumpError::Kernel {
                what: "reset rows with",
                path: path.clone(),
                source,
            })?;
            reset += usize::from(done);
        }
        Ok(reset)
    }

    /// Probes that no row has counted yet, by slot.
    pub fn inflight_rows(&self) -> Result<Rows<(u32, Inflight)>, DumpError> {
        self.rows(&layout::INFLIGHT, |key, value| {
            decode(key, value).filter(|(_, probe): &(u32, Inflight)| probe.is_open())
        })
    }

    /// Probes that no row has counted yet, all at once.
    pub fn inflight(&self) -> Result<Vec<(u32, Inflight)>, DumpError> {
        self.inflight_rows()?.collect()
    }

    /// Ports of fragmented IPv4 packets.
    pub fn fragments4_rows(&self) -> Result<Rows<(FragmentKey4, FragmentPorts)>, DumpError> {
        self.rows(&layout::FRAGMENTS4, decode)
    }

    /// Ports of fragmented IPv6 packets.
    pub fn fragments6_rows(&self) -> Result<Rows<(FragmentKey6, FragmentPorts)>, DumpError> {
        self.rows(&layout::FRAGMENTS6, decode)
    }

    /// Arrivals of other agents' probes.
    pub fn arrivals_rows(&self) -> Result<Rows<(Prober, Arrivals)>, DumpError> {
        self.rows(&layout::ARRIVALS, decode)
    }

    /// Addresses whose TCP connections are timed.
    pub fn peers_rows(&self) -> Result<Rows<(Addr, Peer)>, DumpError> {
        self.rows(&layout::PEERS, decode)
    }

    /// TCP connections that are timed.
    pub fn tcp_rows(&self) -> Result<Rows<(FlowKey, tcp::Flow)>, DumpError> {
        self.rows(&layout::TCP, decode)
    }

    /// The settings that the programs read, by index.
    pub fn config(&self) -> Result<Vec<(u32, DatapathConfig)>, DumpError> {
        self.rows(&layout::CONFIG, decode)?.collect()
    }

    /// Which events the programs write, by index.
    pub fn monitor(&self) -> Result<Vec<(u32, MonitorFilter)>, DumpError> {
        self.rows(&layout::MONITOR, decode)?.collect()
    }

    /// Ids of the tail-called programs, by index in `HEALTH_CALLS` or `HEALTH_IP_CALLS`.
    pub fn calls(&self, map: &layout::MapLayout) -> Result<Vec<(u32, u32)>, DumpError> {
        self.rows(map, decode)?.collect()
    }

    /// What is masqueraded, by index.
    pub fn masquerade(&self) -> Result<Vec<(u32, MasqueradeConfig)>, DumpError> {
        self.rows(&layout::MASQUERADE, decode)?.collect()
    }

    /// The keys of direct server return, by index.
    pub fn direct(&self) -> Result<Vec<(u32, DirectConfig)>, DumpError> {
        self.rows(&layout::DIRECT, decode)?.collect()
    }

    /// Local endpoints as the datapath knows them.
    pub fn endpoints(&self) -> Result<Vec<(IpAddr, EndpointInfo)>, DumpError> {
        let rows = self.rows(&layout::ENDPOINTS, |key, value| {
            let (addr, info): (Addr, EndpointInfo) = decode(key, value)?;
            Some((addr.to_ip(), info))
        })?;
        rows.collect()
    }

    /// The host's own addresses; for link-local addresses, also the ifindex.
    pub fn own_rows(&self) -> Result<Rows<(IpNet, Option<u32>)>, DumpError> {
        self.rows(&layout::OWN, |key, value| {
            let (prefix, _) = trie::entry::<OwnPrefix, u32>(key, value)?;
            own::read(&prefix)
        })
    }

    /// Ifindexes of endpoint devices, with the endpoints' ids.
    pub fn device_rows(&self) -> Result<Rows<(u32, u32)>, DumpError> {
        self.rows(&layout::DEVICES, decode)
    }

    /// Verdicts of all policy tables.
    pub fn policy_rows(&self) -> Result<Rows<PolicyRow>, DumpError> {
        self.rows(&layout::POLICY, |key, value| {
            let (prefix, entry) = trie::entry::<PolicyKey, PolicyEntry>(key, value)?;
            Some(PolicyRow {
                table: prefix.1.table,
                what: PolicyMatch::of(&prefix),
                entry,
            })
        })
    }

    /// Nonzero verdict counters, by index.
    pub fn policy_counter_rows(&self) -> Result<Rows<(u32, Counter)>, DumpError> {
        self.rows(&layout::POLICY_COUNTERS, sum)
    }

    /// Nonzero verdict counters, all at once.
    pub fn policy_counters(&self) -> Result<HashMap<u32, Counter>, DumpError> {
        let mut counters = HashMap::new();
        self.policy_counter_rows()?.each(|(index, counter)| {
            counters.insert(index, counter);
        })?;
        Ok(counters)
    }

    /// Identities by prefix.
    pub fn ipcache_rows(&self) -> Result<Rows<(IpNet, IpcacheEntry)>, DumpError> {
        self.rows(&layout::IPCACHE, |key, value| {
            let (prefix, entry) = trie::entry::<Addr, IpcacheEntry>(key, value)?;
            Some((ipcache::net(&prefix)?, entry))
        })
    }

    /// Nonzero packet counters.
    pub fn metrics(&self) -> Result<Vec<MetricRow>, DumpError> {
        self.rows(&layout::METRICS, MetricRow::sum)?.collect()
    }

    /// A map by name; if several exist, the one that programs use.
    pub fn map(&self, name: &str) -> Result<OpenMap, DumpError> {
        let pin = match layout::MAPS.iter().find(|map| map.name == name) {
            Some(map) => self.pin_of(map)?,
            None => self.dir.join(name),
        };
        if name.is_empty() || name.contains('/') || !pin.is_file() {
            let known: Vec<String> = files(&self.dir)?
                .into_iter()
                .map(|(name, _)| name)
                .collect();
            return Err(DumpError::NoSuchMap {
                name: name.to_owned(),
                dir: self.dir.clone(),
                known: known.join(", "),
            });
        }
        OpenMap::open(&pin)
    }

    /// Every entry of a map as bytes; for per-CPU maps, the values of all CPUs in sequence.
    pub fn raw(&self, name: &str) -> Result<RawEntries, DumpError> {
        self.map(name)?.rows(raw)?.collect()
    }

    fn rows<T>(&self, layout: &MapLayout, decode: Decode<T>) -> Result<Rows<T>, DumpError> {
        self.open_as(layout)?.rows(decode)
    }

    fn open_as(&self, layout: &MapLayout) -> Result<OpenMap, DumpError> {
        OpenMap::open_as(&self.pin_of(layout)?, layout)
    }
}

/// Collects the entries of several maps.
fn all<T>(maps: &[Rows<T>]) -> Result<Vec<T>, DumpError> {
    let mut all = Vec::new();
    for rows in maps {
        rows.each(|row| all.push(row))?;
    }
    Ok(all)
}

/// Key and value unchanged.
pub fn raw(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    Some((key.to_vec(), value.to_vec()))
}

/// Lists the files in a folder of the bpffs, by name; empty if the folder does not exist.
fn files(dir: &Path) -> Result<Vec<(String, PathBuf)>, DumpError> {
    let failed = |source| DumpError::Kernel {
        what: "read",
        path: dir.to_owned(),
        source,
    };
    let mut files = Vec::new();
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        Err(error) => return Err(failed(error)),
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if !entry.file_type().map_err(failed)?.is_dir() {
            files.push((
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            ));
        }
    }
    files.sort();
    Ok(files)
}
