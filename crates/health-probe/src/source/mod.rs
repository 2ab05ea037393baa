//! Where pods come from.

mod folder;
mod merge;
mod object;

use std::sync::Arc;

use health_model::api::PodProblem;

use crate::spec::PodSpec;
use crate::worker::PodStatus;

pub use folder::Folder;
pub use merge::{Merged, merge};
pub use object::ObjectPod;
pub(crate) use object::SOURCE as KUBERNETES;

/// The pods of a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodSet {
    /// The pods.
    pub pods: Vec<SourcedPod>,
    /// Problems with some of the pods.
    pub problems: Vec<PodProblem>,
    /// Whether the source was read completely at least once. If so, a pod that it lacks does not exist.
    pub is_complete: bool,
}

/// A pod of a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedPod {
    /// The pod as it is to be probed.
    pub spec: Arc<PodSpec>,
    /// The status that the source gives for the pod, if any.
    pub status: Option<PodStatus>,
    /// Where the pod was read from.
    pub source: Arc<str>,
    /// Who runs the pod's containers.
    pub keeper: Keeper,
}

/// Who runs the containers of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeper {
    /// Only this agent.
    #[default]
    Agent,
    /// A kubelet: it restarts them, and reports their state in the pod's status.
    Kubelet {
        /// Whether the source only mirrors a pod from the kubelet's own manifest folder.
        is_mirror: bool,
    },
}
