//! The pods of one node, as its cluster's API server has them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::access::{Access, AccessError};
use super::follow::{Follower, Kept, unheard};
use crate::nodes::{LastHeard, Staleness};

/// The pods of a node.
#[derive(Debug, PartialEq)]
pub struct PodTable<T> {
    /// What was made of each, by `NAMESPACE/NAME`.
    pub pods: BTreeMap<String, Arc<T>>,
    /// Since when they may no longer be right, and why; they are as they were then.
    pub stale: Option<Staleness>,
    /// Whether there was a complete list: a pod that is not in it is not there.
    pub is_complete: bool,
}

impl<T> Clone for PodTable<T> {
    fn clone(&self) -> Self {
        Self {
            pods: self.pods.clone(),
            stale: self.stale.clone(),
            is_complete: self.is_complete,
        }
    }
}

/// Follows the pods of a node. Dropping it ends the watch.
#[derive(Debug)]
pub struct PodWatch<T> {
    pods: watch::Receiver<Arc<PodTable<T>>>,
    task: JoinHandle<()>,
}

impl<T: PartialEq + Send + Sync + 'static> PodWatch<T> {
    /// Begins to follow the pods that the cluster has put on a node: by the kubeconfig at a path, or with the service
    /// account of the pod that this process is in, or with the kubeconfig of the environment. `read` makes of an object
    /// what is kept of it; it gets what was made of the pod of that name before.
    ///
    /// Fails when there are no credentials to be had. Waits for no answer. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        node: &str,
        read: impl FnMut(Value, Option<&T>) -> T + Send + 'static,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let heard = LastHeard::now();
        let table = PodTable {
            pods: BTreeMap::new(),
            stale: Some(unheard(&heard)),
            is_complete: false,
        };
        let (sender, pods) = watch::channel(Arc::new(table.clone()));
        let kept = KeptPods {
            node: node.to_owned(),
            read,
            table,
            listed: BTreeMap::new(),
            is_told: false,
            sender,
        };
        let follower = Follower::new(access, heard, kept);
        Ok(Self {
            pods,
            task: tokio::spawn(follower.run()),
        })
    }

    /// The pods, now and whenever they change.
    pub fn pods(&self) -> watch::Receiver<Arc<PodTable<T>>> {
        self.pods.clone()
    }
}

impl<T> Drop for PodWatch<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct KeptPods<T, R> {
    node: String,
    read: R,
    table: PodTable<T>,
    /// Those of a list that is not complete yet.
    listed: BTreeMap<String, Arc<T>>,
    /// Whether the log says that the pods are not up to date.
    is_told: bool,
    sender: watch::Sender<Arc<PodTable<T>>>,
}

impl<T, R: FnMut(Value, Option<&T>) -> T> KeptPods<T, R> {
    fn read(&mut self, object: DynamicObject) -> (String, T) {
        let key = key(&object);
        let before = self.table.pods.get(&key).map(Arc::as_ref);
        let read = (self.read)(value(object), before);
        (key, read)
    }
}

impl<T, R> Kept for KeptPods<T, R>
where
    T: PartialEq + Send + Sync,
    R: FnMut(Value, Option<&T>) -> T + Send,
{
    type Object = DynamicObject;
    const RESOURCE: &'static str = "pods";

    fn api(&self, client: Client) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
        Api::all_with(client, &kind)
    }

    fn select(&self, config: watcher::Config) -> watcher::Config {
        config.fields(&format!("spec.nodeName={}", self.node))
    }

    fn begin_list(&mut self) {
        self.listed.clear();
    }

    fn list(&mut self, object: DynamicObject) {
        let (key, read) = self.read(object);
        self.listed.insert(key, Arc::new(read));
    }

    fn end_list(&mut self) -> Result<(), String> {
        self.table.pods = std::mem::take(&mut self.listed);
        self.table.is_complete = true;
        Ok(())
    }

    fn apply(&mut self, object: DynamicObject) -> bool {
        let (key, read) = self.read(object);
        if self
            .table
            .pods
            .get(&key)
            .is_some_and(|before| **before == read)
        {
            return false;
        }
        self.table.pods.insert(key, Arc::new(read));
        true
    }

    fn delete(&mut self, object: DynamicObject) -> bool {
        self.table.pods.remove(&key(&object)).is_some()
    }

    fn publish(&mut self) {
        let next = Arc::new(self.table.clone());
        self.sender.send_if_modified(|table| {
            let differs = **table != *next;
            if differs {
                *table = next;
            }
            differs
        });
    }

    fn set_stale(&mut self, stale: Option<Staleness>) {
        match &stale {
            Some(stale) if !self.is_told => {
                self.is_told = true;
                tracing::warn!(
                    reason = stale.reason,
                    "pods of Kubernetes are not up to date; they stay as they were"
                );
            }
            Some(_) => {}
            None => {
                self.is_told = false;
                tracing::info!(
                    pods = self.table.pods.len(),
                    "pods of Kubernetes are up to date"
                );
            }
        }
        self.table.stale = stale;
        self.publish();
    }
}

fn key(object: &DynamicObject) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &object.metadata;
    format!("{}/{}", part(&metadata.namespace), part(&metadata.name))
}

/// The object as the API has it, without what of its metadata only the API itself needs.
fn value(object: DynamicObject) -> Value {
    let DynamicObject {
        metadata, mut data, ..
    } = object;
    data["apiVersion"] = "v1".into();
    data["kind"] = "Pod".into();
    data["metadata"] = json!({
        "name": metadata.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
        "annotations": metadata.annotations,
        "deletionTimestamp": metadata.deletion_timestamp,
    });
    data
}
