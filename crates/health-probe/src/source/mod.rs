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
    /// Problems with some of them.
    pub problems: Vec<PodProblem>,
    /// Whether the source was read completely at least once: anything it lacks then does not exist.
    pub is_complete: bool,
}

/// A pod of a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedPod {
    /// What to probe.
    pub spec: Arc<PodSpec>,
    /// What the source says about its containers, if anything.
    pub status: Option<PodStatus>,
    /// Where it was read from.
    pub source: Arc<str>,
    /// Who runs its containers.
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
