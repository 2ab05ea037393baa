//! Where pods come from.

mod folder;

use std::sync::Arc;

use health_model::api::PodProblem;

use crate::spec::PodSpec;
use crate::worker::PodStatus;

pub use folder::Folder;

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
}
