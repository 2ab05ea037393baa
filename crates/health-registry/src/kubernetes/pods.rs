//! The pods of one node, as its cluster's API server has them.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{ObjectWatch, Scope};

/// Begins to follow the pods that the cluster has put on a node: by the kubeconfig at a path, or with the service
/// account of the pod that this process is in, or with the kubeconfig of the environment. `read` makes of an object
/// what is kept of it; it gets what was made of the pod of that name before.
///
/// Fails when there are no credentials to be had. Waits for no answer. Must be called in a tokio runtime.
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
