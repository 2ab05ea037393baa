//! Errors of the datapath.

use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapError;
use aya::pin::PinError;
use aya::programs::ProgramError;
use miniz_oxide::inflate::TINFLStatus;

use crate::program::DatapathProgram;

/// Errors of prefix maps.
#[derive(Debug, thiserror::Error)]
pub enum TrieError {
    /// There are more prefixes than the map holds. Nothing was changed.
    #[error("cannot write {wanted} prefixes to {map}: its capacity is {capacity}")]
    Full {
        /// The map.
        map: &'static str,
        /// How many prefixes were wanted.
        wanted: usize,
        /// The map's capacity.
        capacity: usize,
    },
    /// The kernel refused.
    #[error("cannot {what} {map}: {source}")]
    Kernel {
        /// The attempted operation.
        what: &'static str,
        /// The map.
        map: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Errors of the datapath.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The kernel refused the whole object.
    #[error("cannot load the eBPF object: {0}")]
    Load(#[from] aya::EbpfError),
    /// A program was refused or could not be attached.
    #[error("cannot {what} program {program}{on}: {source}")]
    Program {
        /// The attempted operation.
        what: &'static str,
        /// The program.
        program: DatapathProgram,
        /// ` on DEVICE` if a device is involved, otherwise empty.
        on: String,
        /// The kernel's error.
        #[source]
        source: Box<ProgramError>,
    },
    /// A device's driver runs no XDP programs.
    #[error(
        "--service-xdp native: driver {driver} of device {device} does not support XDP; use generic, or omit the flag"
    )]
    NoNativeXdp {
        /// The device.
        device: String,
        /// Its driver.
        driver: String,
    },
    /// A device's packets may be longer than its driver allows with XDP.
    #[error(
        "device {device} cannot run an XDP program with its MTU or its veth peer's MTU; services \
         are served there without XDP until the MTU is lowered"
    )]
    MtuTooLargeForXdp {
        /// The device.
        device: String,
    },
    /// A device already has a foreign XDP program, which stays.
    #[error(
        "device {device} has another XDP program, {program}: services are served there without XDP"
    )]
    ForeignXdp {
        /// The device.
        device: String,
        /// Name and number of the program.
        program: String,
    },
    /// A clsact or XDP attachment could not be read or changed.
    #[error("cannot {what} {hook}: {source}")]
    Filter {
        /// The attempted operation.
        what: &'static str,
        /// The program and the hook.
        hook: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A map could not be read or written.
    #[error("cannot {what} map {map}: {source}")]
    Map {
        /// The attempted operation.
        what: &'static str,
        /// The map's name.
        map: &'static str,
        /// The kernel's error.
        #[source]
        source: MapError,
    },
    /// The embedded object cannot be decompressed.
    #[error("the embedded eBPF object is damaged ({0:?}); install the agent again")]
    Damaged(TINFLStatus),
    /// The embedded object lacks something: the build mixed two versions.
    #[error("the embedded eBPF object has no {0}")]
    Missing(String),
    /// A setting needs a program that [`LoadSettings`](crate::LoadSettings) left out.
    #[error("program {0} was not loaded")]
    NotLoaded(DatapathProgram),
    /// Another agent uses the same pins.
    #[error("another agent is using {0}: stop it, or give this one its own --instance")]
    InUse(PathBuf),
    /// A pin could not be created.
    #[error("cannot pin {path}: {source}")]
    Pin {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: PinError,
    },
    /// A folder or file of the bpffs could not be changed.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// The attempted operation.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

pub(crate) fn file_error<'a>(
    what: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> DatapathError + 'a {
    move |source| DatapathError::File {
        what,
        path: path.to_owned(),
        source,
    }
}

pub(crate) fn map_error(
    what: &'static str,
    map: &'static str,
) -> impl FnOnce(MapError) -> DatapathError {
    move |source| DatapathError::Map { what, map, source }
}

pub(crate) fn program_error(
    what: &'static str,
    program: DatapathProgram,
) -> impl FnOnce(ProgramError) -> DatapathError {
    move |source| DatapathError::Program {
        what,
        program,
        on: String::new(),
        source: Box::new(source),
    }
}
