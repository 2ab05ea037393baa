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

/// What a source knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodSet {
    /// The pods.
    pub pods: Vec<SourcedPod>,
    /// What is wrong with some.
    pub problems: Vec<PodProblem>,
    /// Whether it was read as a whole at least once: what it does not have is not there.
    pub is_complete: bool,
}

/// A pod of a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedPod {
    /// What is to be probed.
    pub spec: Arc<PodSpec>,
    /// What the source says of its containers, if it says something.
    pub status: Option<PodStatus>,
    /// Where it was read.
    pub source: Arc<str>,
    /// Who runs its containers.
    pub keeper: Keeper,
}

/// Who runs the containers of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeper {
    /// Nobody but this agent.
    #[default]
    Agent,
    /// A kubelet: it starts them again, and the pod's status is what it says of them.
    Kubelet {
        /// Whether the source only shows a pod of the kubelet's own folder of manifests.
        is_mirror: bool,
    },
}
