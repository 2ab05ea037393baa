//! The part of the cluster's Node objects that the agent keeps: the node set.

use std::sync::Arc;

use kube::Client;
use kube::api::{Api, ApiResource};
use kube::runtime::watcher;
use tokio::sync::watch;

use super::object::{NodeObject, Record, SELECTOR};
use super::view::View;
use crate::kubernetes::follow::{Kept, unheard};
use crate::nodes::{LastHeard, Node, NodeSet, SourceState, Staleness, Standing};

/// This node's own object, and the channels for its state.
pub(super) struct OwnObject {
    pub(super) name: String,
    /// The addresses in the object's annotations.
    pub(super) annotated: watch::Sender<Option<Vec<String>>>,
    pub(super) standing: watch::Sender<Standing>,
}

/// The nodes, and the channel for the node set.
pub(super) struct KeptNodes {
    cluster: String,
    own: Option<OwnObject>,
    view: View,
    state: SourceState,
    sender: watch::Sender<Arc<NodeSet>>,
}

impl KeptNodes {
    /// Creates an empty set, which is stale until the first response.
    pub(super) fn new(
        registry: String,
        cluster: String,
        own: Option<OwnObject>,
        heard: LastHeard,
    ) -> (Self, watch::Receiver<Arc<NodeSet>>) {
        let state = SourceState {
            registry,
            cluster: cluster.clone(),
            stale: Some(unheard(&heard)),
            heard,
            rejected: Vec::new(),
        };
        let set = NodeSet {
            nodes: Vec::new(),
            sources: vec![state.clone()],
        };
        let (sender, receiver) = watch::channel(Arc::new(set));
        let kept = Self {
            cluster,
            own,
            view: View::default(),
            state,
            sender,
        };
        (kept, receiver)
    }

    /// Publishes the state of this node's object. If the object is gone, the state is unknown: the watch looks the same
    /// when an operator excludes the node from the mesh.
    fn note_own(&self) {
        let Some(own) = &self.own else {
            return;
        };
        let record = self.view.get(&own.name);
        publish(
            &own.annotated,
            record.map(|own| own.health_addresses().to_vec()),
        );
        let standing = record.map_or(Standing::Unknown, Record::standing);
        publish(&own.standing, standing);
    }

    fn send(&self, nodes: Vec<Node>) {
        let next = NodeSet {
            nodes,
            sources: vec![self.state.clone()],
        };
        publish(&self.sender, Arc::new(next));
    }
}

/// Sends the value if it differs from the last one sent.
fn publish<T: PartialEq>(sender: &watch::Sender<T>, now: T) {
    sender.send_if_modified(|known| {
        let differs = *known != now;
        *known = now;
        differs
    });
}

impl Kept for KeptNodes {
    type Object = NodeObject;

    fn resource(&self) -> &'static str {
        "nodes"
    }

    fn api(&self, client: Client) -> Api<NodeObject> {
        let kind = ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&());
        Api::all_with(client, &kind)
    }

    fn select(&self, config: watcher::Config) -> watcher::Config {
        config.labels(SELECTOR)
    }

    fn begin_list(&mut self) {
        self.view.begin_list();
    }

    fn list(&mut self, object: NodeObject) {
        self.view.list(object.into());
    }

    fn end_list(&mut self) -> Result<(), String> {
        self.view.end_list().map_err(|empty| empty.to_string())?;
        self.note_own();
        Ok(())
    }

    fn apply(&mut self, object: NodeObject) -> bool {
        let changed = self.view.apply(object.into());
        if changed {
            self.note_own();
        }
        changed
    }

    fn delete(&mut self, object: NodeObject) -> bool {
        let changed = self.view.delete(Record::from(object).name());
        if changed {
            self.note_own();
        }
        changed
    }

    fn publish(&mut self) {
        let (nodes, rejected) = self.view.nodes(&self.cluster);
        for new in rejected
            .iter()
            .filter(|new| !self.state.rejected.contains(new))
        {
            tracing::warn!(
                registry = self.state.registry,
                node = new.key,
                reason = new.reason,
                "a node is left out"
            );
        }
        self.state.rejected = rejected;
        self.send(nodes);
    }

    fn set_stale(&mut self, stale: Option<Staleness>) {
        let nodes = self.sender.borrow().nodes.clone();
        match &stale {
            Some(stale) => tracing::warn!(
                registry = self.state.registry,
                cluster = self.cluster,
                reason = stale.reason,
                "nodes are not up to date; keeping the last good set"
            ),
            None => tracing::info!(
                registry = self.state.registry,
                cluster = self.cluster,
                nodes = nodes.len(),
                "nodes are up to date"
            ),
        }
        self.state.stale = stale;
        self.send(nodes);
    }
}
