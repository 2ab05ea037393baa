//! The namespaces of a cluster, as its API server reports them.

use std::path::Path;

use health_model::labels::pod::Labels;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::ApiResource;

use super::access::{Access, AccessError};
use super::objects::{ObjectWatch, Scope};
use super::pods::labels;

/// The labels of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLabels {
    /// By key.
    pub labels: Labels,
}

/// Starts to follow the namespaces of a cluster, by name. Uses the kubeconfig at the given path, else the service
/// account of this process's pod, else the environment's kubeconfig.
///
/// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
pub fn watch_namespaces(
    kubeconfig: Option<&Path>,
) -> Result<ObjectWatch<NamespaceLabels>, AccessError> {
    let scope = Scope {
        resource: "namespaces",
        kind: ApiResource::erase::<Namespace>(&()),
        labels: None,
        fields: None,
        can_be_empty: false,
    };
    Ok(ObjectWatch::start(
        Access::find(kubeconfig)?,
        scope,
        |object, _| NamespaceLabels {
            labels: labels(&object),
        },
    ))
}
