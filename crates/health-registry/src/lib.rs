//! Node and identity discovery: reads the nodes of the mesh and the identities of endpoints from a file, etcd or
//! Kubernetes.

#![forbid(unsafe_code)]

pub mod asked;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod identity;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod nodes;
mod prefix;
