//! Errors of the health endpoint.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use health_model::ipam::IpamError;
use health_net::KernelError;
use health_net::netns::NetNsError;

use super::{DEVICE, Fault};

/// Why the health endpoint is not in its intended state.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// All ids are in use.
    #[error("no free endpoint id for the health endpoint; delete an endpoint")]
    NoIds,
    /// The device's name is already taken by a device that is not ours.
    #[error(
        "device {DEVICE} exists and is not this agent's (alias {alias:?}): stop the agent that made \
         it and run its cleanup, or delete it with `ip link delete {DEVICE}`"
    )]
    ForeignDevice {
        /// The device's alias in place of our mark; empty if it has none.
        alias: String,
    },
    /// The namespace's name is already taken by a namespace that is not ours.
    #[error(
        "network namespace {} exists and is not this agent's: delete it with `ip netns delete`, or \
         give the agent another --instance",
        .0.display()
    )]
    ForeignNetns(PathBuf),
    /// A device named in the settings does not exist.
    #[error("no device {0}; choose one that `ip link` lists")]
    NoSuchDevice(String),
    /// A node address in the registry is not on this host.
    #[error("node address {0} is not on any device of this host; correct it in the node registry")]
    ForeignNodeAddress(IpAddr),
    /// A node address cannot be used as a source.
    #[error("node address {0} failed duplicate address detection; another host may be using it")]
    TentativeNodeAddress(IpAddr),
    /// There is no prefix to allocate from.
    #[error("this node has no pod CIDR: give it one in the node registry")]
    NoPodCidr,
    /// IPv6 is wanted but not available.
    #[error("this kernel does not support IPv6; remove the IPv6 pod CIDR from the node registry")]
    NoIpv6,
    /// The MTU is too small for IPv6.
    #[error("MTU {0} is too small for IPv6, which needs 1280: raise it or use IPv4 only")]
    MtuTooSmall(u32),
    /// No address could be allocated from the pod CIDRs.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// A network namespace error.
    #[error(transparent)]
    NetNs(#[from] NetNsError),
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
    /// Something keeps undoing the agent's changes.
    #[error("cannot repair the health endpoint; another program keeps changing it: {0}")]
    Unrepaired(Fault),
    /// A listener inside the namespace could not be opened.
    #[error("cannot listen on {address} in the health endpoint: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}
