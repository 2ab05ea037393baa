//! Services in the API, and the servers that kube-proxy also provides: health and metrics ([`pages`]), and health-check
//! node ports ([`listeners`]).

pub mod listeners;
pub mod pages;
pub(super) mod paths;
#[cfg(test)]
mod testing;
pub(super) mod trace;

use std::sync::Arc;

use health_model::api::{ServiceBackend, ServiceEntry, ServiceProblem, ServiceSummary};
use health_service::forwarding::Forwarding;
use health_service::services::{Handle, View};
use health_service::source::Readiness;
use health_service::spec::ServiceName;
use health_settings::ServiceProxyMode;
use tokio::sync::watch;

/// The services of a node, as the API reports them. Clones share their contents.
#[derive(Clone, Debug)]
pub struct ServiceCatalog {
    /// How packets of external clients reach backends on other nodes.
    pub forwarding: Forwarding,
    /// The running services.
    pub handle: Handle,
    /// The readiness that this node's probes have determined.
    pub readiness: watch::Receiver<Arc<Readiness>>,
    /// The services whose health-check node port could not be opened, and why.
    pub listener_problems: watch::Receiver<Vec<ServiceProblem>>,
}

impl ServiceCatalog {
    fn view(&self) -> Arc<View> {
        self.handle.view().borrow().clone()
    }

    /// The services whose names pass a test, sorted by namespace and name.
    pub fn services(&self, mut is_meant: impl FnMut(&ServiceName) -> bool) -> Vec<ServiceEntry> {
        let readiness = self.readiness.borrow().clone();
        let view = self.view();
        let meant = view.names().filter(|name| is_meant(name));
        meant
            .filter_map(|name| {
                let service = view.service(name, &self.forwarding)?;
                Some(match view.follows_probes(name) {
                    true => probed(service, &readiness),
                    false => service,
                })
            })
            .collect()
    }

    /// The services that pass a test on the complete entry, which costs more than a test on the name.
    pub(crate) fn services_with(
        &self,
        mut is_meant: impl FnMut(&ServiceEntry) -> bool,
    ) -> Vec<ServiceEntry> {
        let services = self.services(|_| true).into_iter();
        services.filter(|service| is_meant(service)).collect()
    }

    /// The overall state of the services.
    pub fn summary(&self, mode: ServiceProxyMode) -> ServiceSummary {
        let view = self.view();
        let mut problems = view.problems.to_vec();
        problems.extend(self.listener_problems.borrow().iter().cloned());
        ServiceSummary {
            enabled: true,
            mode: mode.to_string(),
            synced: view.is_synced,
            services: view.names().count() as u64,
            error: view.failure.as_ref().map(|failure| failure.error.clone()),
            conflicts: view.conflicts().collect(),
            problems,
        }
    }

    /// The current problem for the `services` check in `/healthz`. `true` means a failure, `false` a warning.
    pub fn problem(&self) -> Option<(bool, String)> {
        let view = self.view();
        let why = || match &view.failure {
            Some(failure) => format!(": {}", failure.error),
            None => String::new(),
        };
        if !self.handle.livez().healthy {
            let problem = "service changes have been pending for too long";
            return Some((true, format!("{problem}{}", why())));
        }
        if view.failure.is_some() {
            return Some((false, format!("cannot apply services{}", why())));
        }
        let first = view.problems.first();
        let first = first.map_or("no data yet".to_owned(), |first| {
            format!("{}: {}", first.subject, first.problem)
        });
        (!view.is_synced).then(|| {
            (
                false,
                format!("the services have not been read yet: {first}"),
            )
        })
    }
}

/// Adds the probe results for endpoints on this node to a service.
fn probed(mut service: ServiceEntry, readiness: &Readiness) -> ServiceEntry {
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
