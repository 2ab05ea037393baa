//! What can go wrong with the health endpoint.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use health_model::ipam::IpamError;
use health_net::KernelError;
use health_net::netns::NetNsError;

use super::{DEVICE, Fault};

/// Why the health endpoint is not as it shall be.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// All ids are in use.
    #[error("no free endpoint id for the health endpoint; delete an endpoint")]
    NoIds,
    /// The device's name is someone else's.
    #[error(
        "device {DEVICE} exists and is not this agent's (alias {alias:?}): stop the agent that made \
         it and run its cleanup, or delete it with `ip link delete {DEVICE}`"
    )]
    ForeignDevice {
        /// What marks the device instead of our mark; empty if nothing does.
        alias: String,
    },
    /// The namespace's name is someone else's.
    #[error(
        "network namespace {} exists and is not this agent's: delete it with `ip netns delete`, or \
         give the agent another --instance",
        .0.display()
    )]
    ForeignNetns(PathBuf),
    /// A device of the settings does not exist.
    #[error("there is no device {0}: name one that `ip link` shows")]
    NoSuchDevice(String),
    /// A node address of the registry is not this host's.
    #[error("node address {0} is on no device of this host: correct it in the node registry")]
    ForeignNodeAddress(IpAddr),
    /// A node address cannot be used as a source.
    #[error("node address {0} did not pass duplicate address detection: another host may have it")]
    TentativeNodeAddress(IpAddr),
    /// There is nothing to allocate from.
    #[error("this node has no pod CIDR: give it one in the node registry")]
    NoPodCidr,
    /// IPv6 is wanted and cannot be had.
    #[error("this kernel has no IPv6: remove the IPv6 pod CIDR from the node registry")]
    NoIpv6,
    /// IPv6 does not work on such a device.
    #[error("MTU {0} is too small for IPv6, which needs 1280: raise it or use IPv4 only")]
    MtuTooSmall(u32),
    /// An address of the pod CIDRs cannot be had.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// A network namespace.
    #[error(transparent)]
    NetNs(#[from] NetNsError),
    /// A device, an address, a route or a setting.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The state file.
    #[error("cannot {attempt} {}: {source}", path.display())]
    State {
        /// What was attempted.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Something undoes what the agent does.
    #[error("cannot keep the health endpoint in order, something else changes it: {0}")]
    Unrepaired(Fault),
    /// A listener inside the namespace.
    #[error("cannot listen on {address} in the health endpoint: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
}
