//! Services whose manifests are in etcd.

use std::sync::Arc;

use health_model::activity::Controller;
use health_model::task::AbortOnDrop;
use health_registry::etcd::{DocumentTable, DocumentWatch, DocumentsError, services_prefix};
use health_service::source::{Gathered, ServiceDocument, ServiceSet, Synced};
use health_service::spec::Selection;
use health_settings::RegistrySpec;
use tokio::sync::watch;

use super::outage::outage;
use crate::agent::services::publish::publish;

/// Follows a cluster's services in etcd until it is dropped.
#[derive(Debug)]
pub struct EtcdServices {
    services: watch::Receiver<Arc<ServiceSet>>,
    watch: DocumentWatch<ServiceDocument>,
    _task: AbortOnDrop,
}

impl EtcdServices {
    /// Starts following the selected services of the given cluster in etcd.
    ///
    /// Fails only for unusable settings; does not wait for etcd to answer. Must be called in a tokio runtime.
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
        let task = AbortOnDrop::spawn(async move {
            let mut gathered = Gathered::default();
            loop {
                // Cloned so that no lock is held while the set is built.
                let known = tables.borrow_and_update().clone();
                publish(&sender, set(&mut gathered, &known));
                if tables.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            services: receiver,
            watch,
            _task: task,
        })
    }

    /// What is known about the watch itself.
    pub fn controller(&self) -> Controller {
        Controller::new("etcd-services", self.watch.activity())
    }

    /// The current services and endpoint slices, updated whenever they change.
    pub fn services(&self) -> watch::Receiver<Arc<ServiceSet>> {
        self.services.clone()
    }
}

fn set(gathered: &mut Gathered, table: &DocumentTable<ServiceDocument>) -> ServiceSet {
    gathered.take_documents(&table.documents);
    let synced = Synced {
        services: table.is_complete,
        slices: table.is_complete,
    };
    gathered.set(outage("etcd", "services", table.stale.as_ref()), synced)
}
