//! This node's pods in Kubernetes, as a source of container probes.

use std::sync::Arc;

use health_model::api::PodProblem;
use health_model::task::AbortOnDrop;
use health_probe::source::{ObjectPod, PodSet};
use health_registry::kubernetes::{AccessError, ObjectTable, ObjectWatch, watch_pods};
use health_settings::{ApiAccess, Settings};
use tokio::sync::watch;

/// Follows this node's pods until dropped.
pub(super) struct KubernetesPods {
    pods: watch::Receiver<Arc<PodSet>>,
    _watch: ObjectWatch<ObjectPod>,
    _task: AbortOnDrop,
}

impl KubernetesPods {
    /// Starts watching the pods without waiting for a response. Fails if no credentials are available. Must be called
    /// in a tokio runtime.
    pub(super) fn open(access: &ApiAccess, config: &Settings) -> Result<Self, AccessError> {
        let kubeconfig = access.kubeconfig(&config.node.registry);
        let watch = watch_pods(kubeconfig, &config.node.node_name, ObjectPod::read)?;
        let mut tables = watch.table();
        let (sender, pods) = watch::channel(Arc::default());
        let task = AbortOnDrop::spawn(async move {
            loop {
                let set = pod_set(&tables.borrow_and_update());
                sender.send_replace(Arc::new(set));
                if tables.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            pods,
            _watch: watch,
            _task: task,
        })
    }

    /// The current pods, updated whenever they change.
    pub(super) fn pods(&self) -> watch::Receiver<Arc<PodSet>> {
        self.pods.clone()
    }
}

fn pod_set(table: &ObjectTable<ObjectPod>) -> PodSet {
    let outage = table.stale.as_ref().map(|stale| PodProblem {
        subject: "kubernetes".to_owned(),
        problem: format!("using the pods as of {:.0}: {}", stale.since, stale.reason),
    });
    let read = || table.objects.values();
    PodSet {
        pods: read().filter_map(|pod| pod.pod()).cloned().collect(),
        problems: outage
            .into_iter()
            .chain(read().flat_map(|pod| pod.problems()))
            .collect(),
        is_complete: table.is_complete,
    }
}
