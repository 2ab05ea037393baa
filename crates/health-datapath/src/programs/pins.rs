//! The pins of programs: created, repaired when other processes remove them, and removed when unused.

use std::path::{Path, PathBuf};

use aya::pin::PinError;
use aya::programs::SchedClassifier;

use super::Programs;
use crate::error::{DatapathError, program_error};
use crate::layout::IP_CALLS;
use crate::maps::Maps;
use crate::pin_folder::{PinFolder, program_pin, remove_tree, replace_pin};
use crate::program::DatapathProgram;

impl Programs {
    /// Restores missing pins, maps included. Returns the names of the restored objects.
    pub(crate) fn repair_pins(
        &mut self,
        folder: &mut PinFolder,
        maps: &Maps,
    ) -> Result<Vec<String>, DatapathError> {
        folder.make_folders()?;
        let pins = folder.path();
        let mut lost = maps.repair_pins(pins)?;
        let missing: Vec<DatapathProgram> = self
            .pinned()
            .filter(|program| !program_pin(pins, *program).exists())
            .collect();
        for program in missing {
            match (program, &mut self.xdp) {
                (DatapathProgram::XdpNetdev, Some(xdp)) => {
                    pin_at(pins, program, |path| xdp.pin(path))?
                }
                _ => pin_program(pins, program, self.classifier_mut(program)?)?,
            };
            lost.push(program.to_string());
        }
        for program in self.sockets.without_pin(pins) {
            self.sockets.pin(pins, program)?;
            lost.push(program.to_string());
        }
        Ok(lost)
    }

    /// Whether all programs have their pins.
    pub(crate) fn are_pinned(&self, pins: &Path) -> bool {
        self.pinned()
            .all(|program| program_pin(pins, program).exists())
            && self.sockets.without_pin(pins).is_empty()
    }

    /// Removes a former agent's pins of programs and maps that this agent did not load.
    pub(crate) fn remove_unused_pins(&self, pins: &Path, maps: &Maps) -> Result<(), DatapathError> {
        let used: Vec<_> = self.pinned().chain(self.sockets.names()).collect();
        let unused = DatapathProgram::of_devices()
            .chain(DatapathProgram::FOR_SOCKETS)
            .filter(|program| !used.contains(program));
        for program in unused {
            // Nothing runs these programs any more: this agent's programs are attached, and other slots are cleared.
            // Programs that still serve endpoints with maps of another layout are pinned in the folder set aside.
            remove_tree(&program_pin(pins, program))?;
        }
        if maps.have_ip_calls() {
            return Ok(());
        }
        // Only programs for such uplinks tail-call through this map, and none of them is attached any more.
        remove_tree(&pins.join(IP_CALLS.name))
    }

    /// Returns the programs that have pins, except socket programs.
    fn pinned(&self) -> impl Iterator<Item = DatapathProgram> {
        DatapathProgram::of_devices().filter(|program| match program {
            DatapathProgram::XdpNetdev => self.xdp.is_some(),
            other => self.classifiers.contains_key(other),
        })
    }
}

/// Pins a loaded program and reopens it from the pin.
pub(super) fn reopened(
    pins: &Path,
    program: DatapathProgram,
    loaded: &mut SchedClassifier,
) -> Result<SchedClassifier, DatapathError> {
    let path = pin_program(pins, program, loaded)?;
    SchedClassifier::from_pin(path).map_err(program_error("open", program))
}

/// Opens a pinned program.
pub(crate) fn open_classifier(
    pins: &Path,
    program: DatapathProgram,
) -> Result<SchedClassifier, DatapathError> {
    SchedClassifier::from_pin(program_pin(pins, program)).map_err(program_error("open", program))
}

/// Pins a program, atomically replacing an existing pin of the same name. Returns the path.
fn pin_program(
    pins: &Path,
    program: DatapathProgram,
    loaded: &mut SchedClassifier,
) -> Result<PathBuf, DatapathError> {
    pin_at(pins, program, |path| loaded.pin(path))
}

/// Like [`pin_program`], with a function that pins at a path.
pub(super) fn pin_at(
    pins: &Path,
    program: DatapathProgram,
    pin: impl FnOnce(&Path) -> Result<(), PinError>,
) -> Result<PathBuf, DatapathError> {
    let path = program_pin(pins, program);
    let fresh = path.with_file_name(format!("{}_new", program.name()));
    // A former agent's program keeps running without its pin: links, filters and slots hold their programs.
    replace_pin(&path, &fresh, |fresh| {
        pin(fresh).map_err(|source| DatapathError::Pin {
            path: fresh.to_owned(),
            source,
        })
    })?;
    Ok(path)
}
