//! What `deploy/` installs in a Kubernetes cluster: the objects of its kustomization, and the Helm chart that is made from
//! them.

mod chart;
mod kustomization;
mod template;
#[cfg(test)]
mod tests;
mod yaml;

pub use self::chart::Chart;
pub use self::kustomization::{Inputs, components, objects, removal};
