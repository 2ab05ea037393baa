//! What `deploy/` installs in a Kubernetes cluster: the objects of its kustomization.

mod kustomization;

pub use self::kustomization::{Inputs, components, objects, removal};
