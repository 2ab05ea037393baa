//! The node registry in a Kubernetes cluster. Follows the Node objects, and stores this node's health addresses in
//! annotations of the node's own object.

mod kept;
mod object;
mod publish;
mod view;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use health_model::activity::Controller;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::kept::{KeptNodes, OwnObject};
pub use self::object::{EXCLUDE_LABEL, IPV4_HEALTH_ANNOTATION, IPV6_HEALTH_ANNOTATION};
use self::publish::Publisher;
use super::{LastHeard, Node, NodeSet, PUBLISHING, Registry, Standing, WATCH};
use crate::kubernetes::access::Access;
use crate::kubernetes::follow::Follower;
use health_settings::RegistrySpec;

pub use crate::kubernetes::AccessError;

/// The node registry in a Kubernetes cluster. Dropping it ends the watch; annotations stay.
#[derive(Debug)]
pub struct KubernetesRegistry {
    nodes: watch::Receiver<Arc<NodeSet>>,
    standing: watch::Receiver<Standing>,
    wanted: watch::Sender<Option<Vec<IpAddr>>>,
    controllers: [Controller; 2],
    tasks: [JoinHandle<()>; 2],
}

impl KubernetesRegistry {
    /// Starts to follow the nodes of `cluster`. Uses the kubeconfig at the given path, else the service account of this
    /// process's pod, else the environment's kubeconfig. `node_name` is the Node object that [`Registry::publish`]
    /// annotates; without it, as for remote clusters, nothing is written.
    ///
    /// Fails if there are no credentials. Does not wait for a response: until the first response, the set is empty and
    /// says why. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        cluster: &str,
        node_name: Option<&str>,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let spec = RegistrySpec::Kubernetes(kubeconfig.map(Path::to_owned));
        let (annotated, seen) = watch::channel(None);
        let (reported, standing) = watch::channel(Standing::Unknown);
        let (wanted, wanted_receiver) = watch::channel(None);
        let heard = LastHeard::now();
        let (kept, nodes) = KeptNodes::new(
            spec.to_string(),
            cluster.to_owned(),
            node_name.map(|name| OwnObject {
                name: name.to_owned(),
                annotated,
                standing: reported,
            }),
            heard.clone(),
        );
        let follower = Follower::new(access.clone(), heard, kept);
        let publisher = Publisher::new(access, node_name.map(str::to_owned), wanted_receiver, seen);
        Ok(Self {
            nodes,
            standing,
            wanted,
            controllers: [
                Controller::new(WATCH, follower.activity()),
                Controller::new(PUBLISHING, publisher.activity()),
            ],
            tasks: [tokio::spawn(follower.run()), tokio::spawn(publisher.run())],
        })
    }
}

impl Drop for KubernetesRegistry {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Registry for KubernetesRegistry {
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>> {
        self.nodes.clone()
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// Annotates this node's object with its health addresses. All other fields belong to the cluster.
    fn publish(&self, own: Node) {
        self.wanted.send_replace(Some(own.health_addresses));
    }

    fn controllers(&self) -> Vec<Controller> {
        self.controllers.to_vec()
    }
}
