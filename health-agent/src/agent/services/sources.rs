//! Where services come from.

use std::sync::Arc;

use health_registry::config::Config;
use health_service::source::{Folder, Probed, Readiness, ServiceSet};
use tokio::sync::watch;

use crate::agent::service_sources::{ServiceSources, SourceError, selection};

/// The sources of services. Dropping it ends them.
#[derive(Default)]
pub(in crate::agent) struct Sources {
    folder: Option<Folder>,
    others: ServiceSources,
    probed: Vec<Probed>,
}

impl Sources {
    /// `None` if this agent is to serve no services. Fails only for settings that cannot be used; waits for no answer.
    /// Must be called in a tokio runtime.
    pub(in crate::agent) fn open(config: &Config) -> Result<Option<Self>, SourceError> {
        if !config.services.has_services() {
            return Ok(None);
        }
        let folder = config.services.service_manifests.as_deref();
        Ok(Some(Self {
            folder: folder.map(|path| Folder::watch(path, selection(config))),
            others: ServiceSources::open(config)?,
            probed: Vec::new(),
        }))
    }

    /// A folder alone.
    #[cfg(test)]
    pub(super) fn of_folder(path: &std::path::Path) -> Self {
        Self {
            folder: Some(Folder::watch(path, Default::default())),
            ..Self::default()
        }
    }

    /// What they have, those that count more first. Endpoints of manifests are ready on the node of this name as its
    /// probes say; those of a cluster's API as its controller does.
    pub(super) fn services(
        &mut self,
        node: &Arc<str>,
        readiness: &watch::Receiver<Arc<Readiness>>,
    ) -> Vec<watch::Receiver<Arc<ServiceSet>>> {
        let folder = self.folder.as_ref().map(Folder::services);
        let manifests = folder.into_iter().chain(self.others.etcd());
        let probed = manifests.map(|source| Probed::of(source, node.clone(), readiness.clone()));
        self.probed = probed.collect();
        let probed = self.probed.iter().map(Probed::services);
        probed.chain(self.others.kubernetes()).collect()
    }
}
