//! Objects of a Kubernetes cluster: how to reach its API server, and how to follow objects there.

pub(crate) mod access;
pub(crate) mod follow;
mod namespaces;
mod objects;
mod pods;
mod services;

pub use self::access::AccessError;
pub(crate) use self::access::server;
pub use self::namespaces::{NamespaceLabels, watch_namespaces};
pub use self::objects::{ObjectTable, ObjectWatch};
pub use self::pods::{PodMetadata, watch_pods};
pub use self::services::{ServiceScope, ServiceWatch};
