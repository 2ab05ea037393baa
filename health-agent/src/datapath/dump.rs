//! Reading the pinned maps and programs, with or without an agent.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};

use aya::Pod;
use aya::maps::{HashMap, Map, MapData, MapError, MapType};
use aya::programs::ProgramInfo;
use aya::programs::links::{FdLink, PinnedLink};
use aya::util::nr_cpus;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, TUPLE_IN, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::inflight::{Fate, Inflight};
use health_common::metrics::Counter;
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};
use health_common::rtt::{RttKey, RttRow};

use super::layout::{self, LINK_PINS, MapLayout, PROGRAM_PINS};
use super::{link_pin, rtt, sys};
use crate::config::Location;

/// Why a dump could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// Nothing is pinned for this instance.
    #[error(
        "no maps are pinned at {0}: is an agent of this instance running, and --bpf-root right?"
    )]
    NothingPinned(PathBuf),
    /// There is no such map.
    #[error("no map {name} at {dir}; there are: {known}")]
    NoSuchMap {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        dir: PathBuf,
        /// The maps that are there, comma-separated.
        known: String,
    },
    /// The map was made by another version of the agent.
    #[error(
        "{0} has another layout than this version's; use the command line of the agent that made it"
    )]
    OtherLayout(PathBuf),
    /// The kernel refused.
    #[error("cannot {what} {path}: {source}")]
    Kernel {
        /// What was attempted.
        what: &'static str,
        /// On which pin.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// A conntrack or NAT tuple, readable. Ports and ICMP identifiers in host byte order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// IP protocol number.
    pub protocol: u8,
    /// Opened towards a local endpoint (`true`) or by this host.
    pub inbound: bool,
    /// Source address.
    pub source: IpAddr,
    /// Source port or ICMP identifier.
    pub source_port: u16,
    /// Destination address.
    pub destination: IpAddr,
    /// Destination port or 0.
    pub destination_port: u16,
}

/// A translation, readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Address after translation.
    pub addr: IpAddr,
    /// Port or identifier after translation, host byte order.
    pub port: u16,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub created_ns: u64,
    /// The host's own flow: nothing is rewritten.
    pub host_local: bool,
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

/// One pinned map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// Name of the pin.
    pub name: String,
    /// Kernel id.
    pub id: u32,
    /// Kind, as bpftool names it (`lru_hash`, `array`).
    pub kind: String,
    /// Key size, bytes.
    pub key_size: u32,
    /// Value size, bytes.
    pub value_size: u32,
    /// Capacity.
    pub max_entries: u32,
    /// Entries in it; `None` for arrays, which are always full.
    pub entries: Option<u64>,
    /// Memory the kernel charges for it, bytes.
    pub memory_bytes: u64,
    /// Where it is pinned.
    pub pin: PathBuf,
}

/// One pinned program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgInfo {
    /// Name.
    pub name: String,
    /// Kernel id.
    pub id: u32,
    /// Tag: the kernel's hash of its instructions, hexadecimal.
    pub tag: String,
    /// `device/ingress` or `device/egress`, for each attachment by a pinned link.
    pub attached: Vec<String>,
    /// Machine code, bytes.
    pub jited_bytes: u32,
    /// Instructions that the verifier walked.
    pub verified_instructions: u32,
    /// Memory the kernel charges for it, bytes.
    pub memory_bytes: u64,
    /// Where it is pinned.
    pub pin: PathBuf,
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
                    what: "look into",
                    path: dir,
                    source,
                })
            }
            Err(_) => Err(DumpError::NothingPinned(dir)),
        }
    }

    /// Conntrack entries of both families.
    pub fn conntrack(&self) -> Result<Vec<(Flow, CtEntry)>, DumpError> {
        let mut flows = Vec::new();
        self.each(&layout::CT4, |tuple: Tuple4, entry: CtEntry| {
            flows.push((flow4(&tuple), entry))
        })?;
        self.each(&layout::CT6, |tuple: Tuple6, entry: CtEntry| {
            flows.push((flow6(&tuple), entry))
        })?;
        Ok(flows)
    }

    /// NAT entries of both families.
    pub fn nat(&self) -> Result<Vec<(Flow, Translation)>, DumpError> {
        let mut flows = Vec::new();
        self.each(&layout::NAT4, |tuple: Tuple4, entry: NatEntry4| {
            let translation = Translation {
                addr: Addr::v4(entry.addr_be).to_ip(),
                port: u16::from_be(entry.port_be),
                created_ns: entry.created_ns,
                host_local: entry.flags & NAT_HOST_LOCAL != 0,
            };
            flows.push((flow4(&tuple), translation));
        })?;
        self.each(&layout::NAT6, |tuple: Tuple6, entry: NatEntry6| {
            let translation = Translation {
                addr: Addr::v6(entry.addr_be).to_ip(),
                port: u16::from_be(entry.port_be),
                created_ns: entry.created_ns,
                host_local: entry.flags & NAT_HOST_LOCAL != 0,
            };
            flows.push((flow6(&tuple), translation));
        })?;
        Ok(flows)
    }

    /// Round-trip times.
    pub fn rtt(&self) -> Result<Vec<(RttKey, RttRow)>, DumpError> {
        let mut rows = Vec::new();
        self.each_rtt(&mut |key, row| rows.push((*key, *row)))?;
        Ok(rows)
    }

    /// Round-trip times, row by row, each of one moment: with many peers they are too large to hold all at once.
    pub fn each_rtt(&self, each: &mut dyn FnMut(&RttKey, &RttRow)) -> Result<(), DumpError> {
        let mut torn = Vec::new();
        self.each(&layout::RTT, |key: RttKey, row: RttRow| {
            if row.is_whole() {
                each(&key, &row);
            } else {
                torn.push(key);
            }
        })?;
        if torn.is_empty() {
            return Ok(());
        }
        let pin = self.dir.join(layout::RTT.name);
        let (map, _) = open_map(&pin)?;
        let failed = |source| DumpError::Kernel {
            what: "read",
            path: pin.clone(),
            source,
        };
        let rows = Map::from_map_data(map)
            .and_then(HashMap::try_from)
            .map_err(|error| failed(io::Error::other(error)))?;
        for key in torn {
            if let Some(row) = rtt::read_row(&rows, &key).map_err(failed)? {
                each(&key, &row);
            }
        }
        Ok(())
    }

    /// Makes rows of round-trip times empty, each of them at one moment. Returns how many of these keys
    /// have one.
    pub fn reset_rtt(&self, keys: &[RttKey]) -> Result<usize, DumpError> {
        let path = self.dir.join(PROGRAM_PINS).join(layout::RTT_ACCOUNT);
        let account = rtt::Account::open(&path).map_err(|error| DumpError::Kernel {
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

    /// Probes whose answer is waited for, by slot.
    pub fn inflight(&self) -> Result<Vec<(u32, Inflight)>, DumpError> {
        let mut probes = Vec::new();
        self.each(&layout::INFLIGHT, |slot: u32, probe: Inflight| {
            if probe.fate() == Some(Fate::InFlight) {
                probes.push((slot, probe));
            }
        })?;
        Ok(probes)
    }

    /// The settings that the programs read, by index.
    pub fn config(&self) -> Result<Vec<(u32, DatapathConfig)>, DumpError> {
        let mut settings = Vec::new();
        self.each(&layout::CONFIG, |index: u32, config: DatapathConfig| {
            settings.push((index, config))
        })?;
        Ok(settings)
    }

    /// Local endpoints as the datapath knows them.
    pub fn endpoints(&self) -> Result<Vec<(IpAddr, EndpointInfo)>, DumpError> {
        let mut endpoints = Vec::new();
        self.each(&layout::ENDPOINTS, |addr: Addr, info: EndpointInfo| {
            endpoints.push((addr.to_ip(), info))
        })?;
        Ok(endpoints)
    }

    /// Packet counters that are not zero.
    pub fn metrics(&self) -> Result<Vec<MetricRow>, DumpError> {
        let mut rows = Vec::new();
        for (key, values) in self.raw(layout::METRICS.name)? {
            let Some(index) = sys::read::<u32>(&key) else {
                continue;
            };
            let mut row = MetricRow {
                reason: (index >> 2) as u8,
                direction: (index & 3) as u8,
                packets: 0,
                bytes: 0,
            };
            for counter in values
                .chunks_exact(size_of::<Counter>())
                .filter_map(sys::read::<Counter>)
            {
                row.packets += counter.packets;
                row.bytes += counter.bytes;
            }
            if row.packets > 0 {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// All pinned maps, by name.
    pub fn maps(&self) -> Result<Vec<MapInfo>, DumpError> {
        let mut maps = Vec::new();
        for (name, pin) in files(&self.dir)? {
            let (map, info) = open_map(&pin)?;
            let kind = kind_name(&info);
            let entries = match kind.as_str() {
                "array" | "percpu_array" => None,
                _ => {
                    let mut count = 0;
                    walk(&map, &info, &pin, &mut |_, _| count += 1)?;
                    Some(count)
                }
            };
            maps.push(MapInfo {
                name,
                id: info.id(),
                kind,
                key_size: info.key_size(),
                value_size: info.value_size(),
                max_entries: info.max_entries(),
                entries,
                memory_bytes: memory(&map),
                pin,
            });
        }
        Ok(maps)
    }

    /// All pinned programs, by name.
    pub fn programs(&self) -> Result<Vec<ProgInfo>, DumpError> {
        let mut attached: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (name, pin) in files(&self.dir.join(LINK_PINS))? {
            let link = PinnedLink::from_pin(&pin).map(FdLink::from);
            let program = link
                .and_then(|link| link.info())
                .map_err(|error| DumpError::Kernel {
                    what: "open",
                    path: pin.clone(),
                    source: io::Error::other(error),
                })?;
            attached
                .entry(program.program_id())
                .or_default()
                .push(hook_of(&name));
        }
        let mut programs = Vec::new();
        for (name, pin) in files(&self.dir.join(PROGRAM_PINS))? {
            let failed = |error| DumpError::Kernel {
                what: "open",
                path: pin.clone(),
                source: io::Error::other(error),
            };
            let info = ProgramInfo::from_pin(&pin).map_err(failed)?;
            programs.push(ProgInfo {
                name,
                id: info.id(),
                tag: format!("{:016x}", info.tag()),
                attached: attached.remove(&info.id()).unwrap_or_default(),
                jited_bytes: info.size_jitted(),
                verified_instructions: info.verified_instruction_count().unwrap_or_default(),
                memory_bytes: u64::from(info.memory_locked().map_err(failed)?),
                pin: pin.clone(),
            });
        }
        Ok(programs)
    }

    /// Every entry of a map as bytes; for per-CPU maps the values of all CPUs one after the other.
    pub fn raw(&self, name: &str) -> Result<RawEntries, DumpError> {
        let pin = self.dir.join(name);
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
        let (map, info) = open_map(&pin)?;
        let mut entries = Vec::new();
        walk(&map, &info, &pin, &mut |key, value| {
            entries.push((key.to_vec(), value.to_vec()))
        })?;
        Ok(entries)
    }

    /// Reads a map of a known layout.
    fn each<K: Pod, V: Pod>(
        &self,
        layout: &MapLayout,
        mut each: impl FnMut(K, V),
    ) -> Result<(), DumpError> {
        let pin = self.dir.join(layout.name);
        let (map, info) = open_map(&pin)?;
        if (info.key_size(), info.value_size()) != (layout.key_size, layout.value_size) {
            return Err(DumpError::OtherLayout(pin));
        }
        walk(&map, &info, &pin, &mut |key, value| {
            if let (Some(key), Some(value)) = (sys::read(key), sys::read(value)) {
                each(key, value);
            }
        })
    }
}

fn open_map(pin: &Path) -> Result<(MapData, aya::maps::MapInfo), DumpError> {
    let open = || {
        let map = MapData::from_pin(pin)?;
        let info = map.info()?;
        Ok((map, info))
    };
    open().map_err(|error: MapError| DumpError::Kernel {
        what: "open",
        path: pin.to_owned(),
        source: match error {
            MapError::SyscallError(error) => error.io_error,
            other => io::Error::other(other),
        },
    })
}

fn walk(
    map: &MapData,
    info: &aya::maps::MapInfo,
    pin: &Path,
    each: &mut dyn FnMut(&[u8], &[u8]),
) -> Result<(), DumpError> {
    let failed = |source| DumpError::Kernel {
        what: "read",
        path: pin.to_owned(),
        source,
    };
    let value = match info
        .map_type()
        .map_err(|error| failed(io::Error::other(error)))?
    {
        MapType::PerCpuArray | MapType::PerCpuHash | MapType::LruPerCpuHash => {
            let cpus = nr_cpus().map_err(|(_, source)| failed(source))?;
            // The kernel copies each CPU's value in steps of eight bytes.
            (info.value_size() as usize).next_multiple_of(8) * cpus
        }
        _ => info.value_size() as usize,
    };
    let size = sys::EntrySize {
        key: info.key_size() as usize,
        value,
    };
    sys::walk(map.fd().as_fd(), size, each).map_err(failed)
}

/// The map's kind as bpftool names it.
fn kind_name(info: &aya::maps::MapInfo) -> String {
    match info.map_type() {
        Ok(MapType::Hash) => "hash".to_owned(),
        Ok(MapType::LruHash) => "lru_hash".to_owned(),
        Ok(MapType::Array) => "array".to_owned(),
        Ok(MapType::PerCpuArray) => "percpu_array".to_owned(),
        Ok(MapType::PerCpuHash) => "percpu_hash".to_owned(),
        Ok(MapType::LpmTrie) => "lpm_trie".to_owned(),
        Ok(MapType::RingBuf) => "ringbuf".to_owned(),
        Ok(other) => format!("{other:?}").to_lowercase(),
        Err(_) => "unknown".to_owned(),
    }
}

/// What the kernel charges for a map, bytes; 0 where it does not say.
fn memory(map: &MapData) -> u64 {
    fs::read_to_string(format!(
        "/proc/self/fdinfo/{}",
        map.fd().as_fd().as_raw_fd()
    ))
    .ok()
    .and_then(|text| {
        text.lines()
            .find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
    })
    .unwrap_or_default()
}

/// `to_netdev_eth0` -> `eth0/egress`.
fn hook_of(pin_name: &str) -> String {
    match link_pin::parse(pin_name) {
        Some((program, device)) if program.starts_with("to_") => format!("{device}/egress"),
        Some((_, device)) => format!("{device}/ingress"),
        None => pin_name.to_owned(),
    }
}

/// The files in a folder of the bpffs, by name; none when there is no folder.
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

fn flow4(tuple: &Tuple4) -> Flow {
    Flow {
        protocol: tuple.protocol,
        inbound: tuple.direction == TUPLE_IN,
        source: Addr::v4(tuple.saddr_be).to_ip(),
        source_port: u16::from_be(tuple.sport_be),
        destination: Addr::v4(tuple.daddr_be).to_ip(),
        destination_port: u16::from_be(tuple.dport_be),
    }
}

fn flow6(tuple: &Tuple6) -> Flow {
    Flow {
        protocol: tuple.protocol,
        inbound: tuple.direction == TUPLE_IN,
        source: Addr::v6(tuple.saddr_be).to_ip(),
        source_port: u16::from_be(tuple.sport_be),
        destination: Addr::v6(tuple.daddr_be).to_ip(),
        destination_port: u16::from_be(tuple.dport_be),
    }
}
