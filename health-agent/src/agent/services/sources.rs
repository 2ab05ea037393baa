//! Where services come from.

use std::path::Path;
use std::sync::Arc;

use health_registry::config::Config;
use health_service::source::{Folder, Probed, Readiness, ServiceSet};
use health_service::spec::Selection;
use tokio::sync::watch;

/// The sources of services. Dropping it ends them.
pub(in crate::agent) struct Sources {
    folder: Folder,
    probed: Vec<Probed>,
}

impl Sources {
    /// `None` if this agent is to serve no services. Must be called in a tokio runtime.
    pub(in crate::agent) fn open(config: &Config) -> Option<Self> {
        let folder = config.services.service_manifests.as_deref()?;
        Some(Self::of_folder(folder))
    }

    /// Those of a folder.
    pub(super) fn of_folder(path: &Path) -> Self {
        Self {
            folder: Folder::watch(path, Selection::default()),
            probed: Vec::new(),
        }
    }

    /// What they have, those that count more first. Endpoints of manifests are ready on the node of this name as its
    /// probes say.
    pub(super) fn services(
        &mut self,
        node: &Arc<str>,
        readiness: &watch::Receiver<Arc<Readiness>>,
    ) -> Vec<watch::Receiver<Arc<ServiceSet>>> {
        let manifests = [self.folder.services()].into_iter();
        let probed = manifests.map(|source| Probed::of(source, node.clone(), readiness.clone()));
        self.probed = probed.collect();
        self.probed.iter().map(Probed::services).collect()
    }
}
