//! This node, its cluster, and where the nodes of the mesh come from.

use std::env;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::OnceLock;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use health_model::address::parse_ip;

use super::form::Common;
use super::registry::{RegistrySpec, RemoteCluster};

/// The default registry.
const REGISTRY: &str = "file:/etc/health-agent/nodes.yaml";

/// The default type of the node's condition.
const NODE_CONDITION: &str = "HealthAgentReady";

/// This node and the sources of nodes and identities.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Node")]
pub struct NodeSettings {
    /// Name of this node in the node registry [default: the host name]
    #[arg(long, value_name = "NAME", default_value_t = host_name(), hide_default_value = true, add = Common)]
    pub node_name: String,
    /// Name of the cluster that this node belongs to
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub cluster_name: String,
    /// Source of the nodes of this cluster: file:PATH, etcd:URL[,URL...], etcd:PATH of a configuration file, or
    /// kubernetes[:PATH of a kubeconfig]
    #[arg(long, value_name = "REGISTRY", default_value = REGISTRY, add = Common)]
    pub registry: RegistrySpec,
    /// File with the node registry, read again when it changes; short for --registry file:FILE
    #[arg(long, value_name = "FILE", value_parser = absolute_path(), add = Common)]
    pub nodes_file: Option<PathBuf>,
    /// Another cluster to probe, and its registry (repeatable)
    #[arg(long = "remote-cluster", value_name = "NAME=REGISTRY", add = Common)]
    pub remote_clusters: Vec<RemoteCluster>,
    /// Store of the identities of this cluster, the same on all its nodes: file:PATH, etcd:URL[,URL...], etcd:PATH of
    /// a configuration file, or kubernetes[:PATH of a kubeconfig] [default: --registry if that is etcd or Kubernetes,
    /// else file:identities.json in --state-dir]
    #[arg(long, value_name = "STORE")]
    pub identity_store: Option<RegistrySpec>,
    /// Address that this node registers in etcd (repeatable or comma-separated) [default: the first of each IP
    /// version on --device, or on the interface with the default route]
    #[arg(
        long = "node-address", value_name = "IP", value_parser = parse_ip, value_delimiter = ',',
        add = Common
    )]
    pub node_addresses: Vec<IpAddr>,
    /// Name of an uplink interface (repeatable or comma-separated) [default: the interfaces that carry the node's
    /// addresses]
    #[arg(long = "device", value_name = "INTERFACE", value_delimiter = ',', add = Common)]
    pub devices: Vec<String>,
    /// Report the agent's state as a condition of this node's object, with this type; needs --registry kubernetes
    #[arg(
        long, value_name = "TYPE", num_args = 0..=1, require_equals = true, default_missing_value = NODE_CONDITION
    )]
    pub node_condition: Option<String>,
    /// File with the mesh key, a secret of at least 16 bytes, the same on all nodes: agents use it to authenticate
    /// each other and to recognise each other's ICMP probes; a second key in FILE.previous or FILE.next is also
    /// accepted [default: a well-known key, which gives no protection]
    #[arg(long, value_name = "FILE", value_parser = absolute_path(), add = Common)]
    pub mesh_key_file: Option<PathBuf>,
}

impl NodeSettings {
    /// This node's name prefixed with its cluster's: `CLUSTER/NODE`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.cluster_name, self.node_name)
    }
}

/// The host name; empty if unreadable, in which case `--node-name` is required.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().to_owned()
}

/// Resolves a path relative to the working folder at the first call, because entering the host's mount namespace
/// changes the working folder.
pub fn absolute_path() -> impl TypedValueParser<Value = PathBuf> {
    static START: OnceLock<Option<PathBuf>> = OnceLock::new();
    let start = START.get_or_init(|| env::current_dir().ok());
    PathBufValueParser::new().try_map(move |path| match start {
        Some(start) => std::path::absolute(start.join(path)),
        None => std::path::absolute(path),
    })
}
