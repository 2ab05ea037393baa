//! The programs for the host's own sockets, and their pins.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use aya::Ebpf;
use aya::programs::Program;
use tracing::warn;

use crate::error::{DatapathError, file_error, program_error};
use crate::pin_folder::{program_pin, replace_pin};
use crate::program::DatapathProgram;
use crate::{link_pin, sys};

/// The programs; empty if the kernel rejects one of them.
#[derive(Debug, Default)]
pub(crate) struct SocketPrograms(BTreeMap<DatapathProgram, SocketProgram>);

#[derive(Debug)]
pub(crate) struct SocketProgram {
    pub(crate) fd: OwnedFd,
    pub(crate) id: u32,
}

impl SocketPrograms {
    /// Takes the loaded programs from an object and pins them; `errors` contains the errors of those that failed to
    /// load. The rest of the datapath works without them.
    pub(super) fn take(
        ebpf: &mut Ebpf,
        mut errors: HashMap<DatapathProgram, DatapathError>,
        pins: &Path,
    ) -> Result<Self, DatapathError> {
        let mut programs = BTreeMap::new();
        for program in DatapathProgram::FOR_SOCKETS {
            let taken = match errors.remove(&program) {
                Some(error) => Err(error),
                None => take(ebpf, program),
            };
            match taken {
                Ok(taken) => programs.insert(program, taken),
                Err(error) => {
                    warn!(%error, "cannot serve services to host sockets");
                    return Ok(Self::default());
                }
            };
        }
        let sockets = Self(programs);
        for program in sockets.names() {
            sockets.pin(pins, program)?;
        }
        Ok(sockets)
    }

    /// Returns the loaded programs, in the order in which they are attached.
    pub(crate) fn names(&self) -> impl Iterator<Item = DatapathProgram> {
        self.0.keys().copied()
    }

    /// The loaded programs with their handles, in the same order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (DatapathProgram, &SocketProgram)> {
        self.0.iter().map(|(name, program)| (*name, program))
    }

    /// A loaded program.
    pub(crate) fn get(&self, program: DatapathProgram) -> Option<&SocketProgram> {
        self.0.get(&program)
    }

    /// Returns the programs without a pin.
    pub(super) fn without_pin(&self, pins: &Path) -> Vec<DatapathProgram> {
        self.names()
            .filter(|program| !program_pin(pins, *program).exists())
            .collect()
    }

    /// Pins a program, replacing an existing pin of the same name.
    pub(super) fn pin(&self, pins: &Path, program: DatapathProgram) -> Result<(), DatapathError> {
        let loaded = self.get(program);
        let loaded = loaded.ok_or_else(|| DatapathError::Missing(program.to_string()))?;
        let path = program_pin(pins, program);
        let fresh = path.with_file_name(link_pin::fresh(program.name()));
        // A former agent's program keeps running without its pin: links hold their programs.
        replace_pin(&path, &fresh, |fresh| {
            sys::pin(loaded.fd.as_fd(), fresh).map_err(file_error("pin", fresh))
        })
    }
}

fn take(ebpf: &mut Ebpf, program: DatapathProgram) -> Result<SocketProgram, DatapathError> {
    let failed = || program_error("load", program);
    let name = program.object_name();
    let fd = match ebpf.program_mut(name) {
        Some(Program::CgroupSockAddr(program)) => program.fd().map_err(failed())?.try_clone(),
        Some(Program::CgroupSock(program)) => program.fd().map_err(failed())?.try_clone(),
        _ => return Err(DatapathError::Missing(name.to_owned())),
    };
    let fd = fd.map_err(|error| failed()(error.into()))?;
    let fd = fd.as_fd().try_clone_to_owned();
    let fd = fd.map_err(|error| failed()(error.into()))?;
    let id = sys::program_id(fd.as_fd()).map_err(|error| failed()(error.into()))?;
    Ok(SocketProgram { fd, id })
}
