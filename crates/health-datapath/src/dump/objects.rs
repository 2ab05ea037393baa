//! The pinned maps and programs.

use std::io;
use std::path::PathBuf;

use aya::programs::ProgramInfo;

use super::map::OpenMap;
use super::{DumpError, Pinned, files};
use crate::link_pin;
use crate::pin_folder::PROGRAM_PINS;
use crate::program::{AttachPoint, DatapathProgram};

/// One pinned map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// Name of the pin.
    pub name: String,
    /// Kernel id.
    pub id: u32,
    /// Kind, as bpftool names it (`lru_hash`, `array`).
    pub kind: String,
    /// Key size in bytes.
    pub key_size: u32,
    /// Value size in bytes.
    pub value_size: u32,
    /// Capacity.
    pub max_entries: u32,
    /// Number of entries; `None` for arrays, which are always full, and for maps whose entries cannot be counted.
    pub entries: Option<u64>,
    /// Memory the kernel charges for it, in bytes.
    pub memory_bytes: u64,
    /// Where it is pinned.
    pub pin: PathBuf,
    /// Whether programs use it. False for a map of another size that programs do not use yet or no longer use.
    pub is_in_use: bool,
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
    /// `device/ingress`, `device/egress` or `device/xdp`, for each attachment; `cgroup` at the root cgroup.
    pub attached: Vec<String>,
    /// Size of the machine code in bytes.
    pub jited_bytes: u32,
    /// Instructions that the verifier walked.
    pub verified_instructions: u32,
    /// Memory the kernel charges for it, in bytes.
    pub memory_bytes: u64,
    /// Where it is pinned.
    pub pin: PathBuf,
}

impl Pinned {
    /// All pinned maps, by name.
    pub fn maps(&self) -> Result<Vec<MapInfo>, DumpError> {
        let unused = self.unused_maps()?;
        let mut maps = Vec::new();
        for (name, pin) in files(&self.dir)? {
            let map = OpenMap::open(&pin)?;
            let info = *map.info();
            let kind = map.kind();
            let memory_bytes = map.memory_bytes();
            let entries = if kind.is_listable() && !kind.is_array() {
                let mut count = 0;
                map.rows(|_, _| Some(()))?.each(|()| count += 1)?;
                Some(count)
            } else {
                None
            };
            maps.push(MapInfo {
                is_in_use: !unused.contains(&name),
                name,
                id: info.id,
                kind: kind.name().to_owned(),
                key_size: info.key_size,
                value_size: info.value_size,
                max_entries: info.max_entries,
                entries,
                memory_bytes,
                pin,
            });
        }
        Ok(maps)
    }

    /// All pinned programs, by name.
    pub fn programs(&self) -> Result<Vec<ProgInfo>, DumpError> {
        let mut attached = self.attachments()?;
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
}

/// Returns the hook in a pin's name: `eth0/egress` for `to_netdev_eth0`.
pub(super) fn hook_of(pin_name: &str) -> String {
    if let Some((program, device)) = link_pin::parse(pin_name) {
        return match program.attach_point() {
            AttachPoint::Xdp => format!("{device}/xdp"),
            AttachPoint::Tc(direction) => format!("{device}/{direction}"),
            _ => pin_name.to_owned(),
        };
    }
    let mut of_sockets = DatapathProgram::FOR_SOCKETS.into_iter();
    match of_sockets.any(|program| program.name() == pin_name) {
        true => "cgroup".to_owned(),
        false => pin_name.to_owned(),
    }
}
