//! What the agent reads and writes, against a real API server on etcd, with the permissions that `deploy/kubernetes/rbac.yaml`
//! grants.

mod identities;
mod nodes;
mod pods;
mod services;

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use serde_json::Value;
use tempfile::TempDir;
use tests::PATIENCE;
use tests::kubernetes::{ControlPlane, connect};
use tokio::sync::watch::Receiver;

const RBAC: &str = include_str!("../../../../deploy/kubernetes/rbac.yaml");
const CRDS: &str = include_str!("../../../../deploy/kubernetes/crds.yaml");

/// An API server on etcd, without controllers, that knows the agents' account.
struct ApiServer {
    // Fields are dropped in this order.
    plane: ControlPlane,
    _folder: TempDir,
}

impl ApiServer {
    fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let plane = ControlPlane::without_controllers(folder.path(), connect()?, &[])?;
        let server = Self {
            plane,
            _folder: folder,
        };
        server.apply(RBAC)?;
        Ok(server)
    }

    /// Creates or changes the objects of a YAML text.
    fn apply(&self, yaml: &str) -> anyhow::Result<()> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(yaml)?;
        self.plane.apply(&objects)
    }

    /// The kubeconfig of the agents' account.
    fn agents(&self) -> anyhow::Result<PathBuf> {
        let token = "create token --namespace=health-agent health-agent";
        let token = self.plane.kubectl(token)?;
        self.plane.write_kubeconfig("agent", token.trim())
    }

    /// Takes the agents' permissions away, which a server that restarts applies at the next request.
    fn revoke(&mut self) -> anyhow::Result<()> {
        self.plane
            .kubectl("delete clusterrolebinding health-agent")?;
        self.plane.kill_api_server();
        self.plane.start_api_server()
    }
}

/// Waits until what is watched is as it should be, and returns it.
async fn until<T: Debug>(
    watch: &mut Receiver<Arc<T>>,
    what: &str,
    is_reached: impl Fn(&T) -> bool,
) -> anyhow::Result<Arc<T>> {
    let reached = tokio::time::timeout(PATIENCE, watch.wait_for(|now| is_reached(now))).await;
    let reached = reached.map(|now| now.map(|now| now.clone()));
    match reached {
        Ok(now) => now.context("the watch ended"),
        Err(_) => anyhow::bail!("waited in vain for {what}; it is {:?}", watch.borrow()),
    }
}
