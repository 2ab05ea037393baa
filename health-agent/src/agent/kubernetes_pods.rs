//! This node's pods in Kubernetes, as a source of endpoint labels and of container probes.

use std::sync::Arc;

use health_endpoint::pods::{LabelledPod, PodLabels};
use health_model::api::PodProblem;
use health_model::labels::filter::LabelFilter;
use health_model::labels::pod::{self, Labels};
use health_model::task::AbortOnDrop;
use health_probe::source::{ObjectPod, PodSet};
use health_registry::kubernetes::{
    AccessError, NamespaceLabels, ObjectTable, ObjectWatch, PodMetadata, watch_namespaces,
    watch_pods,
};
use health_settings::{ApiAccess, RegistrySpec, Settings};
use tokio::sync::watch;

/// Follows this node's pods until dropped.
pub(super) struct KubernetesPods {
    labels: watch::Receiver<Arc<PodLabels>>,
    probed: Option<watch::Receiver<Arc<PodSet>>>,
    _pods: ObjectWatch<ReadPod>,
    _namespaces: ObjectWatch<NamespaceLabels>,
    _tasks: Vec<AbortOnDrop>,
}

/// The parts of a pod that the agent needs.
#[derive(Debug, PartialEq)]
struct ReadPod {
    metadata: PodMetadata,
    /// `None` if this agent probes no containers of Kubernetes pods.
    probes: Option<ObjectPod>,
}

impl KubernetesPods {
    /// Starts watching the pods without waiting for a response. Returns `None` if the settings name no API server.
    /// Fails if no credentials are available. Must be called in a tokio runtime.
    pub(super) fn open(config: &Settings) -> Result<Option<Self>, AccessError> {
        let registry = &config.node.registry;
        let access = config.containers.pods_from_kubernetes.as_ref();
        if access.is_none() && !matches!(registry, RegistrySpec::Kubernetes(_)) {
            return Ok(None);
        }
        let kubeconfig = access.unwrap_or(&ApiAccess::Default).kubeconfig(registry);
        let is_probing = access.is_some();
        let pods = watch_pods(kubeconfig, &config.node.node_name, move |object, before| {
            read(object, before, is_probing)
        })?;
        let namespaces = watch_namespaces(kubeconfig)?;
        let labeller = Labeller {
            cluster: config.node.cluster_name.clone(),
            filter: LabelFilter::with(&config.endpoints.identity_labels),
        };
        let (labels, follow_labels) = labeller.follow(pods.table(), namespaces.table());
        let mut tasks = vec![follow_labels];
        let probed = is_probing.then(|| {
            let (probed, follow_probed) = follow_probed(pods.table());
            tasks.push(follow_probed);
            probed
        });
        Ok(Some(Self {
            labels,
            probed,
            _pods: pods,
            _namespaces: namespaces,
            _tasks: tasks,
        }))
    }

    /// The current labels of the pods, updated whenever they change.
    pub(super) fn labels(&self) -> watch::Receiver<Arc<PodLabels>> {
        self.labels.clone()
    }

    /// The current pods to probe, updated whenever they change; `None` if this agent does not probe Kubernetes pods.
    pub(super) fn probed(&self) -> Option<watch::Receiver<Arc<PodSet>>> {
        self.probed.clone()
    }
}

fn read(object: serde_json::Value, before: Option<&ReadPod>, is_probing: bool) -> ReadPod {
    let metadata = PodMetadata::read(&object);
    let probes = is_probing.then(|| {
        let before = before.and_then(|before| before.probes.as_ref());
        ObjectPod::read(object, before)
    });
    ReadPod { metadata, probes }
}

/// Assigns labels to pods.
struct Labeller {
    cluster: String,
    filter: LabelFilter,
}

impl Labeller {
    fn follow(
        self,
        mut pods: watch::Receiver<Arc<ObjectTable<ReadPod>>>,
        mut namespaces: watch::Receiver<Arc<ObjectTable<NamespaceLabels>>>,
    ) -> (watch::Receiver<Arc<PodLabels>>, AbortOnDrop) {
        let (sender, labels) = watch::channel(Arc::default());
        let task = AbortOnDrop::spawn(async move {
            loop {
                let next = {
                    let (pods, namespaces) =
                        (pods.borrow_and_update(), namespaces.borrow_and_update());
                    Arc::new(self.label(&pods, &namespaces))
                };
                sender.send_if_modified(|labels| {
                    let is_new = **labels != *next;
                    *labels = next;
                    is_new
                });
                let changed = tokio::select! {
                    changed = pods.changed() => changed,
                    changed = namespaces.changed() => changed,
                };
                if changed.is_err() {
                    return;
                }
            }
        });
        (labels, task)
    }

    /// The labels of all pods whose namespaces are known.
    fn label(
        &self,
        pods: &ObjectTable<ReadPod>,
        namespaces: &ObjectTable<NamespaceLabels>,
    ) -> PodLabels {
        let pods = pods.objects.iter().filter_map(|(name, pod)| {
            let PodMetadata {
                namespace,
                uids,
                labels,
                service_account,
            } = &pod.metadata;
            let namespace_labels: &Labels = &namespaces.objects.get(namespace)?.labels;
            let pod = pod::Pod {
                namespace,
                labels,
                service_account: service_account.as_deref(),
            };
            let identity = pod::identity_labels(pod, namespace_labels, &self.cluster, &self.filter);
            let uids = uids.clone();
            Some((name.clone(), LabelledPod { uids, identity }))
        });
        pods.collect()
    }
}

/// Starts following the pods to probe.
fn follow_probed(
    mut tables: watch::Receiver<Arc<ObjectTable<ReadPod>>>,
) -> (watch::Receiver<Arc<PodSet>>, AbortOnDrop) {
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
    (pods, task)
}

fn pod_set(table: &ObjectTable<ReadPod>) -> PodSet {
    let outage = table.stale.as_ref().map(|stale| PodProblem {
        subject: "kubernetes".to_owned(),
        problem: format!("using the pods as of {:.0}: {}", stale.since, stale.reason),
    });
    let read = || table.objects.values().filter_map(|pod| pod.probes.as_ref());
    PodSet {
        pods: read().filter_map(ObjectPod::pod).cloned().collect(),
        problems: outage
            .into_iter()
            .chain(read().flat_map(ObjectPod::problems))
            .collect(),
        is_complete: table.is_complete,
    }
}
