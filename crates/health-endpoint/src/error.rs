//! Errors of creating, changing or removing endpoints.

use std::path::PathBuf;

use health_model::api::PodName;
use health_model::ipam::IpamError;
use health_model::labels::LabelError;
use health_net::netns::NetNsError;

use super::lifecycle::RefusedTransition;
use super::regenerate::RegenerationError;
use super::workload::WorkloadError;

/// Why an endpoint could not be created, changed or removed.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The endpoint does not exist.
    #[error("no endpoint {0}; `health-agent endpoint list` lists the existing ones")]
    NotFound(u16),
    /// The endpoint is the health endpoint.
    #[error("endpoint {0} is this node's health endpoint; only the agent changes it")]
    Health(u16),
    /// The container already has an endpoint for the device.
    #[error("{ifname} of container {container_id} is already endpoint {id}; delete it first")]
    ContainerTaken {
        /// The container.
        container_id: String,
        /// The device in the container.
        ifname: String,
        /// The existing endpoint.
        id: u16,
    },
    /// The device in the namespace already belongs to another endpoint.
    #[error("device {ifname} in {} already belongs to endpoint {id}", netns.display())]
    DeviceTaken {
        /// The namespace.
        netns: PathBuf,
        /// The device in the namespace.
        ifname: String,
        /// The endpoint that owns the device.
        id: u16,
    },
    /// The namespace's default routes already lead to another endpoint.
    #[error(
        "the default route in {} already uses {ifname} of endpoint {id}; request no default route, or delete that endpoint first",
        netns.display()
    )]
    DefaultRouteTaken {
        /// The namespace.
        netns: PathBuf,
        /// The device that the default route uses.
        ifname: String,
        /// The endpoint of that device.
        id: u16,
    },
    /// All ids are in use.
    #[error("no free endpoint id: a node can have at most 4095 endpoints")]
    NoIds,
    /// The endpoint is not complete yet.
    #[error("endpoint {0} is still being created; try again later")]
    Busy(u16),
    /// The endpoint was deleted meanwhile.
    #[error("endpoint {0} was deleted in the meantime")]
    Deleted(u16),
    /// The work on the endpoint was interrupted.
    #[error("work on the endpoint was interrupted: {0}")]
    Interrupted(String),
    /// The endpoint's state does not allow the operation.
    #[error("endpoint {id}: {refused}; try again later")]
    Refused {
        /// The endpoint.
        id: u16,
        /// The refused transition.
        refused: RefusedTransition,
    },
    /// The endpoint's datapath could not be built.
    #[error("cannot build the datapath of endpoint {id}: {source}")]
    Regenerate {
        /// The endpoint.
        id: u16,
        /// The reason.
        source: RegenerationError,
    },
    /// The labels of the endpoint's pod are not known yet.
    #[error("endpoint {id} is waiting for the labels of pod {pod}; try again later")]
    AwaitsPod {
        /// The endpoint.
        id: u16,
        /// The pod.
        pod: PodName,
    },
    /// The label comes from the endpoint's pod.
    #[error("label {label} comes from pod {pod}; change it in Kubernetes")]
    LabelOfPod {
        /// The label.
        label: String,
        /// The pod.
        pod: PodName,
    },
    /// The labels are invalid.
    #[error(transparent)]
    Labels(#[from] LabelError),
    /// The node has no addresses for endpoints.
    #[error("this node has no pod CIDR for endpoint addresses; give it one in the node registry")]
    NoPodCidr,
    /// No address is available for the endpoint.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// An error of the endpoint's devices or files.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
}

/// The cause of an error, and whether a retry may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid.
    Invalid,
    /// The object does not exist.
    NotFound,
    /// Another object is in the way.
    Conflict,
    /// No resource is free now, or the endpoint is busy.
    Unavailable,
    /// An operation failed.
    Failed,
}

impl EndpointError {
    /// Returns the kind of the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::Health(_)
            | Self::LabelOfPod { .. }
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
            | Self::AwaitsPod { .. }
            | Self::Busy(_)
            | Self::Deleted(_)
            | Self::Refused { .. }
            | Self::Ipam(IpamError::Exhausted(_) | IpamError::InUse { .. }) => {
                ErrorKind::Unavailable
            }
            Self::Interrupted(_) | Self::Regenerate { .. } | Self::Workload(_) => ErrorKind::Failed,
        }
    }
}
