//! Sources of services outside this node: the Kubernetes API and etcd.

#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
mod outage;

use std::sync::Arc;

use health_model::activity::Controller;
#[cfg(feature = "etcd")]
use health_registry::etcd::DocumentsError;
#[cfg(feature = "kubernetes")]
use health_registry::kubernetes::AccessError;
use health_service::source::ServiceSet;
use health_service::spec::Selection;
use health_settings::Settings;
use tokio::sync::watch;

#[cfg(feature = "etcd")]
pub use self::etcd::EtcdServices;
#[cfg(feature = "kubernetes")]
pub use self::kubernetes::KubernetesServices;

/// Why services cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No access to the API.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] AccessError),
    /// No access to etcd.
    #[cfg(feature = "etcd")]
    #[error(transparent)]
    Etcd(#[from] DocumentsError),
    /// A flag needs etcd, but the settings do not name one.
    #[error("cannot use --services-from-etcd: --registry names no etcd")]
    NoEtcd,
    /// This agent was built without the feature that a flag needs.
    #[error(
        "cannot use {0}: this agent was built without it; use another build, or a folder of manifests"
    )]
    NotBuilt(&'static str),
}

/// The sources that the settings name. They stop when this is dropped.
#[derive(Debug, Default)]
pub struct RemoteSources {
    #[cfg(feature = "kubernetes")]
    kubernetes: Option<KubernetesServices>,
    #[cfg(feature = "etcd")]
    etcd: Option<EtcdServices>,
}

impl RemoteSources {
    /// Opens the sources without waiting for an answer. Fails only for unusable settings. Must be called in a tokio
    /// runtime.
    pub fn open(config: &Settings) -> Result<Self, SourceError> {
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
                let kubeconfig = access.kubeconfig(&config.node.registry);
                Some(KubernetesServices::open(kubeconfig, selection(config))?)
            }
            None => None,
        };
        #[cfg(feature = "etcd")]
        let etcd = match &settings.services_from_etcd {
            Some(access) => {
                let store = access.cluster(&config.node.registry);
                let store = store.ok_or(SourceError::NoEtcd)?;
                let opened =
                    EtcdServices::open(store, &config.node.cluster_name, selection(config))?;
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

    /// What is known about the watches themselves.
    pub fn controllers(&self) -> Vec<Controller> {
        #[cfg_attr(
            not(any(feature = "etcd", feature = "kubernetes")),
            expect(unused_mut, reason = "there are no sources")
        )]
        let mut controllers = Vec::new();
        #[cfg(feature = "kubernetes")]
        controllers.extend(
            self.kubernetes
                .iter()
                .flat_map(KubernetesServices::controllers),
        );
        #[cfg(feature = "etcd")]
        controllers.extend(self.etcd.iter().map(EtcdServices::controller));
        controllers
    }

    /// The services of the Kubernetes API.
    pub fn kubernetes(&self) -> Option<watch::Receiver<Arc<ServiceSet>>> {
        #[cfg(feature = "kubernetes")]
        return self.kubernetes.as_ref().map(KubernetesServices::services);
        #[cfg(not(feature = "kubernetes"))]
        None
    }

    /// The services in etcd.
    pub fn etcd(&self) -> Option<watch::Receiver<Arc<ServiceSet>>> {
        #[cfg(feature = "etcd")]
        return self.etcd.as_ref().map(EtcdServices::services);
        #[cfg(not(feature = "etcd"))]
        None
    }
}

/// Selects the objects that this agent serves, from any source.
pub fn selection(config: &Settings) -> Selection {
    Selection {
        proxy_name: config.services.sources.service_proxy_name.clone(),
    }
}
