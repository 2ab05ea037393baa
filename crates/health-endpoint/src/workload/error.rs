//! Why a workload's endpoint could not be created or removed.

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
    #[error("{} is the agent's own network namespace: endpoints need another", .0.display())]
    OwnNetns(PathBuf),
    /// The namespace has such a device already.
    #[error(
        "{} already has a device {ifname}; choose another name, or remove it", netns.display()
    )]
    IfnameTaken {
        /// The namespace.
        netns: PathBuf,
        /// The requested name.
        ifname: String,
    },
    /// The host has such a device, created by someone else.
    #[error("the host has a device {device} that is not this agent's; remove or rename it")]
    ForeignDevice {
        /// Its name.
        device: String,
    },
    /// The host's end of a pair is gone.
    #[error("device {0} is gone")]
    DeviceGone(String),
    /// The kernel does not let packets pass.
    #[error("device {0} passes no packets although both ends are up")]
    NotRunning(String),
    /// An error of a device, an address, a route or a setting.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// An error of a state file.
    #[error("cannot {attempt} {}: {source}", path.display())]
    State {
        /// The attempted operation.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}
