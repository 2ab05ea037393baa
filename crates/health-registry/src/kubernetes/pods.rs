//! The pods of one node, as the cluster's API server reports them.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{ObjectWatch, Scope};

/// Starts to follow the pods that the cluster has scheduled on a node. Uses the kubeconfig at the given path, else the
/// service account of this process's pod, else the environment's kubeconfig. `read` converts an object to the form that
/// is kept; it is also passed the previous result for the pod of that name.
///
/// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
pub fn watch_pods<T: PartialEq + Send + Sync + 'static>(
    kubeconfig: Option<&Path>,
    node: &str,
    read: impl FnMut(Value, Option<&T>) -> T + Send + 'static,
) -> Result<ObjectWatch<T>, AccessError> {
    let scope = Scope {
        resource: "pods",
        kind: ApiResource::erase::<Pod>(&()),
        labels: None,
        fields: Some(format!("spec.nodeName={node}")),
        can_be_empty: true,
    };
    Ok(ObjectWatch::start(Access::find(kubeconfig)?, scope, read))
}
