//! Services from the API server of a Kubernetes cluster.

use std::path::Path;
use std::sync::Arc;

use health_model::activity::Controller;
use health_model::task::AbortOnDrop;
use health_registry::kubernetes::{AccessError, ObjectTable, ServiceScope, ServiceWatch};
use health_service::source::{Gathered, KnownService, KnownSlice, ServiceSet, Synced};
use health_service::spec::Selection;
use tokio::sync::watch;

use super::outage::outage;
use crate::agent::services::publish::publish;

/// The subject of problems that affect the whole source.
const SUBJECT: &str = "kubernetes";

/// Follows a cluster's services until it is dropped.
#[derive(Debug)]
pub struct KubernetesServices {
    services: watch::Receiver<Arc<ServiceSet>>,
    watch: ServiceWatch<KnownService, KnownSlice>,
    _task: AbortOnDrop,
}

impl KubernetesServices {
    /// Starts following the selected services of a cluster, using the kubeconfig at this path. Without a path, uses the
    /// service account of this process's pod, or else the kubeconfig of the environment.
    ///
    /// Fails if there are no credentials; does not wait for an answer. Must be called in a tokio runtime.
    pub fn open(kubeconfig: Option<&Path>, selection: Selection) -> Result<Self, AccessError> {
        let scope = ServiceScope {
            services: Some(selection.label_selector()),
            slices: selection.label_selector(),
            // A cluster always has a service for its own API, which has no proxy name.
            can_be_empty: selection.proxy_name.is_some(),
            may_lack_slices: false,
        };
        let of_slices = selection.clone();
        let watch = ServiceWatch::open(
            kubeconfig,
            &scope,
            move |object, before| KnownService::of_api(object, before, &selection),
            move |object, before| KnownSlice::of_api(object, before, &of_slices),
        )?;
        let (mut services, mut slices) = (watch.services.table(), watch.slices.table());
        let (sender, receiver) = watch::channel(Arc::default());
        let task = AbortOnDrop::spawn(async move {
            let mut gathered = Gathered::default();
            loop {
                // Cloned so that no locks are held while the set is built.
                let known = services.borrow_and_update().clone();
                let known_slices = slices.borrow_and_update().clone();
                publish(&sender, set(&mut gathered, &known, &known_slices));
                let changed = tokio::select! {
                    changed = services.changed() => changed,
                    changed = slices.changed() => changed,
                };
                if changed.is_err() {
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

    /// What is known about the watches themselves.
    pub fn controllers(&self) -> [Controller; 2] {
        [
            self.watch.services.controller(),
            self.watch.slices.controller(),
        ]
    }

    /// The current services and endpoint slices, updated whenever they change. The cluster's controller decides which
    /// endpoints are ready.
    pub fn services(&self) -> watch::Receiver<Arc<ServiceSet>> {
        self.services.clone()
    }
}

fn set(
    gathered: &mut Gathered,
    services: &ObjectTable<KnownService>,
    slices: &ObjectTable<KnownSlice>,
) -> ServiceSet {
    gathered.take_services(&services.objects);
    gathered.take_slices(&slices.objects);
    let outages = [
        outage(SUBJECT, "services", services.stale.as_ref()),
        outage(SUBJECT, "endpoint slices", slices.stale.as_ref()),
    ];
    let synced = Synced {
        services: services.is_complete,
        slices: slices.is_complete,
    };
    gathered.set(outages.into_iter().flatten(), synced)
}
