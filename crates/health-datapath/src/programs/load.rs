//! Loads the object that all programs come from, and pins its programs.

use std::collections::HashMap;
use std::path::Path;

use aya::maps::Map;
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;

use super::load_all::load_all;
use super::object::{HOLDS_FROM, classifier, holds_from, programs};
use super::pins::reopened;
use super::sockets::SocketPrograms;
use super::{ProgramLog, Programs};
use crate::error::DatapathError;
use crate::maps::PendingResize;
use crate::optional_parts::OptionalParts;
use crate::program::DatapathProgram;

/// The loaded programs, not pinned yet.
pub(crate) struct LoadedObject {
    ebpf: Ebpf,
    parts: OptionalParts,
    /// Why some socket programs could not be loaded.
    refused: HashMap<DatapathProgram, DatapathError>,
}

impl LoadedObject {
    /// Loads the programs of these parts. Creates and pins missing maps.
    pub(crate) fn load(
        pins: &Path,
        parts: OptionalParts,
        log: ProgramLog,
        resizing: &PendingResize,
    ) -> Result<Self, DatapathError> {
        let level: u8 = match log {
            ProgramLog::Warn => ::log::Level::Warn as u8,
            ProgramLog::Debug => ::log::Level::Debug as u8,
        };
        let from = holds_from();
        let mut loader = EbpfLoader::new();
        resizing.apply(&mut loader);
        parts.apply(&mut loader);
        let mut ebpf = loader
            .default_map_pin_directory(pins)
            .override_global(aya_log::LEVEL, &level, false)
            .override_global(HOLDS_FROM, &from, true)
            .load(&programs()?)?;
        let of_sockets = DatapathProgram::FOR_SOCKETS.into_iter();
        let of_sockets = of_sockets.filter(|_| parts.services);
        let mut refused = load_all(&mut ebpf, needed(parts).chain(of_sockets));
        if let Some(error) = needed(parts).find_map(|program| refused.remove(&program)) {
            return Err(error);
        }
        Ok(Self {
            ebpf,
            parts,
            refused,
        })
    }

    /// Pins the programs, replacing a former agent's pins. Also returns the object's maps, and drops the rest of the
    /// object.
    pub(crate) fn pin(
        mut self,
        pins: &Path,
    ) -> Result<(Programs, HashMap<String, Map>), DatapathError> {
        let mut classifiers = HashMap::new();
        for program in needed(self.parts) {
            let loaded = classifier(&mut self.ebpf, program)?;
            classifiers.insert(program, reopened(pins, program, loaded)?);
        }
        let sockets = if self.parts.services {
            SocketPrograms::take(&mut self.ebpf, self.refused, pins)?
        } else {
            SocketPrograms::default()
        };
        let programs = Programs {
            parts: self.parts,
            classifiers,
            xdp: None,
            sockets,
            log: EbpfLogger::init(&mut self.ebpf).ok(),
        };
        Ok((programs, take_maps(self.ebpf)))
    }
}

/// Returns the programs of these parts that are always pinned.
fn needed(parts: OptionalParts) -> impl Iterator<Item = DatapathProgram> {
    let all = DatapathProgram::ALWAYS.into_iter();
    all.filter(move |program| parts.have(*program))
}

/// Takes the object's maps and drops the object.
fn take_maps(mut ebpf: Ebpf) -> HashMap<String, Map> {
    let names: Vec<String> = ebpf.maps().map(|(name, _)| name.to_owned()).collect();
    names
        .into_iter()
        .filter_map(|name| ebpf.take_map(&name).map(|map| (name, map)))
        .collect()
}
