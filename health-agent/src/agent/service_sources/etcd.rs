//! Services whose manifests are in etcd.

use std::sync::Arc;

use health_registry::config::RegistrySpec;
use health_registry::etcd::{DocumentTable, DocumentWatch, DocumentsError, services_prefix};
use health_service::source::{Manifests, ServiceDocument, ServiceSet, Synced};
use health_service::spec::Selection;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{outage, tell};

/// Follows the services of a cluster in etcd. Dropping it stops that.
#[derive(Debug)]
pub struct EtcdServices {
    services: Manifests,
    _watch: DocumentWatch<ServiceDocument>,
    task: JoinHandle<()>,
}

impl EtcdServices {
    /// Starts to follow the selected services of the cluster of this name, in this etcd.
    ///
    /// Fails only if the settings cannot be used; does not wait for etcd to answer. Must be called in a tokio runtime.
    pub fn open(
        store: &RegistrySpec,
        cluster: &str,
        selection: Selection,
    ) -> Result<Self, DocumentsError> {
        let prefix = services_prefix(cluster);
        let shown = format!("etcd:{prefix}");
        let watch = DocumentWatch::open(store, &prefix, move |key, text, before| {
            let source = format!("{shown}{key}");
            ServiceDocument::read(key, text, &source, before, &selection)
        })?;
        let mut tables = watch.table();
        let (sender, receiver) = watch::channel(Arc::default());
        let task = tokio::spawn(async move {
            loop {
                // The clone keeps no lock while the set is built.
                let known = tables.borrow_and_update().clone();
                tell(&sender, set(&known));
                if tables.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            services: Manifests::new(receiver),
            _watch: watch,
            task,
        })
    }

    /// The services and endpoint slices, now and whenever they change.
    pub fn services(&self) -> Manifests {
        self.services.clone()
    }
}

impl Drop for EtcdServices {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn set(table: &DocumentTable<ServiceDocument>) -> ServiceSet {
    let documents = table.documents.values().map(Arc::as_ref);
    let objects = ServiceDocument::set(documents);
    let outage = outage("etcd", "services", table.stale.as_ref());
    ServiceSet {
        problems: outage.into_iter().chain(objects.problems).collect(),
        synced: Synced {
            services: table.is_complete,
            slices: table.is_complete,
        },
        ..objects
    }
}
