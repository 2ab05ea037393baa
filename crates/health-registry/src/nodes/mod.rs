//! The node registry: who is in the mesh, and under which addresses.

pub mod backoff;
mod cache;
pub mod document;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod file;
mod heard;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod merge;
pub mod record;
pub mod validate;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::watch;

#[cfg(feature = "etcd")]
use self::etcd::{EtcdRegistry, EtcdSpec};
use self::file::{FileError, FileRegistry};
#[cfg(feature = "kubernetes")]
use self::kubernetes::{AccessError, KubernetesRegistry};
use self::merge::{MergedRegistry, Role, Source};
use crate::config::{Config, RegistrySpec};
#[cfg(feature = "etcd")]
use crate::etcd::EtcdConfigError;

pub use self::cache::FILE as CACHE_FILE;
pub use self::heard::LastHeard;

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
    /// Sorted by full name. No address is listed twice.
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
    /// When its nodes were known to be right for the last time.
    pub heard: LastHeard,
    /// Since when it cannot be read, and why; its nodes are then the last good set.
    pub stale: Option<Staleness>,
    /// Entries that were left out.
    pub rejected: Vec<UnusableEntry>,
}

/// A registry that does not answer, or says nothing usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staleness {
    /// When its nodes were known to be right for the last time.
    pub since: Timestamp,
    /// What is wrong.
    pub reason: String,
}

/// An entry of a registry that cannot be used; the others stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableEntry {
    /// Its key or name in the registry.
    pub key: String,
    /// What is wrong with it.
    pub reason: String,
}

/// How this node stands with its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody tells: the registry has not been read yet, is of a kind that does not say, or does not have this node.
    Untold,
    /// The cluster knows it.
    Known {
        /// Whether its object is being deleted.
        is_deleting: bool,
        /// The keys of its taints.
        taints: Vec<String>,
        /// The zone that it is in.
        zone: Option<String>,
    },
}

/// Where nodes come from. An error of the source never empties the set.
pub trait Registry: Send + Sync {
    /// The current set, and each that follows.
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>>;

    /// Registers this node, and keeps it registered; a later call replaces what an earlier one said.
    /// Registries that are only read ignore it.
    fn publish(&self, own: Node);

    /// How this node stands with its cluster, and how it will. Only Kubernetes says it.
    fn standing(&self) -> watch::Receiver<Standing> {
        watch::channel(Standing::Untold).1
    }
}

/// Why a registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// An etcd cluster's settings.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Etcd(#[from] EtcdConfigError),
    /// A Kubernetes cluster's kubeconfig.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] AccessError),
    /// A kind of registry that this agent was built without.
    #[error(
        "cannot use {0}: this agent was built without that kind of registry; use another build, or a file"
    )]
    NotBuilt(RegistrySpec),
}

/// Opens the registries that the settings name. `own` is this node where it is known from the
/// settings, and then in the set from the start. Registries that do not answer are waited for, with
/// what they said last meanwhile; only settings that cannot be used are a failure. Must be called in
/// a tokio runtime.
pub fn open(config: &Config, own: Option<Node>) -> Result<Box<dyn Registry>, OpenError> {
    let own_cluster = open_one(
        &config.registry,
        &config.cluster_name,
        own,
        Some(&config.node_name),
    )?;
    if config.remote_clusters.is_empty() && !is_remote(&config.registry) {
        return Ok(own_cluster);
    }
    let mut sources = vec![Source {
        registry: own_cluster,
        role: Role::Own,
        cached: is_remote(&config.registry),
    }];
    for remote in &config.remote_clusters {
        sources.push(Source {
            registry: open_one(&remote.registry, &remote.name, None, None)?,
            role: Role::Remote(remote.name.clone()),
            cached: is_remote(&remote.registry),
        });
    }
    let merged = MergedRegistry::new(sources, &config.location.state_dir);
    Ok(Box::new(merged))
}

#[cfg_attr(
    not(all(feature = "etcd", feature = "kubernetes")),
    expect(unused_variables, reason = "a file knows of no node by itself")
)]
fn open_one(
    spec: &RegistrySpec,
    cluster: &str,
    own: Option<Node>,
    own_name: Option<&str>,
) -> Result<Box<dyn Registry>, OpenError> {
    Ok(match spec {
        RegistrySpec::File(path) => Box::new(FileRegistry::open(path, cluster)?),
        #[cfg(feature = "etcd")]
        RegistrySpec::Etcd(urls) => {
            Box::new(EtcdRegistry::open(EtcdSpec::members(urls), cluster, own)?)
        }
        #[cfg(feature = "etcd")]
        RegistrySpec::EtcdConfig(path) => {
            Box::new(EtcdRegistry::open(EtcdSpec::config(path), cluster, own)?)
        }
        #[cfg(feature = "kubernetes")]
        RegistrySpec::Kubernetes(kubeconfig) => Box::new(KubernetesRegistry::open(
            kubeconfig.as_deref(),
            cluster,
            own_name,
        )?),
        #[cfg(not(all(feature = "etcd", feature = "kubernetes")))]
        other => return Err(OpenError::NotBuilt(other.clone())),
    })
}

/// Deletes a node's record from a registry in which nodes register themselves, trying each member once. Returns
/// whether there was one; of other registries there is none. The error says why it may still be there.
pub async fn deregister(spec: &RegistrySpec, cluster: &str, node: &str) -> Result<bool, String> {
    match spec {
        RegistrySpec::File(_) | RegistrySpec::Kubernetes(_) => Ok(false),
        #[cfg(feature = "etcd")]
        RegistrySpec::Etcd(urls) => etcd::deregister(&EtcdSpec::members(urls), cluster, node).await,
        #[cfg(feature = "etcd")]
        RegistrySpec::EtcdConfig(path) => {
            etcd::deregister(&EtcdSpec::config(path), cluster, node).await
        }
        #[cfg(not(feature = "etcd"))]
        RegistrySpec::Etcd(_) | RegistrySpec::EtcdConfig(_) => {
            let _ = (cluster, node);
            Err(OpenError::NotBuilt(spec.clone()).to_string())
        }
    }
}

/// Whether a registry is elsewhere, and may be away.
fn is_remote(spec: &RegistrySpec) -> bool {
    !matches!(spec, RegistrySpec::File(_))
}
