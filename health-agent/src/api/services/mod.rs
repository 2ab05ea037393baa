//! Services: what the API tells of them, and what kube-proxy serves over TCP ([`pages`], [`listeners`]).

pub mod listeners;
pub mod pages;
pub(super) mod paths;
#[cfg(test)]
mod testing;
pub(super) mod trace;

use std::sync::Arc;

use health_model::api::{ServiceBackend, ServiceEntry, ServiceProblem, ServiceSummary};
use health_service::services::{Handle, View};
use health_service::source::Readiness;
use tokio::sync::watch;

/// What is told of the services of a node. Clones tell the same.
#[derive(Clone, Debug)]
pub struct ServiceBook {
    /// How they do.
    pub handle: Handle,
    /// What the probes of this node say.
    pub readiness: watch::Receiver<Arc<Readiness>>,
    /// The services on whose health-check node port nobody listens, and why.
    pub deaf: watch::Receiver<Vec<ServiceProblem>>,
}

impl ServiceBook {
    fn view(&self) -> Arc<View> {
        self.handle.view().borrow().clone()
    }

    /// The services, by namespace and name, that a test picks out.
    pub fn services(&self, mut is_meant: impl FnMut(&ServiceEntry) -> bool) -> Vec<ServiceEntry> {
        let readiness = self.readiness.borrow().clone();
        let view = self.view();
        let meant = view.services.values().filter(|service| is_meant(service));
        meant.map(|service| probed(service, &readiness)).collect()
    }

    /// All in all.
    pub fn summary(&self) -> ServiceSummary {
        let view = self.view();
        let mut problems = view.problems.clone();
        problems.extend(self.deaf.borrow().iter().cloned());
        ServiceSummary {
            enabled: true,
            synced: view.is_synced,
            services: view.services.len() as u64,
            error: view.error.clone(),
            conflicts: view.conflicts.clone(),
            problems,
        }
    }

    /// What is not in order: whether that is a failure, and it in words.
    pub fn problem(&self) -> Option<(bool, String)> {
        let view = self.view();
        let why = || match &view.error {
            Some(error) => format!(": {error}"),
            None => String::new(),
        };
        if !self.handle.livez().healthy {
            let told = "changes of services have waited too long to be put in force";
            return Some((true, format!("{told}{}", why())));
        }
        if view.error.is_some() {
            return Some((false, format!("cannot put services in force{}", why())));
        }
        let first = view.problems.first();
        let first = first.map_or("nothing is known yet".to_owned(), |first| {
            format!("{}: {}", first.subject, first.problem)
        });
        (!view.is_synced).then(|| (false, format!("the services are not read yet: {first}")))
    }
}

/// The service, with what probes say of its endpoints on this node.
fn probed(service: &ServiceEntry, readiness: &Readiness) -> ServiceEntry {
    let mut service = service.clone();
    let backends = service.ports.iter_mut().flat_map(|port| &mut port.backends);
    for ServiceBackend {
        address,
        local,
        probed,
        ..
    } in backends
    {
        *probed = readiness.get(&address.ip()).copied().filter(|_| *local);
    }
    service
}
