//! Programs for uplinks whose packets begin with the IP header: tun devices, WireGuard. They are the programs of other
//! uplinks, loaded a second time with another length of the header before IP, and only if such an uplink exists. They share
//! all maps with the other programs, except the map of tail-called programs.

use aya::EbpfLoader;

use super::layout::{self, IP_PROGRAMS};
use super::load_all::load_all;
use super::loader::{loaded, reopened};
use super::parts::{HOLDS_FROM, holds_from};
use super::{Datapath, DatapathError, Hook, PROGRAMS};

/// The programs' variable for the length of the header before IP, bytes.
const LINK_HEADER_LEN: &str = "LINK_HEADER_LEN";

impl Datapath {
    /// Loads these programs if a hook needs them and they are not loaded yet.
    pub(super) fn load_ip_programs_for(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        let is_wanted = hooks.iter().any(|hook| is_for_ip(hook.program));
        if is_wanted && !self.has_ip_programs() {
            self.load_ip_programs()?;
        }
        Ok(())
    }

    fn load_ip_programs(&mut self) -> Result<(), DatapathError> {
        // The loader creates maps whose pins are missing, so these programs would not share them.
        self.repair_pins()?;
        let from = holds_from();
        let mut loader = EbpfLoader::new();
        self.parts.apply(&mut loader);
        let mut ebpf = loader
            .default_map_pin_directory(&self.pins)
            .map_pin_path(layout::CALLS.name, self.pins.join(layout::IP_CALLS.name))
            .override_global(LINK_HEADER_LEN, &0_u32, true)
            .override_global(HOLDS_FROM, &from, true)
            // They log nothing: their logging code is cut out at load time.
            .override_global(aya_log::LEVEL, &(::log::Level::Warn as u8), false)
            .load(PROGRAMS)?;
        let all = IP_PROGRAMS.into_iter();
        let wanted: Vec<_> = all.filter(|(name, _)| self.parts.have(name)).collect();
        let refused = load_all(&mut ebpf, wanted.iter().map(|(_, origin)| *origin));
        if let Some(error) = refused.into_values().next() {
            return Err(error);
        }
        for (name, origin) in wanted {
            let program = reopened(&self.pins, name, loaded(&mut ebpf, origin)?)?;
            self.programs.insert(name, program);
        }
        let calls = layout::IP_CALLS.name;
        let map = ebpf.take_map(layout::CALLS.name);
        let map = map.ok_or_else(|| DatapathError::Missing(calls.to_owned()))?;
        // Otherwise they are connected with the others, once the maps hold what they need.
        if self.resizing.is_none() {
            self.connect(&layout::IP_CALLS, &layout::IP_CALLED)?;
        }
        // Only now do they count as loaded.
        self.maps.insert(calls.to_owned(), map);
        Ok(())
    }

    /// Whether they are loaded.
    pub(super) fn has_ip_programs(&self) -> bool {
        self.maps.contains_key(layout::IP_CALLS.name)
    }
}

fn is_for_ip(program: &str) -> bool {
    IP_PROGRAMS.iter().any(|(name, _)| *name == program)
}
