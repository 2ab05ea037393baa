//! The network policies of a cluster, as its API server reports them.

use std::path::Path;
use std::sync::Arc;

use health_model::activity::Controller;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::ApiResource;
use serde_json::Value;
use tokio::sync::watch;

use super::access::{Access, AccessError};
use super::objects::{Empty, ObjectTable, ObjectWatch, Scope};

/// Follows the policies of a cluster, with a watch for each kind: Kubernetes' own, and, if the server has them, Cilium's
/// policies of namespaces and of the cluster. Dropping it stops them.
#[derive(Debug)]
pub struct PolicyWatch<T>([ObjectWatch<T>; 3]);

impl<T: PartialEq + Send + Sync + 'static> PolicyWatch<T> {
    /// Starts to follow the policies of a cluster. Uses the kubeconfig at the given path, else the service account of
    /// this process's pod, else the environment's kubeconfig. The functions, one for each kind, convert an object to
    /// the form that is kept; they are also passed the previous result for the object of that name.
    ///
    /// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        [network, cilium, clusterwide]: [impl FnMut(Value, Option<&T>) -> T + Send + 'static; 3],
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let follow = |resource, kind, is_optional, read| {
            let scope = Scope {
                resource,
                kind,
                labels: None,
                fields: None,
                empty: Empty::Checked,
                is_optional,
            };
            ObjectWatch::start(access.clone(), scope, read)
        };
        let of_cilium =
            |kind, resource, read| follow(resource, of_cilium(kind, resource), true, read);
        Ok(Self([
            follow(
                "networkpolicies",
                ApiResource::erase::<NetworkPolicy>(&()),
                false,
                network,
            ),
            of_cilium("CiliumNetworkPolicy", "ciliumnetworkpolicies", cilium),
            of_cilium(
                "CiliumClusterwideNetworkPolicy",
                "ciliumclusterwidenetworkpolicies",
                clusterwide,
            ),
        ]))
    }

    /// Follows the policies of each kind, in the order in which [`Self::open`] takes the functions.
    pub fn tables(&self) -> [watch::Receiver<Arc<ObjectTable<T>>>; 3] {
        self.0.each_ref().map(ObjectWatch::table)
    }

    /// What is known about the watches themselves.
    pub fn controllers(&self) -> [Controller; 3] {
        self.0.each_ref().map(ObjectWatch::controller)
    }
}

/// A kind of Cilium's definitions.
fn of_cilium(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: "cilium.io".to_owned(),
        version: "v2".to_owned(),
        api_version: "cilium.io/v2".to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}
