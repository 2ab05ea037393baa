//! The programs: loaded from the object, pinned, and connected to the programs that they tail-call.

mod calls;
mod ip_uplinks;
mod load;
mod load_all;
mod log;
mod object;
mod pins;
mod sockets;
mod xdp;

use std::collections::HashMap;

use aya::programs::{SchedClassifier, Xdp};
use aya_log::EbpfLogger;

use crate::error::DatapathError;
use crate::optional_parts::OptionalParts;
use crate::program::DatapathProgram;

pub(crate) use load::LoadedObject;
pub use log::{LogError, ProgramLog};
pub use object::{COMPRESSED_PROGRAMS, programs};
pub(crate) use pins::open_classifier;
pub(crate) use sockets::{SocketProgram, SocketPrograms};

/// Program log output, as lines of the agent's log.
type ProgramLines = EbpfLogger<&'static dyn ::log::Log>;

/// The loaded programs. Dropping them leaves everything pinned and attached.
pub(crate) struct Programs {
    /// The parts that they are loaded with.
    parts: OptionalParts,
    /// As opened from their pins. The object, about a megabyte, is not kept.
    classifiers: HashMap<DatapathProgram, SchedClassifier>,
    /// Set once a hook needs it.
    xdp: Option<Xdp>,
    pub(crate) sockets: SocketPrograms,
    /// Program log output, until it is forwarded.
    log: Option<ProgramLines>,
}

impl Programs {
    /// Whether no program was added since they were loaded. Second copies for other uplinks do not count.
    pub(crate) fn are_as_loaded(&self) -> bool {
        // Names all fields, so that a new field must be considered here. Programs are handles.
        let Self {
            parts: _,
            classifiers: _,
            xdp,
            sockets: _,
            log: _,
        } = self;
        xdp.is_none()
    }

    /// Returns a loaded program for a tc hook, or a program that such programs tail-call.
    pub(crate) fn classifier(
        &self,
        program: DatapathProgram,
    ) -> Result<&SchedClassifier, DatapathError> {
        let loaded = self.classifiers.get(&program);
        loaded.ok_or_else(|| DatapathError::Missing(program.to_string()))
    }

    /// Like [`Programs::classifier`].
    pub(crate) fn classifier_mut(
        &mut self,
        program: DatapathProgram,
    ) -> Result<&mut SchedClassifier, DatapathError> {
        let loaded = self.classifiers.get_mut(&program);
        loaded.ok_or_else(|| DatapathError::Missing(program.to_string()))
    }

    /// The XDP program, once loaded.
    pub(crate) const fn xdp(&self) -> Option<&Xdp> {
        self.xdp.as_ref()
    }
}
