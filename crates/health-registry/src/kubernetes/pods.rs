//! The pods of one node and the labels of namespaces, as the cluster's API server reports them.

use std::path::Path;

use health_model::labels::pod::Labels;
use health_model::manifest::MIRROR_ANNOTATION;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{ObjectWatch, Scope};

/// Follows the pods of one node and the labels of all namespaces, with a watch for each kind. Dropping it stops them.
#[derive(Debug)]
pub struct PodWatch<T> {
    /// The pods that the cluster has scheduled on the node.
    pub pods: ObjectWatch<T>,
    /// The labels of the namespaces.
    pub namespaces: ObjectWatch<Labels>,
}

impl<T: PartialEq + Send + Sync + 'static> PodWatch<T> {
    /// Starts to follow the pods and namespaces of a cluster. Uses the kubeconfig at the given path, else the service
    /// account of this process's pod, else the environment's kubeconfig. `read` converts a pod to the form that is
    /// kept; it is also passed the previous result for the pod of that name.
    ///
    /// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        node: &str,
        read: impl FnMut(Value, Option<&T>) -> T + Send + 'static,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let pods = Scope {
            resource: "pods",
            kind: ApiResource::erase::<Pod>(&()),
            labels: None,
            fields: Some(format!("spec.nodeName={node}")),
            can_be_empty: true,
            is_optional: false,
        };
        let namespaces = Scope {
            resource: "namespaces",
            kind: ApiResource::erase::<Namespace>(&()),
            labels: None,
            fields: None,
            can_be_empty: false,
            is_optional: false,
        };
        Ok(Self {
            pods: ObjectWatch::start(access.clone(), pods, read),
            namespaces: ObjectWatch::start(access, namespaces, |object, _| labels(&object)),
        })
    }
}

/// What the labels of a pod's identity depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodMetadata {
    /// Its namespace.
    pub namespace: String,
    /// The UID of the object, and for the mirror of a pod that a kubelet has from its own folder also that of the pod.
    pub uids: Vec<String>,
    /// Its labels.
    pub labels: Labels,
    /// Its service account, if the server has set it.
    pub service_account: Option<String>,
}

impl PodMetadata {
    /// Reads an object of kind `Pod`. The API server has validated it; fields with another type count as absent.
    pub fn read(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let metadata = &object["metadata"];
        let uids = [
            &metadata["uid"],
            &metadata["annotations"][MIRROR_ANNOTATION],
        ];
        Self {
            namespace: text(&metadata["namespace"]).unwrap_or_default(),
            uids: uids.into_iter().filter_map(text).collect(),
            labels: labels(object),
            service_account: text(&object["spec"]["serviceAccountName"]),
        }
    }
}

/// The labels of an object.
fn labels(object: &Value) -> Labels {
    let labels = object["metadata"]["labels"].as_object();
    let labels = labels.into_iter().flatten();
    labels
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}
