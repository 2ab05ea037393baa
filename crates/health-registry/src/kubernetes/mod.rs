//! Objects of a Kubernetes cluster: how to reach its API server, and how to follow objects there.

pub(crate) mod access;
pub(crate) mod follow;
mod objects;
mod pods;
mod services;

pub use self::access::AccessError;
pub(crate) use self::access::server;
pub use self::objects::{ObjectTable, ObjectWatch};
pub use self::pods::{PodMetadata, PodWatch};
pub use self::services::{ServiceScope, ServiceWatch};
