//! The node registry: who is in the mesh, and under which addresses.

pub mod document;
pub mod file;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::watch;

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

/// A registry's view at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSet {
    /// Sorted by full name.
    pub nodes: Vec<Node>,
    /// Why the last update was refused; `nodes` is then the last good set.
    pub stale: Option<String>,
}

/// Where nodes come from. An error of the source never empties the set.
pub trait Registry {
    /// The current set, and each that follows.
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>>;
}
