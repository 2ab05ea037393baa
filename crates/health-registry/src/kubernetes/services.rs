//! Follows the services and endpoint slices of all namespaces, from the API server of their cluster.

use std::path::Path;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{Empty, ObjectWatch, Scope};

/// Follows services and endpoint slices, with a watch for each kind. Dropping it stops them.
#[derive(Debug)]
pub struct ServiceWatch<S, E> {
    /// The services.
    pub services: ObjectWatch<S>,
    /// Their endpoint slices.
    pub slices: ObjectWatch<E>,
}

/// Which services and endpoint slices to follow.
#[derive(Clone, Debug)]
pub struct ServiceScope {
    /// The label selector for services, which the server applies; `None` for all.
    pub services: Option<String>,
    /// The label selector for endpoint slices.
    pub slices: String,
    /// Whether a cluster may have none of either kind. If not, an empty listing is refused, because the server must
    /// have lost its store.
    pub can_be_empty: bool,
    /// Whether the server may lack the kind of endpoint slices, as before Kubernetes 1.21.
    pub may_lack_slices: bool,
}

impl<S, E> ServiceWatch<S, E>
where
    S: PartialEq + Send + Sync + 'static,
    E: PartialEq + Send + Sync + 'static,
{
    /// Starts to follow the services and endpoint slices of a cluster. Uses the kubeconfig at the given path, else the
    /// service account of this process's pod, else the environment's kubeconfig. The functions convert an object to the
    /// form that is kept; they are also passed the previous result for the object of that name.
    ///
    /// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        wanted: &ServiceScope,
        read_service: impl FnMut(Value, Option<&S>) -> S + Send + 'static,
        read_slice: impl FnMut(Value, Option<&E>) -> E + Send + 'static,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let services = Scope {
            resource: "services",
            kind: ApiResource::erase::<Service>(&()),
            labels: wanted.services.clone(),
            fields: None,
            empty: match wanted.can_be_empty {
                true => Empty::Believed,
                false => Empty::Lost,
            },
            is_optional: false,
        };
        let slices = Scope {
            resource: "endpointslices",
            kind: ApiResource::erase::<EndpointSlice>(&()),
            labels: Some(wanted.slices.clone()),
            is_optional: wanted.may_lack_slices,
            ..services.clone()
        };
        Ok(Self {
            services: ObjectWatch::start(access.clone(), services, read_service),
            slices: ObjectWatch::start(access, slices, read_slice),
        })
    }
}
