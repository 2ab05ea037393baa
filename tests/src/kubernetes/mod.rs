//! A real Kubernetes cluster on a machine of its own: the control plane, and nodes with containerd and a kubelet, which
//! are machines within it. The agents run as pods of `deploy/kubernetes`, with the CNI plugin and in place of kube-proxy.
//!
//! `tests/kubernetes/build.sh` builds the programs of Kubernetes. Their version has endpoint slices of `v1beta1` only,
//! which a part of this module translates.

mod control_plane;
mod images;
mod node;
mod programs;
mod slices;

use std::net::Ipv4Addr;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tempfile::TempDir;

use self::images::Images;
use self::node::{BRIDGE, CONTROL_PLANE, sh};
use self::slices::Slices;
use crate::deploy::{self, Inputs};
use crate::{PATIENCE, wait_for};

pub use self::control_plane::ControlPlane;
pub use self::node::ClusterNode;

/// The image of pods that the cluster has: busybox with a web server.
pub const WORKLOAD: &str = Images::WORKLOAD;

/// The first node's last byte of its addresses.
const FIRST_SUFFIX: u8 = 11;
/// The components of `deploy/kubernetes` that agents run with.
const COMPONENTS: [&str; 2] = ["cni", "services"];
/// Enough for a mesh key.
const MESH_KEY: &str = "a key of the test's own, of 32 bytes or more";

/// A cluster. Everything goes with it but its machine's bridge, which goes with the machine.
#[derive(Debug)]
pub struct Cluster {
    // Fields are dropped in this order.
    nodes: Vec<ClusterNode>,
    _slices: Slices,
    /// etcd, the API server, the controllers and the scheduler.
    pub plane: ControlPlane,
    images: Images,
    _folder: TempDir,
}

impl Cluster {
    /// Starts a cluster with nodes of these names, and waits until the agents run and all nodes are ready.
    pub fn start(names: &[&str]) -> anyhow::Result<Self> {
        let cluster = Self::boot(names)?;
        cluster.wait_until_ready()?;
        Ok(cluster)
    }

    /// Starts a cluster with nodes of these names.
    pub fn boot(names: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("hkube-").tempdir();
        let folder = folder.context("cannot create a folder for a cluster")?;
        let path = folder.path();
        let images = Images::make(&path.join("images"))?;
        let plane = ControlPlane::start(path, connect()?, names)?;
        let slices = Slices::serve(&plane, path)?;
        let nodes = (FIRST_SUFFIX..)
            .zip(names)
            .map(|(suffix, name)| ClusterNode::new(path, name, suffix));
        let mut cluster = Self {
            nodes: nodes.collect(),
            _slices: slices,
            plane,
            images,
            _folder: folder,
        };
        for node in &mut cluster.nodes {
            node.boot(&cluster.plane, &cluster.images)?;
        }
        cluster.deploy()?;
        Ok(cluster)
    }

    /// Creates the objects of `deploy/kubernetes`.
    fn deploy(&self) -> anyhow::Result<()> {
        let inputs = Inputs {
            api_server: &CONTROL_PLANE.to_string(),
            mesh_key: MESH_KEY,
        };
        let objects = deploy::objects(&COMPONENTS, inputs)?;
        self.plane.apply(&objects)
    }

    /// Waits until all nodes are ready and each has an agent.
    pub fn wait_until_ready(&self) -> anyhow::Result<()> {
        wait_for("all nodes to be ready", PATIENCE, || {
            let nodes = self.plane.get("nodes")?;
            let nodes = nodes["items"].as_array().context("no list of nodes")?;
            let ready = nodes.iter().filter(|node| is_ready(node)).count();
            ensure!(
                ready == self.nodes.len(),
                "{ready} of {} nodes are ready",
                self.nodes.len()
            );
            Ok(Some(()))
        })?;
        self.plane
            .kubectl(
                "rollout status --namespace health-agent daemonset/health-agent --timeout 120s",
            )
            .map(drop)
    }

    /// A node, by its name.
    pub fn node(&self, name: &str) -> anyhow::Result<&ClusterNode> {
        let mut nodes = self.nodes.iter();
        let node = nodes.find(|node| node.name() == name);
        node.with_context(|| format!("there is no node {name}"))
    }

    /// All nodes.
    pub fn nodes(&self) -> &[ClusterNode] {
        &self.nodes
    }

    /// Cuts a node's power and starts it again, with its disks.
    pub fn reboot(&mut self, name: &str) -> anyhow::Result<()> {
        let mut nodes = self.nodes.iter_mut();
        let node = nodes.find(|node| node.name() == name);
        let node = node.with_context(|| format!("there is no node {name}"))?;
        node.cut_power();
        node.boot(&self.plane, &self.images)
    }

    /// Creates or changes the objects of a YAML text.
    pub fn apply(&self, yaml: &str) -> anyhow::Result<()> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(yaml)?;
        self.plane.apply(&objects)
    }
}

/// Makes the bridge that connects the machines of nodes, and returns the control plane's address on it.
pub fn connect() -> anyhow::Result<Ipv4Addr> {
    for words in [
        format!("ip link add {BRIDGE} type bridge"),
        format!("ip address add {CONTROL_PLANE}/24 dev {BRIDGE}"),
        format!("ip link set {BRIDGE} up"),
    ] {
        sh(&words)?;
    }
    Ok(CONTROL_PLANE)
}

/// Whether a node or pod has the condition `Ready`.
pub fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|conditions| {
        conditions
            .iter()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    })
}
