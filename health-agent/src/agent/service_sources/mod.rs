//! Services of Kubernetes and of etcd, as sources of the services of this node.

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "kubernetes")]
mod kubernetes;

use std::sync::Arc;

#[cfg(any(feature = "etcd", feature = "kubernetes"))]
use health_model::api::ServiceProblem;
use health_registry::config::Config;
#[cfg(feature = "etcd")]
use health_registry::etcd::DocumentsError;
#[cfg(feature = "kubernetes")]
use health_registry::kubernetes::AccessError;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
use health_registry::nodes::Staleness;
use health_service::source::{Manifests, ServiceSet};
use health_service::spec::Selection;
use tokio::sync::watch;

#[cfg(feature = "etcd")]
pub use self::etcd::EtcdServices;
#[cfg(feature = "kubernetes")]
pub use self::kubernetes::KubernetesServices;

/// Why services cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is no access to the API.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] AccessError),
    /// There is no access to etcd.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Etcd(#[from] DocumentsError),
    /// The settings name no etcd, in a flag that needs one.
    #[error("cannot use --services-from-etcd: --registry names no etcd")]
    NoEtcd,
    /// This agent was built without what a flag needs.
    #[error(
        "cannot use {0}: this agent was built without it; use another build, or a folder of manifests"
    )]
    NotBuilt(&'static str),
}

/// The sources that the settings name. Dropping it ends them.
#[derive(Debug, Default)]
pub struct ServiceSources {
    #[cfg(feature = "kubernetes")]
    kubernetes: Option<KubernetesServices>,
    #[cfg(feature = "etcd")]
    etcd: Option<EtcdServices>,
}

impl ServiceSources {
    /// Fails only for settings that cannot be used; waits for no answer. Must be called in a tokio runtime.
    pub fn open(config: &Config) -> Result<Self, SourceError> {
        let settings = &config.services.sources;
        #[cfg(not(feature = "kubernetes"))]
        if settings.services_from_kubernetes.is_some() {
            return Err(SourceError::NotBuilt("--services-from-kubernetes"));
        }
        #[cfg(not(feature = "etcd"))]
        if settings.services_from_etcd.is_some() {
            return Err(SourceError::NotBuilt("--services-from-etcd"));
        }
        #[cfg(feature = "kubernetes")]
        let kubernetes = match &settings.services_from_kubernetes {
            Some(access) => {
                let kubeconfig = access.kubeconfig(&config.registry);
                Some(KubernetesServices::open(kubeconfig, selection(config))?)
            }
            None => None,
        };
        #[cfg(feature = "etcd")]
        let etcd = match &settings.services_from_etcd {
            Some(access) => {
                let store = access.cluster(&config.registry);
                let store = store.ok_or(SourceError::NoEtcd)?;
                let opened = EtcdServices::open(store, &config.cluster_name, selection(config))?;
                Some(opened)
            }
            None => None,
        };
        Ok(Self {
            #[cfg(feature = "kubernetes")]
            kubernetes,
            #[cfg(feature = "etcd")]
            etcd,
        })
    }

    /// What the API has. A controller of the cluster says which endpoints are ready, so probes of this node do not.
    pub fn kubernetes(&self) -> Option<watch::Receiver<Arc<ServiceSet>>> {
        #[cfg(feature = "kubernetes")]
        return self.kubernetes.as_ref().map(KubernetesServices::services);
        #[cfg(not(feature = "kubernetes"))]
        None
    }

    /// What etcd has, for [`Probed`](health_service::source::Probed).
    pub fn etcd(&self) -> Option<Manifests> {
        #[cfg(feature = "etcd")]
        return self.etcd.as_ref().map(EtcdServices::services);
        #[cfg(not(feature = "etcd"))]
        None
    }
}

/// Which objects of all sources are for this agent.
pub fn selection(config: &Config) -> Selection {
    Selection {
        proxy_name: config.services.sources.service_proxy_name.clone(),
    }
}

/// Tells what a source has, if that is something else.
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
fn tell(services: &watch::Sender<Arc<ServiceSet>>, set: ServiceSet) {
    services.send_if_modified(|known| {
        let differs = **known != set;
        if differs {
            *known = Arc::new(set);
        }
        differs
    });
}

/// What an outage of a source means for `objects`.
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
fn outage(source: &str, objects: &str, stale: Option<&Staleness>) -> Option<ServiceProblem> {
    stale.map(|stale| ServiceProblem {
        subject: source.to_owned(),
        problem: format!(
            "{objects} stay as they were at {:.0}: {}",
            stale.since, stale.reason
        ),
    })
}
