//! The agent's sources in files, etcd and Kubernetes: the nodes of the mesh ([`nodes`]), and the identities of label
//! sets ([`identity`]), which are in files or etcd. `etcd` and `kubernetes` also deliver the documents of services and
//! pods, which other crates interpret. [`queried_servers`] lists all servers that the agent queries.

#![forbid(unsafe_code)]

#[cfg(any(feature = "etcd", feature = "kubernetes"))]
mod backoff;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod identity;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod nodes;
mod prefix;
pub mod queried_servers;
