//! Why a workload's endpoint could not be made or removed.

use std::io;
use std::path::PathBuf;

use health_net::KernelError;
use health_net::netns::NetNsError;

/// Why a workload's endpoint could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// Its namespace cannot be used.
    #[error(transparent)]
    Netns(#[from] NetNsError),
    /// Its namespace is the agent's.
    #[error("{} is the agent's own network namespace: endpoints need another", .0.display())]
    OwnNetns(PathBuf),
    /// There is such a device in it.
    #[error(
        "{} has a device {ifname} already: ask for another name, or remove it", netns.display()
    )]
    IfnameTaken {
        /// The namespace.
        netns: PathBuf,
        /// The name that was asked for.
        ifname: String,
    },
    /// There is such a device on the host, made by somebody else.
    #[error("there is a device {device} on the host that is not this agent's: remove or rename it")]
    ForeignDevice {
        /// Its name.
        device: String,
    },
    /// The host's end of a pair is gone.
    #[error("device {0} is gone")]
    DeviceGone(String),
    /// The kernel lets no packets pass.
    #[error("device {0} lets no packets pass though both ends are up")]
    NotRunning(String),
    /// A device, an address, a route or a setting.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A state file.
    #[error("cannot {attempt} {}: {source}", path.display())]
    State {
        /// What was attempted.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}
