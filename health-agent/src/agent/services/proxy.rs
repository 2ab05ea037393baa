//! The service proxy: the task that syncs a provider with the sources, and the servers that report on it.

use std::sync::Arc;
use std::time::Duration;

use health_metrics::services::ServiceMetrics;
use health_model::activity::Reporter;
use health_model::ipam::Family;
use health_server::page_server::PageServer;
use health_server::services::listeners::{EVERYWHERE, HealthChecks, ServiceListeners};
use health_server::services::{ServiceCatalog, pages};
use health_service::forwarding::Forwarding;
use health_service::runner::Intervals;
use health_service::services::{NodeFacts, Provider, Services, SyncSettings};
use health_settings::ServiceSettings;
use jiff::Timestamp;
use tokio::sync::watch;

use super::instrumented::InstrumentedProvider;
use super::kept_checks::{self, KeptChecks};
use super::proxy_parts::Ports;
use super::readiness::PodReadiness;
use super::sources::Sources;

/// Time from a failed sync to the next attempt.
const SYNC_RETRY: Duration = Duration::from_secs(1);

/// A running proxy.
pub(super) struct Proxy {
    services: Services,
    pub(super) catalog: ServiceCatalog,
    page_servers: [PageServer; 2],
    /// Changed by each successful sync.
    pub(super) in_force: watch::Receiver<Arc<HealthChecks>>,
    /// Kept only to be dropped with the proxy.
    _sources: (Sources, Option<PodReadiness>),
    _listeners: ServiceListeners,
    _kept_checks: KeptChecks,
}

/// What a proxy serves, and where.
pub(super) struct ProxyOptions<'a> {
    pub(super) settings: &'a ServiceSettings,
    pub(super) forwarding: Forwarding,
    pub(super) node: NodeFacts,
    pub(super) sources: Sources,
    pub(super) ports: Ports,
    /// Reports the syncs.
    pub(super) syncs: Reporter,
    /// Which endpoints on this node are ready; `None` if nothing probes them.
    pub(super) pods: Option<PodReadiness>,
}

impl Proxy {
    /// Starts the proxy. Must be called in a tokio runtime.
    pub(super) fn start(
        options: ProxyOptions<'_>,
        provider: impl Provider,
    ) -> anyhow::Result<Self> {
        let ProxyOptions {
            settings,
            forwarding,
            node,
            mut sources,
            ports,
            syncs,
            pods,
        } = options;
        let readiness = match &pods {
            Some(pods) => pods.readiness(),
            None => watch::channel(Arc::default()).1,
        };
        let name = node.topology.borrow().node.clone();
        let sets = sources.services(&name, &readiness);
        let metrics = Arc::new(ServiceMetrics::new(settings.service_proxy_mode));
        let (sender, checks) = watch::channel(Arc::new(kept_checks::read(&ports.state_dir)));
        let services = Services::start(
            sync_settings(settings),
            node,
            sets,
            InstrumentedProvider::new(provider, metrics.clone(), sender, syncs),
        )?;
        let handle = services.handle();
        let listeners = ServiceListeners::start(EVERYWHERE, checks.clone(), handle.clone());
        let catalog = ServiceCatalog {
            forwarding,
            readiness,
            listener_problems: listeners.problems(),
            handle,
        };
        let page_servers = [
            PageServer::start(ports.health, pages::health(&catalog.handle, &metrics))?,
            PageServer::start(ports.metrics, pages::metrics(&catalog.handle, &metrics))?,
        ];
        Ok(Self {
            services,
            catalog,
            page_servers,
            _sources: (sources, pods),
            _listeners: listeners,
            _kept_checks: KeptChecks::follow(&ports.state_dir, checks.clone()),
            in_force: checks,
        })
    }

    /// Stops after any running sync, once pending requests are answered. The kernel keeps serving.
    pub(super) async fn stop(self) {
        self.services.stop().await;
        let [health, metrics] = self.page_servers;
        tokio::join!(health.shutdown(), metrics.shutdown());
    }
}

fn sync_settings(settings: &ServiceSettings) -> SyncSettings {
    SyncSettings {
        intervals: Intervals {
            min: settings.service_sync_min,
            retry: SYNC_RETRY,
            max: settings.service_sync_max,
        },
        families: Family::ALL.to_vec(),
        // After this, `/healthz` and `/livez` of the proxy fail: `ProxyHealth` in `health_check/proxy.rs`.
        health_timeout: settings.service_sync_max * 2,
        clock: Timestamp::now,
    }
}
