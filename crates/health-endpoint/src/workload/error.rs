//! Errors of creating or removing workloads' endpoints.

use std::io;
use std::path::PathBuf;

use health_net::KernelError;
use health_net::netns::NetNsError;

/// Why a workload's endpoint could not be created or removed.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// The endpoint's namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetNsError),
    /// The endpoint's namespace is the agent's own.
    #[error(
        "{} is the agent's own network namespace; an endpoint needs a different one", .0.display()
    )]
    OwnNetns(PathBuf),
    /// The namespace already has a device of this name.
    #[error(
        "{} already has a device {ifname}; choose another name, or remove the device",
        netns.display()
    )]
    IfnameTaken {
        /// The namespace.
        netns: PathBuf,
        /// The requested name.
        ifname: String,
    },
    /// The host already has a foreign device of this name.
    #[error("the host has a device {device} that is not this agent's; remove or rename it")]
    ForeignDevice {
        /// The device's name.
        device: String,
    },
    /// The host's end of a pair is gone.
    #[error("device {0} is gone")]
    DeviceGone(String),
    /// The kernel does not let packets through the device.
    #[error("device {0} passes no packets although both ends are up")]
    NotRunning(String),
    /// An error from a device, an address, a route or a kernel setting.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A state file error.
    #[error("cannot {attempt} {}: {source}", path.display())]
    State {
        /// The attempted operation.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}
