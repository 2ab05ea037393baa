//! User-space side of the datapath: loads, pins and attaches programs, wraps maps in types, dumps them.

pub mod arrival_store;
mod asm;
pub mod attach;
mod aya_io;
pub mod btf;
pub mod collect;
mod connections;
pub mod conntrack;
pub mod dump;
pub mod events;
mod ip_uplinks;
pub mod ipcache;
pub mod kernel;
pub mod kernel_rtt;
pub mod layout;
mod layout_change;
mod link_pin;
mod load_all;
pub mod loader;
pub mod log;
pub mod own;
mod parts;
pub mod pin_folder;
mod pins;
pub mod policy;
pub mod probe;
pub mod process;
mod resize;
mod rings;
pub mod rtt_store;
pub mod services;
mod sockets;
mod sys;
mod table;
mod trie;
pub mod verifier;
mod walk;
mod workloads;
mod xdp;

use std::io;
use std::path::PathBuf;

use aya::maps::MapError;
use aya::pin::PinError;
use aya::programs::ProgramError;

pub use attach::{Attachment, Attachments, Direction, Hook, HookFault};
pub use loader::Datapath;
pub use resize::MapSizes;
pub use sockets::SocketFault;
pub use workloads::Workload;

/// The compiled programs that an agent loads.
pub static PROGRAMS: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/datapath"));

/// The compiled programs of the benchmarks; an agent never loads them.
pub static BENCH_PROGRAMS: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/bench"));

/// Errors of the datapath.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The kernel refused the whole object.
    #[error("cannot load the eBPF object: {0}")]
    Load(#[from] aya::EbpfError),
    /// A program was refused or could not be attached.
    #[error("cannot {what} program {program}{on}: {source}")]
    Program {
        /// What was attempted.
        what: &'static str,
        /// The program's name.
        program: String,
        /// ` on DEVICE` if a device is involved, otherwise empty.
        on: String,
        /// The kernel's answer.
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
        /// What was attempted.
        what: &'static str,
        /// The program and the hook.
        hook: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A map could not be read or written.
    #[error("cannot {what} map {map}: {source}")]
    Map {
        /// What was attempted.
        what: &'static str,
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        #[source]
        source: MapError,
    },
    /// The embedded object lacks something: the build mixed two versions.
    #[error("the embedded eBPF object has no {0}")]
    Missing(String),
    /// A setting needs a program that [`LoadSettings`](loader::LoadSettings) left out.
    #[error("program {0} was not loaded")]
    NotLoaded(&'static str),
    /// Another agent uses the same pins.
    #[error("another agent is using {0}: stop it, or give this one an --instance of its own")]
    InUse(PathBuf),
    /// A pin could not be created.
    #[error("cannot pin {path}: {source}")]
    Pin {
        /// Its path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: PinError,
    },
    /// A folder or file of the bpffs could not be changed.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was attempted.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}
