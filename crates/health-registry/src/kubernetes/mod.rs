//! Objects of a Kubernetes cluster: how its API server is reached, and how objects are followed there.

pub(crate) mod access;
pub(crate) mod follow;
mod pods;

pub use self::access::AccessError;
pub use self::pods::{PodTable, PodWatch};
