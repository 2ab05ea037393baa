//! The sources of services: a folder of manifests, etcd and the Kubernetes API.

pub mod remote;

use std::sync::Arc;

use health_model::activity::Controller;
use health_service::source::{Folder, Probed, Readiness, ServiceSet};
use health_settings::Settings;
use tokio::sync::watch;

use self::remote::{RemoteSources, SourceError, selection};

/// The sources of services. They stop when this is dropped.
#[derive(Default)]
pub(in crate::agent) struct Sources {
    folder: Option<Folder>,
    remote: RemoteSources,
    probed: Vec<Probed>,
}

impl Sources {
    /// Opens the sources without waiting for an answer; `None` if the settings name none. Fails only for unusable
    /// settings. Must be called in a tokio runtime.
    pub(in crate::agent) fn open(config: &Settings) -> Result<Option<Self>, SourceError> {
        if !config.services.has_services() {
            return Ok(None);
        }
        let folder = config.services.service_manifests.as_deref();
        Ok(Some(Self {
            folder: folder.map(|path| Folder::watch(path, selection(config))),
            remote: RemoteSources::open(config)?,
            probed: Vec::new(),
        }))
    }

    /// What is known about the watches outside this node.
    pub(super) fn controllers(&self) -> Vec<Controller> {
        self.remote.controllers()
    }

    /// A folder as the only source.
    #[cfg(test)]
    pub(super) fn of_folder(path: &std::path::Path) -> Self {
        Self {
            folder: Some(Folder::watch(path, Default::default())),
            ..Self::default()
        }
    }

    /// The service sets of all sources, in order of precedence. Endpoints on `node` that its probes find not ready are
    /// taken out of service, but those from a cluster's API only if their service asks for it.
    pub(super) fn services(
        &mut self,
        node: &Arc<str>,
        readiness: &watch::Receiver<Arc<Readiness>>,
    ) -> Vec<watch::Receiver<Arc<ServiceSet>>> {
        let folder = self.folder.as_ref().map(Folder::services);
        let manifests = folder.into_iter().chain(self.remote.etcd());
        let all = manifests.chain(self.remote.kubernetes());
        let probed = all.map(|source| Probed::of(source, node.clone(), readiness.clone()));
        self.probed = probed.collect();
        self.probed.iter().map(Probed::services).collect()
    }
}
