//! Reading the pinned maps and programs, with or without an agent.

use std::net::IpAddr;
use std::path::PathBuf;

use health_common::ct::CtEntry;
use health_common::endpoint::EndpointInfo;
use health_common::rtt::{RttKey, RttRow};

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

/// The pinned objects of one instance.
pub struct Pinned {
    dir: PathBuf,
}

impl Pinned {
    /// Finds an instance's pins.
    pub fn open(location: &Location) -> Result<Self, DumpError> {
        let dir = location.pins();
        if dir.is_dir() {
            Ok(Self { dir })
        } else {
            Err(DumpError::NothingPinned(dir))
        }
    }

    /// Conntrack entries of both families.
    pub fn conntrack(&self) -> Result<Vec<(Flow, CtEntry)>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// NAT entries of both families.
    pub fn nat(&self) -> Result<Vec<(Flow, Translation)>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// Round-trip times.
    pub fn rtt(&self) -> Result<Vec<(RttKey, RttRow)>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// Local endpoints as the datapath knows them.
    pub fn endpoints(&self) -> Result<Vec<(IpAddr, EndpointInfo)>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// Packet counters that are not zero.
    pub fn metrics(&self) -> Result<Vec<MetricRow>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// All pinned maps, by name.
    pub fn maps(&self) -> Result<Vec<MapInfo>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// All pinned programs, by name.
    pub fn programs(&self) -> Result<Vec<ProgInfo>, DumpError> {
        Err(DumpError::NothingPinned(self.dir.clone()))
    }

    /// Every entry of a map as bytes; for per-CPU maps the values of all CPUs one after the other.
    pub fn raw(&self, name: &str) -> Result<Vec<(Vec<u8>, Vec<u8>)>, DumpError> {
        Err(DumpError::NoSuchMap {
            name: name.to_owned(),
            dir: self.dir.clone(),
            known: String::new(),
        })
    }
}
