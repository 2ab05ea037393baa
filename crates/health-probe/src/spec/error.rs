//! Why a manifest is rejected, and where in it the problem is.

use std::fmt;

pub use health_model::manifest::Problem;

/// One problem with a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct SpecError {
    /// `NAMESPACE/NAME` of the pod, if already known.
    pub pod: Option<String>,
    /// The container's name, if the problem concerns a container that has one.
    pub container: Option<String>,
    /// The path of the field in Kubernetes notation, such as `spec.containers[0].livenessProbe.httpGet.port`; empty for
    /// the whole document.
    pub path: String,
    /// The problem.
    pub problem: Problem,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pod) = &self.pod {
            write!(f, "pod {pod}")?;
            if let Some(container) = &self.container {
                write!(f, ", container {container}")?;
            }
            f.write_str(": ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        self.problem.fmt(f)
    }
}

/// Collects the problems with the pod that is being read, and keeps track of the part that is being read.
#[derive(Debug, Default)]
pub(super) struct Errors {
    pub(super) list: Vec<SpecError>,
    pub(super) pod: Option<String>,
    pub(super) container: Option<String>,
}

impl Errors {
    pub(super) fn add(&mut self, path: impl Into<String>, problem: Problem) {
        self.list.push(SpecError {
            pod: self.pod.clone(),
            container: self.container.clone(),
            path: path.into(),
            problem,
        });
    }
}
