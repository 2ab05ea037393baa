//! This node's pods in Kubernetes, as a source of endpoint labels and of container probes.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_endpoint::pods::{LabelledPod, PodLabels};
use health_model::activity::Controller;
use health_model::api::PodProblem;
use health_model::labels::filter::LabelFilter;
use health_model::labels::pod::{self, Labels};
use health_model::task::AbortOnDrop;
use health_probe::source::{ObjectPod, PodSet};
use health_registry::kubernetes::{AccessError, ObjectTable, PodMetadata, PodWatch};
use health_settings::{ApiAccess, Settings};
use tokio::sync::watch;

/// Follows this node's pods until dropped.
pub(super) struct KubernetesPods {
    labels: watch::Receiver<Arc<PodLabels>>,
    probed: Option<watch::Receiver<Arc<PodSet>>>,
    watch: PodWatch<ReadPod>,
    _tasks: Vec<AbortOnDrop>,
}

/// The parts of a pod that the agent needs.
#[derive(Debug, PartialEq)]
struct ReadPod {
    /// Shared with the object's next version if its metadata are equal.
    metadata: Arc<PodMetadata>,
    /// `None` if this agent probes no containers of Kubernetes pods.
    probes: Option<ObjectPod>,
}

impl KubernetesPods {
    /// Starts watching the pods without waiting for a response. Returns `None` if the settings name no API server.
    /// Fails if no credentials are available. Must be called in a tokio runtime.
    pub(super) fn open(config: &Settings) -> Result<Option<Self>, AccessError> {
        let access = config.containers.pods_from_kubernetes.as_ref();
        let Some(kubeconfig) = ApiAccess::of_cluster(access, &config.node.registry) else {
            return Ok(None);
        };
        let is_probing = access.is_some();
        let watch = PodWatch::open(kubeconfig, &config.node.node_name, move |object, before| {
            read(object, before, is_probing)
        })?;
        let labeller = Labeller {
            cluster: config.node.cluster_name.clone(),
            filter: LabelFilter::with(&config.endpoints.identity_labels),
            labelled: BTreeMap::new(),
        };
        let (labels, follow_labels) = labeller.follow(watch.pods.table(), watch.namespaces.table());
        let mut tasks = vec![follow_labels];
        let probed = is_probing.then(|| {
            let (probed, follow_probed) = follow_probed(watch.pods.table());
            tasks.push(follow_probed);
            probed
        });
        Ok(Some(Self {
            labels,
            probed,
            watch,
            _tasks: tasks,
        }))
    }

    /// What is known about the watches themselves.
    pub(super) fn controllers(&self) -> [Controller; 2] {
        [
            self.watch.pods.controller(),
            self.watch.namespaces.controller(),
        ]
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
    let known = before.map(|before| &before.metadata);
    let known = known.filter(|known| ***known == metadata).cloned();
    let metadata = known.unwrap_or_else(|| Arc::new(metadata));
    let probes = is_probing.then(|| {
        let before = before.and_then(|before| before.probes.as_ref());
        ObjectPod::read(object, before)
    });
    ReadPod { metadata, probes }
}

/// Assigns labels to pods. Most changes of a pod are of its status, so only pods whose metadata or namespace have
/// changed are labelled again.
struct Labeller {
    cluster: String,
    filter: LabelFilter,
    /// The labelled pods, by `NAMESPACE/NAME`.
    labelled: BTreeMap<String, Labelled>,
}

/// A pod's labels, and what they depend on.
struct Labelled {
    metadata: Arc<PodMetadata>,
    namespace: Arc<Labels>,
    pod: Arc<LabelledPod>,
}

impl Labeller {
    fn follow(
        mut self,
        mut pods: watch::Receiver<Arc<ObjectTable<ReadPod>>>,
        mut namespaces: watch::Receiver<Arc<ObjectTable<Labels>>>,
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
        &mut self,
        pods: &ObjectTable<ReadPod>,
        namespaces: &ObjectTable<Labels>,
    ) -> PodLabels {
        let mut former = std::mem::take(&mut self.labelled);
        for (name, ReadPod { metadata, .. }) in pods.objects.iter().map(|(k, pod)| (k, &**pod)) {
            let Some(namespace) = namespaces.objects.get(&metadata.namespace) else {
                continue;
            };
            let known = former.remove(name).filter(|known| {
                Arc::ptr_eq(&known.metadata, metadata) && Arc::ptr_eq(&known.namespace, namespace)
            });
            let labelled = known.unwrap_or_else(|| self.label_one(metadata, namespace));
            self.labelled.insert(name.clone(), labelled);
        }
        let labelled = self.labelled.iter();
        labelled
            .map(|(name, labelled)| (name.clone(), labelled.pod.clone()))
            .collect()
    }

    fn label_one(&self, metadata: &Arc<PodMetadata>, namespace: &Arc<Labels>) -> Labelled {
        let pod = pod::Pod {
            namespace: &metadata.namespace,
            labels: &metadata.labels,
            service_account: metadata.service_account.as_deref(),
            ports: &metadata.ports,
        };
        Labelled {
            metadata: metadata.clone(),
            namespace: namespace.clone(),
            pod: Arc::new(LabelledPod {
                uids: metadata.uids.clone(),
                identity: pod::identity_labels(pod, namespace, &self.cluster, &self.filter),
            }),
        }
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
        problem: stale.using("pods"),
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

#[cfg(test)]
mod tests {
    use health_model::api::PodName;
    use serde_json::json;

    use super::*;

    fn table<T>(objects: impl IntoIterator<Item = (String, Arc<T>)>) -> ObjectTable<T> {
        ObjectTable {
            objects: objects.into_iter().collect(),
            stale: None,
            is_complete: true,
            lacking: None,
        }
    }

    fn pod(app: &str, phase: &str, before: Option<&ReadPod>) -> ReadPod {
        pod_with_port(app, 8080, phase, before)
    }

    fn pod_with_port(app: &str, port: u16, phase: &str, before: Option<&ReadPod>) -> ReadPod {
        let ports = json!([{ "name": "web", "containerPort": port }]);
        let object = json!({
            "metadata": { "namespace": "shop", "name": "web", "uid": "u-1", "labels": { "app": app } },
            "spec": { "containers": [{ "name": "app", "ports": ports }] },
            "status": { "phase": phase },
        });
        read(object, before, true)
    }

    #[test]
    fn only_pods_whose_labels_may_differ_are_labelled_again() {
        let mut labeller = Labeller {
            cluster: "default".to_owned(),
            filter: LabelFilter::with(&[]),
            labelled: BTreeMap::new(),
        };
        let namespaces = |tier: &str| {
            let labels = Labels::from([("tier".to_owned(), tier.to_owned())]);
            table([("shop".to_owned(), Arc::new(labels))])
        };
        let pods = |pod: ReadPod| table([("shop/web".to_owned(), Arc::new(pod))]);
        let mut label = |pod: ReadPod, namespaces: &ObjectTable<Labels>| {
            let labels = labeller.label(&pods(pod), namespaces);
            let name = PodName {
                namespace: "shop".to_owned(),
                name: "web".to_owned(),
                uid: Some("u-1".to_owned()),
            };
            let identity = labels.of(&name).cloned().unwrap();
            let labelled = labeller.labelled["shop/web"].pod.clone();
            (labelled, identity.labels)
        };
        let gold = namespaces("gold");
        let pending = pod("web", "Pending", None);
        let running = pod("web", "Running", Some(&pending));
        let renamed = pod("db", "Running", Some(&running));
        let (first, labels) = label(pending, &gold);
        let (second, same) = label(running, &gold);
        assert!(Arc::ptr_eq(&first, &second) && labels == same);
        let moved = pod_with_port("db", 9090, "Running", Some(&renamed));
        let (_, of_pod) = label(renamed, &gold);
        assert_eq!(of_pod.get("k8s", "app").unwrap().value(), "db");
        assert_eq!(of_pod.get("port", "web").unwrap().value(), "8080/TCP");
        let (_, of_pod) = label(moved, &gold);
        assert_eq!(of_pod.get("port", "web").unwrap().value(), "9090/TCP");
        let (_, of_namespace) = label(pod("db", "Running", None), &namespaces("iron"));
        let tier = of_namespace.get("k8s", "io.cilium.k8s.namespace.labels.tier");
        assert_eq!(tier.unwrap().value(), "iron");
    }
}
