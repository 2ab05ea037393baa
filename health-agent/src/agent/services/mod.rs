//! Services: from manifests and what probes say into the kernel, and what load balancers are told.

mod measured;
mod node_addresses;
mod readiness;
mod sources;
#[cfg(test)]
mod tests;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use health_datapath::services::ServiceTables;
use health_model::ipam::Family;
use health_net::clock;
use health_net::netlink::Handle;
use health_probe::supervisor::Supervisor;
use health_registry::config::{Config, ServiceSettings};
use health_registry::nodes::Node;
use health_service::choice::Topology;
use health_service::provider::{self, ebpf::EbpfProvider};
use health_service::runner::Intervals;
use health_service::services::{Provider, Services, Settings};
use jiff::Timestamp;
use tokio::sync::watch;

use self::measured::Measured;
use self::node_addresses::NodeAddressWatch;
use self::readiness::PodReadiness;
pub(super) use self::sources::Sources;
use crate::api::monitor::{self, Monitor};
use crate::api::services::listeners::{EVERYWHERE, HealthChecks, ServiceListeners};
use crate::api::services::{ServiceBook, pages};
use crate::metrics::services::ServiceMetrics;

/// After a sync that failed, the next.
const RETRY: Duration = Duration::from_secs(1);

/// Services that are served.
pub(super) struct ServedServices {
    services: Services,
    pub(super) book: ServiceBook,
    monitors: [Monitor; 2],
    /// Those that end when they are dropped.
    _sources: (Sources, Option<PodReadiness>),
    _listeners: ServiceListeners,
    _node_addresses: Option<NodeAddressWatch>,
}

/// Where it is told how services do: nobody else has these ports.
pub(super) struct Ports {
    health: Vec<TcpListener>,
    metrics: Vec<TcpListener>,
}

impl Ports {
    /// Listens there.
    pub(super) fn open(config: &Config) -> Result<Self, monitor::BindError> {
        let settings = &config.services;
        Ok(Self {
            health: monitor::bind("--service-health-listen", &settings.service_health_listen)?,
            metrics: monitor::bind("--service-metrics-listen", &settings.service_metrics_listen)?,
        })
    }
}

/// Begins to serve services; readiness is that of the pods of `probes`.
pub(super) async fn start(
    config: &Config,
    own: &Node,
    (sources, ports): (Sources, Ports),
    probes: Option<&Supervisor>,
    tables: ServiceTables,
    netlink: &Handle,
) -> anyhow::Result<ServedServices> {
    let topology = Topology {
        node: config.node_name.as_str().into(),
        zone: config.services.service_node_zone.as_deref().map(Into::into),
    };
    let pods = probes.map(|probes| {
        let shared = own.secondary_addresses.clone();
        PodReadiness::follow(probes.clone(), shared)
    });
    let node_addresses = NodeAddressWatch::follow(netlink.clone()).await?;
    let by = provider::ebpf::Settings::new(clock::now_ns);
    let provider = EbpfProvider::new(tables, by, node_addresses.addresses())?;
    let settings = &config.services;
    let mut served = serve(settings, topology, sources, ports, pods, provider)
        .context("cannot serve services")?;
    let handle = served.book.handle.clone();
    let mut changes = node_addresses.addresses();
    // Ends with them.
    tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            handle.sync();
        }
    });
    served._node_addresses = Some(node_addresses);
    Ok(served)
}

fn serve(
    settings: &ServiceSettings,
    topology: Topology,
    mut sources: Sources,
    ports: Ports,
    pods: Option<PodReadiness>,
    provider: impl Provider,
) -> anyhow::Result<ServedServices> {
    let readiness = match &pods {
        Some(pods) => pods.readiness(),
        None => watch::channel(Arc::default()).1,
    };
    let sets = sources.services(&topology.node, &readiness);
    let metrics = Arc::new(ServiceMetrics::default());
    let (told, checks) = watch::channel(Arc::<HealthChecks>::default());
    let services = Services::start(
        Settings {
            intervals: Intervals {
                min: settings.service_sync_min,
                retry: RETRY,
                max: settings.service_sync_max,
            },
            families: Family::ALL.to_vec(),
            health_timeout: settings.service_sync_max * 2,
            clock: Timestamp::now,
        },
        watch::channel(topology).1,
        sets,
        Measured::new(provider, metrics.clone(), told),
    )?;
    let handle = services.handle();
    let listeners = ServiceListeners::start(EVERYWHERE, checks, handle.clone());
    let book = ServiceBook {
        readiness,
        deaf: listeners.deaf(),
        handle,
    };
    let monitors = [
        Monitor::start(ports.health, pages::health(&book.handle, &metrics))?,
        Monitor::start(ports.metrics, pages::metrics(&book.handle, &metrics))?,
    ];
    Ok(ServedServices {
        services,
        book,
        monitors,
        _sources: (sources, pods),
        _listeners: listeners,
        _node_addresses: None,
    })
}

impl ServedServices {
    /// Ends after a sync that is under way, and when requests are answered. The kernel goes on.
    pub(super) async fn stop(self) {
        self.services.stop().await;
        let [health, metrics] = self.monitors;
        tokio::join!(health.shutdown(), metrics.shutdown());
    }
}
