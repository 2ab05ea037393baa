//! Why an endpoint could not be had, changed or removed.

use std::path::PathBuf;

use health_model::ipam::IpamError;
use health_model::labels::LabelError;
use health_net::netns::NetNsError;

use super::lifecycle::RefusedTransition;
use super::regenerate::RegenerationError;
use super::workload::WorkloadError;

/// Why an endpoint could not be had, changed or removed.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// There is none.
    #[error("no endpoint {0}; `health-agent endpoint list` lists the existing ones")]
    NotFound(u16),
    /// It is the health endpoint.
    #[error("endpoint {0} is this node's health endpoint, which the agent keeps as it is")]
    Health(u16),
    /// The container has one.
    #[error("{ifname} of container {container_id} is endpoint {id} already: delete that first")]
    ContainerTaken {
        /// The container.
        container_id: String,
        /// The device in it.
        ifname: String,
        /// Its endpoint.
        id: u16,
    },
    /// The device in the namespace is another endpoint's.
    #[error("device {ifname} in {} is of endpoint {id} already", netns.display())]
    DeviceTaken {
        /// The namespace.
        netns: PathBuf,
        /// The device in it.
        ifname: String,
        /// Whose it is.
        id: u16,
    },
    /// The routes that lead out lead to another endpoint.
    #[error(
        "the default route in {} leads to {ifname}, endpoint {id}: ask for none, or delete that endpoint first",
        netns.display()
    )]
    DefaultRouteTaken {
        /// The namespace.
        netns: PathBuf,
        /// The device that has the route.
        ifname: String,
        /// Its endpoint.
        id: u16,
    },
    /// All ids are in use.
    #[error("no free endpoint id: a node can have at most 4095 endpoints")]
    NoIds,
    /// It is not there as a whole.
    #[error("endpoint {0} is still being created; try again later")]
    Busy(u16),
    /// It was deleted meanwhile.
    #[error("endpoint {0} was deleted meanwhile")]
    Deleted(u16),
    /// The work on it was broken off.
    #[error("work on the endpoint was interrupted: {0}")]
    BrokenOff(String),
    /// Its state does not allow it.
    #[error("endpoint {id}: {refused}; try again later")]
    Refused {
        /// Which endpoint.
        id: u16,
        /// What was refused.
        refused: RefusedTransition,
    },
    /// Its datapath could not be built.
    #[error("the datapath of endpoint {id} cannot be built: {source}")]
    Regenerate {
        /// Which endpoint.
        id: u16,
        /// Why.
        source: RegenerationError,
    },
    /// Its labels are none.
    #[error(transparent)]
    Labels(#[from] LabelError),
    /// There are no addresses for endpoints.
    #[error(
        "this node has no pod CIDR for the addresses of endpoints; give it one in the node registry"
    )]
    NoPodCidr,
    /// There is no address for it.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// Its devices or files.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
}

/// Whose fault an error is, and whether it helps to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// What was asked for cannot be.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// Something else is in the way.
    Conflict,
    /// Nothing is free for now, or the endpoint is busy.
    Unavailable,
    /// Something failed.
    Failed,
}

impl EndpointError {
    /// Of which kind it is.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::Health(_)
            | Self::Labels(_)
            | Self::Ipam(
                IpamError::NotInPool { .. }
                | IpamError::Reserved { .. }
                | IpamError::Excluded { .. }
                | IpamError::NoFamily(_)
                | IpamError::OverlapsNode { .. },
            )
            | Self::Workload(
                WorkloadError::Netns(NetNsError::NotANamespace(_) | NetNsError::System { .. })
                | WorkloadError::OwnNetns(_),
            ) => ErrorKind::Invalid,
            Self::ContainerTaken { .. }
            | Self::DeviceTaken { .. }
            | Self::DefaultRouteTaken { .. }
            | Self::Ipam(IpamError::Taken(_) | IpamError::Owned { .. })
            | Self::Workload(
                WorkloadError::IfnameTaken { .. } | WorkloadError::ForeignDevice { .. },
            ) => ErrorKind::Conflict,
            Self::NoIds
            | Self::NoPodCidr
            | Self::Busy(_)
            | Self::Deleted(_)
            | Self::Refused { .. }
            | Self::Ipam(IpamError::Exhausted(_) | IpamError::InUse { .. }) => {
                ErrorKind::Unavailable
            }
            Self::BrokenOff(_) | Self::Regenerate { .. } | Self::Workload(_) => ErrorKind::Failed,
        }
    }
}
