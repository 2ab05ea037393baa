//! The service proxy of the agent: connects sources, probes, a provider, and the servers for load balancers,
//! supervisors and metrics.

mod announcing;
mod instrumented;
pub(super) mod kept_checks;
mod node_addresses;
mod readiness;
pub(super) mod reserved;
mod sockets;
pub mod sources;
mod standing;
mod takeover;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use health_datapath::services::{ServiceTables, SocketTable};
use health_mesh::mesh_key::MeshKeys;
use health_metrics::services::ServiceMetrics;
use health_model::ipam::Family;
use health_net::clock;
use health_net::netlink::Handle;
use health_probe::supervisor::Supervisor;
use health_registry::nodes::{Node, Standing};
use health_server::monitor::{self, Monitor};
use health_server::services::listeners::{EVERYWHERE, HealthChecks, ServiceListeners};
use health_server::services::{ServiceCatalog, pages};
use health_service::choice::Topology;
use health_service::forwarding::Forwarding;
use health_service::provider::ebpf::{self, EbpfProvider};
use health_service::provider::ipvs::netlink::server::Timeouts;
use health_service::provider::ipvs::plan::PlanSettings;
use health_service::provider::ipvs::rules::RuleSettings;
use health_service::provider::ipvs::{self, Ipvs};
use health_service::runner::Intervals;
use health_service::services::{NodeFacts, Provider, Services, SyncSettings};
use health_settings::{FORWARDING_NEEDS_KEY, ServiceProxyMode, ServiceSettings, Settings};
use jiff::Timestamp;
use tokio::sync::watch;

use self::announcing::AnnouncingProvider;
use self::instrumented::InstrumentedProvider;
use self::kept_checks::KeptChecks;
use self::node_addresses::NodeAddressWatch;
use self::readiness::PodReadiness;
use self::reserved::{OwnAddresses, ReservedSources};
use self::sockets::SocketWatch;
pub(super) use self::sources::Sources;
use self::takeover::{Other, Takeover};

/// Time from a failed sync to the next.
const SYNC_RETRY: Duration = Duration::from_secs(1);

/// The running service proxy.
pub(super) struct ServedServices {
    services: Services,
    pub(super) catalog: ServiceCatalog,
    monitors: [Monitor; 2],
    /// Kept only to be dropped with the proxy.
    _sources: (Sources, Option<PodReadiness>),
    _listeners: ServiceListeners,
    _kept_checks: KeptChecks,
    _node_addresses: Option<[NodeAddressWatch; 2]>,
    _sockets: Option<SocketWatch>,
    /// Changed by each successful sync.
    in_force: watch::Receiver<Arc<HealthChecks>>,
    takeover: Option<Takeover>,
}

/// What the proxy needs before it starts: open sources, bound ports, and the IPVS provider.
pub(super) struct Parts {
    sources: Sources,
    ports: Ports,
    /// Set in the mode `ipvs`.
    ipvs: Option<Ipvs>,
}

impl Parts {
    /// Opens everything, so that an agent that cannot serve services fails before it changes anything. `None` if the
    /// settings name no source. Must be called in a tokio runtime.
    pub(super) fn open(config: &Settings, own: &Node) -> anyhow::Result<Option<Self>> {
        let Some(sources) = Sources::open(config)? else {
            return Ok(None);
        };
        let ipvs = match config.services.service_proxy_mode {
            ServiceProxyMode::Ebpf => None,
            ServiceProxyMode::Ipvs => {
                let opened = Ipvs::open(ipvs_settings(config, own));
                Some(opened.context("cannot serve services with --service-proxy-mode ipvs")?)
            }
        };
        Ok(Some(Self {
            sources,
            ports: Ports::open(config)?,
            ipvs,
        }))
    }
}

/// Ports that report the state of services. No other process has them.
struct Ports {
    health: Vec<TcpListener>,
    metrics: Vec<TcpListener>,
    /// Where the answers for load balancers are saved.
    state_dir: PathBuf,
}

impl Ports {
    /// Binds the listeners.
    fn open(config: &Settings) -> Result<Self, monitor::BindError> {
        let settings = &config.services;
        Ok(Self {
            health: monitor::bind("--service-health-listen", &settings.service_health_listen)?,
            metrics: monitor::bind("--service-metrics-listen", &settings.service_metrics_listen)?,
            state_dir: config.location.state_dir.clone(),
        })
    }
}

/// Connections between services and other parts of the agent.
pub(super) struct Links {
    /// The maps that the programs read.
    pub(super) tables: ServiceTables,
    /// Records where the host's own sockets were sent.
    pub(super) sockets: SocketTable,
    /// This node's standing in its cluster.
    pub(super) standing: watch::Receiver<Standing>,
    /// Passes addresses of services to policy if it does not see their backends.
    pub(super) addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    /// Sources of what services must leave to this node and its peers.
    pub(super) reserved: ReservedSources,
    /// How packets of external clients reach backends on other nodes.
    pub(super) forwarding: Forwarding,
}

/// How packets of external clients reach backends on other nodes, given these keys.
pub(super) fn forwarding(config: &Settings, keys: &MeshKeys) -> Forwarding {
    let settings = &config.services;
    let hindrance = match settings.service_proxy_mode {
        ServiceProxyMode::Ipvs => Some("services are served by IPVS"),
        ServiceProxyMode::Ebpf if keys.hello.is_public() => Some(FORWARDING_NEEDS_KEY),
        ServiceProxyMode::Ebpf => None,
    };
    Forwarding {
        default: settings.service_forwarding,
        hindrance,
    }
}

/// Notifies receivers if the value has changed.
fn publish<T: PartialEq>(sender: &watch::Sender<Arc<T>>, found: T) {
    sender.send_if_modified(|known| {
        let differs = **known != found;
        if differs {
            *known = Arc::new(found);
        }
        differs
    });
}

/// Starts to serve services. `probes` decides which endpoints on this node are ready.
pub(super) async fn start(
    config: &Settings,
    own: &Node,
    parts: Parts,
    probes: Option<&Supervisor>,
    links: Links,
    netlink: &Handle,
) -> anyhow::Result<ServedServices> {
    let Links {
        tables,
        sockets,
        standing,
        addresses,
        reserved,
        forwarding,
    } = links;
    let topology = Topology {
        node: config.node.node_name.as_str().into(),
        zone: config.services.service_node_zone.as_deref().map(Into::into),
    };
    let pods = probes.map(|probes| {
        let shared = own.secondary_addresses.clone();
        PodReadiness::follow(probes.clone(), shared)
    });
    let settings = &config.services;
    let (place, topology) = watch::channel(topology);
    if settings.service_node_zone.is_none() {
        // Ends with the registry.
        tokio::spawn(standing::follow_zone(standing.clone(), place));
    }
    let networks = settings.service_node_port_cidrs.clone();
    let node_addresses = NodeAddressWatch::follow(netlink.clone(), networks).await?;
    let all_addresses = NodeAddressWatch::follow(netlink.clone(), Vec::new()).await?;
    let addresses_of_node = OwnAddresses {
        all: all_addresses.addresses(),
        node_ports: node_addresses.addresses(),
    };
    let facts = NodeFacts {
        topology,
        reserved: reserved::follow(config, own, reserved, addresses_of_node).await,
    };
    let Parts {
        sources,
        ports,
        ipvs,
    } = parts;
    let (served, other) = match ipvs {
        Some(provider) => {
            let provider = AnnouncingProvider::new(provider, addresses);
            let served = serve(settings, forwarding, facts, sources, ports, pods, provider);
            (served, Other::Ebpf(Box::new(tables)))
        }
        None => {
            let by = ebpf::Settings {
                forwarding,
                ..ebpf::Settings::new(clock::now_ns)
            };
            let provider = EbpfProvider::new(tables, by, node_addresses.addresses())?;
            let mut served = serve(settings, forwarding, facts, sources, ports, pods, provider);
            if let Ok(served) = &mut served {
                let sockets = SocketWatch::follow(sockets, served.in_force.clone())?;
                served._sockets = Some(sockets);
            }
            (
                served,
                Other::Ipvs(ipvs_settings(config, own), netlink.clone()),
            )
        }
    };
    let mut served = served.context("cannot serve services")?;
    served.takeover = Some(Takeover::begin(other, served.in_force.clone()));
    let handle = served.catalog.handle.clone();
    let mut changes = node_addresses.addresses();
    // Ends when the address watch ends.
    tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            handle.sync();
        }
    });
    served._node_addresses = Some([node_addresses, all_addresses]);
    // Ends with the registry.
    tokio::spawn(standing::tell(standing, served.catalog.handle.clone()));
    Ok(served)
}

fn ipvs_settings(config: &Settings, own: &Node) -> ipvs::Settings {
    let settings = &config.services.ipvs;
    ipvs::Settings {
        plan: PlanSettings {
            scheduler: settings.ipvs_scheduler.as_str().into(),
            excluded_networks: settings.ipvs_exclude_cidrs.clone(),
        },
        rules: RuleSettings {
            pod_networks: own.pod_cidrs.clone(),
            masquerade_all: settings.ipvs_masquerade_all,
            masquerade_mark: 1 << settings.ipvs_masquerade_bit,
        },
        node_port_networks: config.services.service_node_port_cidrs.clone(),
        strict_arp: settings.ipvs_strict_arp,
        drain_interval: settings.ipvs_drain_interval,
        timeouts: Timeouts {
            tcp: settings.ipvs_tcp_timeout.secs(),
            tcp_fin: settings.ipvs_tcpfin_timeout.secs(),
            udp: settings.ipvs_udp_timeout.secs(),
        },
    }
}

fn serve(
    settings: &ServiceSettings,
    forwarding: Forwarding,
    node: NodeFacts,
    mut sources: Sources,
    ports: Ports,
    pods: Option<PodReadiness>,
    provider: impl Provider,
) -> anyhow::Result<ServedServices> {
    let readiness = match &pods {
        Some(pods) => pods.readiness(),
        None => watch::channel(Arc::default()).1,
    };
    let name = node.topology.borrow().node.clone();
    let sets = sources.services(&name, &readiness);
    let metrics = Arc::new(ServiceMetrics::new(settings.service_proxy_mode));
    let (sender, checks) = watch::channel(Arc::new(kept_checks::read(&ports.state_dir)));
    let services = Services::start(
        SyncSettings {
            intervals: Intervals {
                min: settings.service_sync_min,
                retry: SYNC_RETRY,
                max: settings.service_sync_max,
            },
            families: Family::ALL.to_vec(),
            health_timeout: settings.service_sync_max * 2,
            clock: Timestamp::now,
        },
        node,
        sets,
        InstrumentedProvider::new(provider, metrics.clone(), sender),
    )?;
    let handle = services.handle();
    let listeners = ServiceListeners::start(EVERYWHERE, checks.clone(), handle.clone());
    let catalog = ServiceCatalog {
        forwarding,
        readiness,
        listener_problems: listeners.problems(),
        handle,
    };
    let monitors = [
        Monitor::start(ports.health, pages::health(&catalog.handle, &metrics))?,
        Monitor::start(ports.metrics, pages::metrics(&catalog.handle, &metrics))?,
    ];
    Ok(ServedServices {
        services,
        catalog,
        monitors,
        _sources: (sources, pods),
        _listeners: listeners,
        _kept_checks: KeptChecks::follow(&ports.state_dir, checks.clone()),
        _node_addresses: None,
        in_force: checks,
        takeover: None,
        _sockets: None,
    })
}

impl ServedServices {
    /// Waits until the programs' service flags change, and returns them.
    pub(super) async fn flags(&mut self) -> u16 {
        match &mut self.takeover {
            Some(takeover) => takeover.flags().await,
            None => std::future::pending().await,
        }
    }

    /// Stops after any running sync, once pending requests are answered. The kernel keeps serving.
    pub(super) async fn stop(self) {
        self.services.stop().await;
        let [health, metrics] = self.monitors;
        tokio::join!(health.shutdown(), metrics.shutdown());
    }
}
