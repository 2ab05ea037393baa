//! The node registry: the nodes in the mesh and their addresses.

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

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use health_model::activity::Controller;
use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::watch;

#[cfg(feature = "etcd")]
use self::etcd::{EtcdRegistry, EtcdSpec};
use self::file::{FileError, FileRegistry};
#[cfg(feature = "kubernetes")]
use self::kubernetes::{AccessError, KubernetesRegistry};
use self::merge::{MergedRegistry, Role, Source};
#[cfg(feature = "etcd")]
use crate::etcd::EtcdConfigError;
use health_settings::{RegistrySpec, Settings};

pub use self::cache::FILE as CACHE_FILE;
pub use self::heard::LastHeard;

/// Name of the controller that follows the registry of this cluster. For a remote cluster, `-` and its name follow.
const WATCH: &str = "node-registry";
/// Name of the controller that keeps this node registered.
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
const PUBLISHING: &str = "node-publishing";

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Name, unique within the cluster.
    pub name: String,
    /// Name of the node's cluster.
    pub cluster: String,
    /// The node's own addresses, at least one. The first of each family is probed as the node's address.
    pub addresses: Vec<IpAddr>,
    /// Other addresses of the node, probed as secondary addresses.
    pub secondary_addresses: Vec<IpAddr>,
    /// Prefixes from which the node's endpoints get their addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses of the node's health endpoint. Empty if the registry does not list them; the node then reports them in
    /// its `/hello` response.
    pub health_addresses: Vec<IpAddr>,
    /// Labels of the node's object in Kubernetes. Other registries have none.
    pub labels: BTreeMap<String, String>,
}

impl Node {
    /// `cluster/node`, the name used in reports.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.cluster, self.name)
    }
}

/// The contents of the registries at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSet {
    /// Sorted by full name. No address is listed twice.
    pub nodes: Vec<Node>,
    /// The registries that the nodes come from, and their state.
    pub sources: Vec<SourceState>,
}

/// State of one registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceState {
    /// The registry as written in the settings: `file:/etc/nodes.yaml`.
    pub registry: String,
    /// The cluster whose nodes the registry holds.
    pub cluster: String,
    /// When the registry's nodes were last known to be correct.
    pub heard: LastHeard,
    /// Since when and why the registry cannot be read. Meanwhile its nodes are the last good set.
    pub stale: Option<Staleness>,
    /// Entries that were skipped.
    pub rejected: Vec<UnusableEntry>,
}

/// A registry that does not respond, or whose contents are unusable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staleness {
    /// When the registry's nodes were last known to be correct.
    pub since: Timestamp,
    /// The problem.
    pub reason: String,
}

impl Staleness {
    /// Describes which `objects` are in use meanwhile, and why.
    pub fn using(&self, objects: &str) -> String {
        format!(
            "using the {objects} as of {:.0}: {}",
            self.since, self.reason
        )
    }
}

/// A registry entry that cannot be used. Other entries are not affected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableEntry {
    /// The entry's key or name in the registry.
    pub key: String,
    /// The problem with the entry.
    pub reason: String,
}

/// How the cluster sees this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Unknown: the registry has not been read yet, does not report this, or does not list this node.
    Unknown,
    /// The cluster knows this node.
    Known {
        /// Whether the node's object is being deleted.
        is_deleting: bool,
        /// Keys of the node's taints.
        taints: Vec<String>,
        /// The node's zone.
        zone: Option<String>,
    },
}

/// A source of nodes. An error of the source never empties the set.
pub trait Registry: Send + Sync {
    /// Follows the set: first the current one, then each new one.
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>>;

    /// Registers this node and keeps it registered. A later call replaces the earlier registration. Read-only
    /// registries ignore the call.
    fn publish(&self, own: Node);

    /// Follows how the cluster sees this node. Only Kubernetes reports this.
    fn standing(&self) -> watch::Receiver<Standing> {
        watch::channel(Standing::Unknown).1
    }

    /// What is known about the parts that follow the registry, and that register this node: first the former.
    fn controllers(&self) -> Vec<Controller>;
}

/// Why a registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The settings of an etcd cluster cannot be used.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Etcd(#[from] EtcdConfigError),
    /// The kubeconfig of a Kubernetes cluster cannot be used.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] AccessError),
    /// This agent was built without support for that kind of registry.
    #[error(
        "cannot use {0}: this agent was built without that kind of registry; use another build, or a file"
    )]
    NotBuilt(RegistrySpec),
}

/// Opens the registries that the settings name. `own` is this node, if known from the settings; it is then in the set
/// from the start. Fails only if the settings cannot be used. A registry that does not respond is retried, and its last
/// known contents are used meanwhile. Must be called in a tokio runtime.
pub fn open(config: &Settings, own: Option<Node>) -> Result<Box<dyn Registry>, OpenError> {
    let own_cluster = open_one(
        &config.node.registry,
        &config.node.cluster_name,
        own,
        Some(&config.node.node_name),
    )?;
    if config.node.remote_clusters.is_empty() && !is_remote(&config.node.registry) {
        return Ok(own_cluster);
    }
    let mut sources = vec![Source {
        registry: own_cluster,
        role: Role::Own,
        cached: is_remote(&config.node.registry),
    }];
    for remote in &config.node.remote_clusters {
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

/// Deletes a node's record from a registry in which nodes register themselves, trying each member once. Returns whether
/// a record existed; other kinds of registry have no records. After an error, the record may still exist.
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

/// Whether a registry is on another host, and so may be unreachable.
fn is_remote(spec: &RegistrySpec) -> bool {
    !matches!(spec, RegistrySpec::File(_))
}
