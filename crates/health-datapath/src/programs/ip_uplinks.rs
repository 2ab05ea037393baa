//! Programs for uplinks whose packets begin with the IP header: tun devices, WireGuard. They are the programs for other
//! uplinks, loaded a second time with another length of the header before IP, and only if such an uplink exists. They
//! share all maps with the other programs, except the map of tail-called programs.

use std::collections::HashMap;

use aya::EbpfLoader;

use super::Programs;
use super::load_all::load_all;
use super::object::{HOLDS_FROM, classifier, holds_from, programs};
use super::pins::reopened;
use crate::error::DatapathError;
use crate::layout::{CALLS, IP_CALLS};
use crate::maps::Maps;
use crate::pin_folder::PinFolder;
use crate::program::DatapathProgram;

/// The programs' variable for the length of the header before IP, in bytes.
const LINK_HEADER_LEN: &str = "LINK_HEADER_LEN";

impl Programs {
    /// Loads these programs if a hook needs one of them and they are not loaded yet.
    pub(crate) fn load_ip_for(
        &mut self,
        mut wanted: impl Iterator<Item = DatapathProgram>,
        folder: &mut PinFolder,
        maps: &mut Maps,
    ) -> Result<(), DatapathError> {
        let is_wanted = wanted.any(|program| DatapathProgram::FOR_IP.contains(&program));
        if is_wanted && !maps.have_ip_calls() {
            self.load_ip(folder, maps)?;
        }
        Ok(())
    }

    fn load_ip(&mut self, folder: &mut PinFolder, maps: &mut Maps) -> Result<(), DatapathError> {
        // The loader creates maps whose pins are missing, and these programs would not share them.
        self.repair_pins(folder, maps)?;
        let pins = folder.path();
        let from = holds_from();
        let mut loader = EbpfLoader::new();
        self.parts.apply(&mut loader);
        let mut ebpf = loader
            .default_map_pin_directory(pins)
            .map_pin_path(CALLS.name, pins.join(IP_CALLS.name))
            .override_global(LINK_HEADER_LEN, &0_u32, true)
            .override_global(HOLDS_FROM, &from, true)
            // They log nothing: their logging code is removed at load time.
            .override_global(aya_log::LEVEL, &(::log::Level::Warn as u8), false)
            .load(&programs()?)?;
        let all = DatapathProgram::FOR_IP.into_iter();
        let wanted: Vec<_> = all.filter(|program| self.parts.have(*program)).collect();
        let refused = load_all(&mut ebpf, wanted.iter().map(|program| program.origin()));
        if let Some(error) = refused.into_values().next() {
            return Err(error);
        }
        for program in wanted {
            let loaded = classifier(&mut ebpf, program)?;
            self.classifiers
                .insert(program, reopened(pins, program, loaded)?);
        }
        let map = ebpf.take_map(CALLS.name);
        let map = map.ok_or_else(|| DatapathError::Missing(IP_CALLS.name.to_owned()))?;
        // During a size change, they are connected with the other programs, once the maps are complete.
        if !maps.are_resizing() {
            self.connect_for_ip(pins)?;
        }
        // From here on, they count as loaded.
        maps.keep(HashMap::from([(IP_CALLS.name.to_owned(), map)]));
        Ok(())
    }
}
