//! The services of all namespaces and their endpoint slices, as their cluster's API server has them.

use std::path::Path;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{ObjectWatch, Scope};

/// Follows services and endpoint slices, each kind by itself. Dropping it ends that.
#[derive(Debug)]
pub struct ServiceWatch<S, E> {
    /// The services.
    pub services: ObjectWatch<S>,
    /// Their endpoint slices.
    pub slices: ObjectWatch<E>,
}

/// Which services and endpoint slices are followed.
#[derive(Clone, Debug)]
pub struct ServiceScope {
    /// Which labels both must have, or must not: the server leaves out the others.
    pub label_selector: String,
    /// Whether a cluster can have none of them. An empty list after one that was not is refused otherwise: a cluster has
    /// a service of its own, so the server's store was lost.
    pub may_become_empty: bool,
}

impl<S, E> ServiceWatch<S, E>
where
    S: PartialEq + Send + Sync + 'static,
    E: PartialEq + Send + Sync + 'static,
{
    /// Begins to follow the services and endpoint slices of a cluster: by the kubeconfig at a path, or with the service
    /// account of the pod that this process is in, or with the kubeconfig of the environment. The functions make of an
    /// object what is kept of it; they get what was made of the one of that name before.
    ///
    /// Fails when there are no credentials to be had. Waits for no answer. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        wanted: &ServiceScope,
        read_service: impl FnMut(Value, Option<&S>) -> S + Send + 'static,
        read_slice: impl FnMut(Value, Option<&E>) -> E + Send + 'static,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let scope = |resource, kind| Scope {
            resource,
            kind,
            labels: Some(wanted.label_selector.clone()),
            fields: None,
            may_become_empty: wanted.may_become_empty,
        };
        let services = scope("services", ApiResource::erase::<Service>(&()));
        let slices = scope("endpointslices", ApiResource::erase::<EndpointSlice>(&()));
        Ok(Self {
            services: ObjectWatch::start(access.clone(), services, read_service),
            slices: ObjectWatch::start(access, slices, read_slice),
        })
    }
}
