//! Where an agent learns who is there: the nodes of the mesh and the identities of endpoints, from a file, from etcd
//! or from Kubernetes; and the settings that say so, validated.

#![forbid(unsafe_code)]

pub mod asked;
pub mod config;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod identity;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod nodes;
