//! The node registry: who is in the mesh, and under which addresses.

pub mod backoff;
pub mod document;
pub mod file;
pub mod kubernetes;
pub mod validate;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::watch;

use self::file::{FileRegistry, RegistryError};
use crate::config::{Config, RegistrySpec};

/// One node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, unique in its cluster.
    pub name: String,
    /// Its cluster's name.
    pub cluster: String,
    /// Its own addresses; the first of each family is probed as the node's, at least one is there.
    pub addresses: Vec<IpAddr>,
    /// Other addresses of the node, probed as secondary ones.
    pub secondary_addresses: Vec<IpAddr>,
    /// Prefixes that its endpoints' addresses come from.
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses of its health endpoint. Empty where the registry does not say: the node then tells
    /// them itself, in the answer of its `/hello`.
    pub health_addresses: Vec<IpAddr>,
}

impl Node {
    /// `cluster/node`, by which reports name it.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.cluster, self.name)
    }
}

/// What registries say at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSet {
    /// Sorted by full name. No address is there twice.
    pub nodes: Vec<Node>,
    /// The registries that they come from, and how these do.
    pub sources: Vec<SourceState>,
}

/// How a registry does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceState {
    /// The registry as the settings write it: `file:/etc/nodes.yaml`.
    pub registry: String,
    /// The cluster whose nodes it holds.
    pub cluster: String,
    /// Since when it cannot be read, and why; its nodes are then the last good set.
    pub stale: Option<Stale>,
    /// Entries that were left out.
    pub rejected: Vec<Rejected>,
}

/// A registry that does not answer, or says nothing usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stale {
    /// When its nodes were known to be right for the last time.
    pub since: Timestamp,
    /// What is wrong.
    pub reason: String,
}

/// An entry of a registry that cannot be used; the others stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Its key or name in the registry.
    pub key: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Where nodes come from. An error of the source never empties the set.
pub trait Registry: Send + Sync {
    /// The current set, and each that follows.
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>>;

    /// Registers this node, and keeps it registered; a later call replaces what an earlier one said.
    /// Registries that are only read ignore it.
    fn publish(&self, own: Node);
}

/// Opens the registries that the settings name. Must be called in a tokio runtime.
pub fn open(config: &Config) -> Result<FileRegistry, RegistryError> {
    match &config.registry {
        RegistrySpec::File(path) => FileRegistry::open(path, &config.cluster_name),
        other => Err(RegistryError::Unsupported(other.clone())),
    }
}
