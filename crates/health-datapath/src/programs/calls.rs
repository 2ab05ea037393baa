//! Fills the slots for tail-called programs.

use std::path::Path;

use aya::maps::ProgramArray;

use super::Programs;
use crate::aya_io::gone;
use crate::error::{DatapathError, map_error, program_error};
use crate::layout::{CALLS, IP_CALLS, MapLayout};
use crate::maps::{Maps, typed};
use crate::program::DatapathProgram;

impl Programs {
    /// Connects the programs to those that they tail-call.
    pub(crate) fn connect(&self, pins: &Path, maps: &Maps) -> Result<(), DatapathError> {
        self.connect_to(pins, &CALLS, &DatapathProgram::CALLED)?;
        if maps.have_ip_calls() {
            self.connect_for_ip(pins)?;
        }
        Ok(())
    }

    /// Connects the second copies of programs.
    pub(super) fn connect_for_ip(&self, pins: &Path) -> Result<(), DatapathError> {
        self.connect_to(pins, &IP_CALLS, &DatapathProgram::CALLED_FOR_IP)
    }

    /// Writes the loaded programs to their slots in a map.
    fn connect_to(
        &self,
        pins: &Path,
        map: &MapLayout,
        called: &[(u32, DatapathProgram)],
    ) -> Result<(), DatapathError> {
        let mut calls = typed(pins, map, ProgramArray::try_from)?;
        for &(index, program) in called {
            if !self.parts.have(program) {
                continue;
            }
            let loaded = self.classifier(program)?;
            let fd = loaded.fd().map_err(program_error("open", program))?;
            calls
                .set(index, fd, 0)
                .map_err(map_error("write", map.name))?;
        }
        Ok(())
    }

    /// Clears the slots of programs that a former agent had loaded and this one has not. Must not run before all
    /// programs are attached: an agent that fails earlier leaves the former agent's programs unchanged.
    pub(crate) fn clear_unused_calls(&self, maps: &mut Maps) -> Result<(), DatapathError> {
        self.clear_unused(maps, &CALLS, &DatapathProgram::CALLED)?;
        if maps.have_ip_calls() {
            self.clear_unused(maps, &IP_CALLS, &DatapathProgram::CALLED_FOR_IP)?;
        }
        Ok(())
    }

    fn clear_unused(
        &self,
        maps: &mut Maps,
        map: &MapLayout,
        called: &[(u32, DatapathProgram)],
    ) -> Result<(), DatapathError> {
        let failed = || map_error("write", map.name);
        let mut calls = ProgramArray::try_from(maps.opened_mut(map)?).map_err(failed())?;
        let called = called.iter();
        for (index, _) in called.filter(|(_, program)| !self.parts.have(*program)) {
            gone(calls.clear_index(index)).map_err(failed())?;
        }
        Ok(())
    }
}
