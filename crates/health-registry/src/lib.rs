//! Reads what the agent needs from files, etcd and Kubernetes: the nodes of the mesh ([`nodes`]) and the identities of
//! label sets ([`identity`]). The `etcd` and `kubernetes` modules also provide service and pod objects, which other
//! crates parse. [`queried_servers`] lists every server that the agent queries.

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
