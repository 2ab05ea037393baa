//! An agent's lifecycle, from settings to shutdown: builds all of its parts.

mod cleanup;
pub(crate) mod containers;
mod deletions;
mod endpoints;
mod folders;
#[cfg(feature = "kubernetes")]
mod kubernetes_pods;
mod node;
mod own;
mod own_addresses;
mod pages;
mod reload;
mod routes;
pub mod services;
mod state;
mod supervise;
mod uplinks;
mod watch;

use std::collections::BTreeSet;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context as _;
use health_metrics::Exporter;
use health_model::task::AbortOnDrop;
use health_server::monitor::{self, Monitor};
use health_server::{server, socket};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::Gid;
use tokio::sync::watch::{Receiver, channel};
use tokio::task::JoinHandle;
use tracing::{info, warn};

pub use self::cleanup::{cleanup, cleanup_services};
pub use self::reload::Reread;

use health_datapath::Attachments;
use health_datapath::conntrack::{Collector, Pace};
use health_datapath::events::{self, Hub};
use health_datapath::kernel::{self, SuitableKernel};
use health_datapath::process;
use health_endpoint::health::HealthEndpoint;
use health_endpoint::manager::Manager;
use health_mesh::hello::{self, Identity, Responder};
use health_mesh::mesh_key::{self, MeshKeys};
use health_mesh::proof::HelloKeys;
use health_mesh::{Mesh, MeshHandle, MeshOptions, Tuning};
use health_model::activity::{self, Activity};
use health_model::api::{AgentProblem, PolicyLag};
use health_model::settings::Location;
use health_net::netlink::{self, Handle};
use health_registry::identity::{self, IdentityActivities, IdentityAllocator, Timing};
use health_registry::nodes::{self, Node, Registry};
use health_settings::{GcInterval, MeshSettings, Settings};

use self::containers::{ContainerProbes, Sources};
use self::folders::NewFolders;
use self::node::NodeDatapath;
use self::reload::Reloadable;
use self::services::ServedServices;
use self::state::{AgentSource, Part};
use self::supervise::Unbound;
use self::uplinks::Uplinks;
use crate::pidfile::PidFile;

/// Runs an agent until it is asked to stop. Its kernel state stays and keeps working; only [`cleanup`] removes it.
pub async fn run(config: Settings, reread: Reread) -> anyhow::Result<()> {
    let reloadable = Reloadable::new(config, reread).context("cannot wait for SIGHUP")?;
    let config = &reloadable.settings;
    let kernel = kernel::require(&config.location.bpf_root, config.endpoints.attach_mode)?;
    // Before the first request to a registry: services that an earlier agent left must not answer it.
    process::spare_own_sockets(&config.location)
        .context("cannot exempt this agent's sockets from services")?;
    let socket_group = config
        .api
        .socket_group
        .as_deref()
        .map(socket::group)
        .transpose()?;
    let keys = mesh_key::of_mesh(config.node.mesh_key_file.as_deref())?;
    config
        .services
        .check_forwarding_key(keys.hello.is_public())?;
    let settings = own::from_settings(config).await?;
    let registry = nodes::open(config, settings)?;
    let own = own::known(&*registry, config)?;

    let mut folders = NewFolders::default();
    let result = run_in_folders(
        reloadable,
        kernel,
        socket_group,
        keys,
        own,
        registry,
        &mut folders,
    );
    let result = result.await;
    if result.is_err() {
        folders.remove();
    }
    result
}

async fn run_in_folders(
    reloadable: Reloadable,
    kernel: SuitableKernel,
    socket_group: Option<Gid>,
    keys: MeshKeys,
    own: Option<Node>,
    registry: Box<dyn Registry>,
    new_folders: &mut NewFolders,
) -> anyhow::Result<()> {
    raise_open_files_limit();
    let config = &reloadable.settings;
    match socket_group {
        Some(_) => new_folders.make_reachable(&config.location.runtime_dir)?,
        None => new_folders.make(&config.location.runtime_dir)?,
    }
    let _pid_file = PidFile::acquire(&config.location.pid_file())?;
    // A cleanup may have removed it in the meantime.
    new_folders.make(&config.location.state_dir)?;
    new_folders.close(&config.location, socket_group)?;
    let socket = socket::bind(&config.location.socket(), socket_group)?;
    let source = Arc::new(AgentSource::new(config.clone(), &keys.hello));
    let (stop, stopped) = channel(false);
    let api = tokio::spawn(server::serve(socket, source.clone(), until(stopped)));

    let result = match Agent::start(config, kernel.attachments, keys, own, registry, source).await {
        Ok(agent) => {
            // A failed start reports why it failed, and nothing else.
            kernel.log();
            log_mesh_keys(&agent.node.keys.hello);
            agent
                .supervise(reloadable.reread, reloadable.requests)
                .await
        }
        Err(error) => Err(error),
    };
    stop.send_replace(true);
    match api.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "the API did not shut down cleanly"),
        Err(error) => warn!(%error, "the API did not shut down cleanly"),
    }
    result
}

/// What can change of the mesh while it runs.
fn tuning(settings: &MeshSettings) -> Tuning {
    Tuning {
        intervals: settings.probe_intervals(),
        rate: settings.probe_rate,
        timeout: settings.probe_timeout,
        loss_threshold: f64::from(settings.loss_threshold) / 100.0,
        passive_relief: settings.passive_relief,
    }
}

/// A started agent.
struct Agent {
    node: NodeDatapath,
    source: Arc<AgentSource>,
    registry: Box<dyn Registry>,
    own: Node,
    /// Addresses that the registry gave this node after the start and that have no listener yet.
    unbound: Vec<Unbound>,
    netlink: Handle,
    endpoints: Manager,
    /// `None` if this agent probes no containers.
    containers: Option<ContainerProbes>,
    /// `None` if this agent serves no services.
    services: Option<ServedServices>,
    /// Endpoints whose programs could not be attached at the last check.
    without_programs: BTreeSet<u16>,
    health_addresses: Receiver<Vec<IpAddr>>,
    routes: JoinHandle<()>,
    /// Carries out deletions.
    deleting: JoinHandle<()>,
    enforcing: JoinHandle<()>,
    host_responder: Responder,
    /// Stops when dropped.
    _collector: Collector,
    /// Likewise.
    _identities: Arc<IdentityAllocator>,
    /// Likewise.
    _own_addresses: AbortOnDrop,
    events: Arc<Hub>,
    relay: JoinHandle<()>,
    /// Publishes problems.
    telling: JoinHandle<()>,
    monitors: [Monitor; 2],
}

impl Agent {
    async fn start(
        config: &Settings,
        attachments: Attachments,
        keys: MeshKeys,
        own: Option<Node>,
        registry: Box<dyn Registry>,
        source: Arc<AgentSource>,
    ) -> anyhow::Result<Self> {
        let netlink = netlink::open()?;
        let own = match own {
            Some(own) => own,
            None => own::wait(&*registry, config, &netlink, &source).await?,
        };
        let uplinks = Uplinks::find(&netlink, config, &own).await?;
        // Before anything is created: a port in use is the most likely conflict.
        let listeners = hello::bind(&own.addresses, config.mesh.health_port)?;
        let healthz = monitor::bind("--healthz-address", &config.api.healthz_address)?;
        let scrapes = monitor::bind("--metrics-address", &config.api.metrics_address)?;
        let service_parts = services::Parts::open(config, &own)?;
        let pods = Sources::open(config)?;
        let exporter = Arc::new(Exporter::new(source.clone(), config.location.clone()));
        let monitors = [
            Monitor::start(healthz, [pages::healthz(source.clone())])
                .context("cannot serve GET /healthz")?,
            Monitor::start(scrapes, [pages::metrics(exporter.clone())])
                .context("cannot serve GET /metrics")?,
        ];
        let survey = endpoints::survey(config, &netlink).await?;
        let node = NodeDatapath::establish(
            config,
            attachments,
            &own,
            keys,
            &netlink,
            uplinks,
            &survey.living,
        )
        .await?;
        let own_addresses = match Self::follow_own_addresses(&node, &netlink).await {
            Ok(task) => task,
            Err(error) => {
                node.take_back().await;
                return Err(error);
            }
        };
        let (lag, lagging) = channel(None);
        let probing = Self::start_probing(
            config,
            &own,
            &*registry,
            &exporter,
            &node,
            listeners,
            (lagging, source.problems()),
        );
        let started = probing.and_then(|probing| {
            let relay = Self::start_relay(&node)?;
            let identities = Arc::new(Self::start_identities(config)?);
            let endpoints = endpoints::start(
                config,
                &own,
                &netlink,
                &node,
                survey,
                identities.clone(),
                lag,
            )?;
            Ok((probing, relay, identities, endpoints))
        });
        let (
            (collector, host_responder, mesh),
            (events, relay, relaying),
            identities,
            (endpoints, enforcer),
        ) = match started {
            Ok(started) => started,
            Err(error) => {
                node.take_back().await;
                return Err(error);
            }
        };
        node.remove_former_endpoint().await;
        source.set_responders([&host_responder, &node.responder]);
        source.set_collections(collector.shared_counts());
        source.set_events(events.clone());
        // Before any client can request endpoints.
        deletions::carry_out(&config.location, &endpoints).await;
        source.set_manager(endpoints.clone(), enforcer.clone());
        source.set_identities(identities.identities());
        let (route_reporter, routes) = activity::channel();
        let (policy_reporter, policy) = activity::channel();
        let containers = pods
            .map(|pods| containers::start(config, &own, endpoints.clone(), pods))
            .transpose()?;
        if let Some(containers) = &containers {
            source.set_containers(containers.supervisor.clone());
        }
        let probes = containers.as_ref().map(|probes| &probes.supervisor);
        let (services_told, service_addresses) = channel(Arc::default());
        let services = match service_parts {
            Some(parts) => {
                // Takes the lock twice in a row, never nested.
                let tables = node.datapath().services()?;
                let sockets = node.datapath().socket_table()?;
                let links = services::Links {
                    tables,
                    sockets,
                    standing: registry.standing(),
                    addresses: services_told,
                    forwarding: services::forwarding(config, &node.keys),
                    reserved: services::reserved::ReservedSources {
                        gateways: node.gateways().collect(),
                        endpoints: endpoints.clone(),
                        nodes: registry.watch(),
                    },
                };
                Some(services::start(config, &own, parts, probes, links, &netlink).await?)
            }
            None => {
                services::kept_checks::remove(&config.location.state_dir)
                    .context("cannot remove the saved health-check answers of services")?;
                None
            }
        };
        if let Some(services) = &services {
            source.set_services(services.catalog.clone());
        }
        source.set_parts(parts(
            relaying,
            collector.activity(),
            routes,
            policy,
            identities.activities(),
            containers.as_ref(),
        ));
        source.set_mesh(mesh);
        registry.publish(own::with_health_addresses(
            &own,
            &node.health_addresses().borrow(),
        ));
        let surroundings =
            endpoints::surroundings(&own, &node, &*registry, netlink.clone(), service_addresses);
        info!(node = own.full_name(), uplinks = ?node.uplinks(), "agent is up");
        Ok(Self {
            health_addresses: node.health_addresses(),
            node,
            telling: tokio::spawn(source.clone().tell_problems()),
            source,
            routes: tokio::spawn(routes::keep(
                netlink.clone(),
                own.clone(),
                registry.watch(),
                route_reporter,
            )),
            deleting: tokio::spawn(deletions::keep_carrying_out(
                config.location.clone(),
                endpoints.clone(),
            )),
            enforcing: tokio::spawn(enforcer.follow(
                endpoints.clone(),
                surroundings,
                policy_reporter,
            )),
            registry,
            own,
            unbound: Vec::new(),
            netlink,
            endpoints,
            containers,
            services,
            without_programs: BTreeSet::new(),
            host_responder,
            _collector: collector,
            _identities: identities,
            _own_addresses: own_addresses,
            events,
            relay,
            monitors,
        })
    }

    /// From here on, keeps the host's addresses up to date in the programs.
    async fn follow_own_addresses(
        node: &NodeDatapath,
        netlink: &netlink::Handle,
    ) -> anyhow::Result<AbortOnDrop> {
        let map = node.datapath().own_addresses()?;
        own_addresses::follow(netlink.clone(), map).await
    }

    /// Starts the prober, the responder and the conntrack collector. The mesh stops when its handle is dropped.
    fn start_probing(
        config: &Settings,
        own: &Node,
        registry: &dyn Registry,
        exporter: &Exporter<AgentSource, Location>,
        node: &NodeDatapath,
        listeners: Vec<TcpListener>,
        (policy_lag, problems): (Receiver<Option<PolicyLag>>, Receiver<Vec<AgentProblem>>),
    ) -> anyhow::Result<(Collector, Responder, MeshHandle)> {
        exporter.maps_are_there()?;
        let collector = Collector::start(node.datapath().tables()?, pace(config));
        let arrivals = Arc::new(node.datapath().arrivals()?);
        let identity = Identity {
            node: own.full_name(),
            keys: node.keys.hello.clone(),
            hosts_only: node.endpoint.is_none(),
        };
        let host_responder =
            Responder::start(identity, listeners, node.health_addresses(), arrivals)
                .context("cannot start the responder of GET /hello")?;
        let mut local_addresses = own.addresses.clone();
        local_addresses.extend(&own.secondary_addresses);
        let mesh = Mesh::start(
            MeshOptions {
                local: own.full_name(),
                local_addresses,
                uplinks: node.uplinks().to_vec(),
                tuning: tuning(&config.mesh),
                path_mtu_interval: config.mesh.path_mtu_interval.0,
                passive_rtt: config.mesh.passive_rtt,
                port: config.mesh.health_port,
                icmp_id: node.icmp_id,
                session: node.session,
                keys: node.keys.clone(),
                one_way: config.mesh.one_way,
                hosts_only: own::hosts_only(config, own).map(|why| why.to_string()),
                state_dir: config.location.state_dir.clone(),
                full_maps: collector.pressed(),
                policy_lag,
                problems,
            },
            registry.watch(),
            Arc::new(node.datapath().rtt()?),
            node.health_addresses(),
        )?;
        own::remember(config)?;
        Ok((collector, host_responder, mesh))
    }

    /// Starts to relay the programs' events to monitor clients.
    fn start_relay(node: &NodeDatapath) -> anyhow::Result<(Arc<Hub>, JoinHandle<()>, Activity)> {
        let hub = Hub::new(node.datapath().event_switch()?)
            .context("cannot turn off the programs' events")?;
        let hub = Arc::new(hub);
        let (reporter, activity) = activity::channel();
        let ring = node.datapath().ring()?;
        let relay = tokio::spawn(events::relay(ring, hub.clone(), reporter));
        Ok((hub, relay, activity))
    }

    /// Starts to follow the cluster's identities.
    fn start_identities(config: &Settings) -> Result<IdentityAllocator, identity::OpenError> {
        IdentityAllocator::open(
            &config.identity_store(),
            &config.node.cluster_name,
            &config.node.node_name,
            Timing::default(),
        )
    }
}

/// The parts that report their activity, each with the name of its check.
fn parts(
    relay: Activity,
    collector: Activity,
    routes: Activity,
    policy: Activity,
    identities: IdentityActivities,
    containers: Option<&ContainerProbes>,
) -> Vec<Part> {
    let part = |check, activity| Part {
        check,
        activity,
        is_optional: false,
    };
    // Known identities stay in force while the store is unavailable.
    let optional = |check, activity| Part {
        is_optional: true,
        ..part(check, activity)
    };
    let containers = containers.map(|probes| probes.supervisor.activity());
    let mut parts = vec![
        part("events", relay),
        part("conntrack", collector),
        part("routes", routes),
        part("policy", policy),
        optional("identity-store", identities.store),
        optional("identity-collector", identities.collector),
    ];
    parts.extend(containers.map(|activity| part("container-probes", activity)));
    parts
}

/// Logs which keys are in force. Warns if they are public.
fn log_mesh_keys(keys: &HelloKeys) {
    if keys.is_public() {
        warn!(
            "the mesh key is the public default: anyone can answer for a peer; set --mesh-key-file"
        );
    }
    if let Some(age) = keys.other() {
        info!(second = ?age, "two mesh keys are in force");
        if keys.other_is_public() {
            warn!(second = ?age, "the second mesh key is the public default: anyone can answer for a peer; remove it when all nodes have the first");
        }
    }
}

fn pace(config: &Settings) -> Pace {
    match config.conntrack.conntrack_gc_interval {
        GcInterval::Adaptive => Pace::Adaptive {
            longest: config.conntrack.conntrack_gc_max_interval,
        },
        GcInterval::Fixed(interval) => Pace::Fixed(interval),
    }
}

/// Ends when the channel turns true or closes.
async fn until(mut stopped: Receiver<bool>) {
    // A closed channel means the same.
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Raises the limit on open files to the hard limit: each HTTP probe in flight takes one.
fn raise_open_files_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "cannot raise the limit on open files; fewer probes run at once");
    }
}

/// An endpoint's addresses, IPv4 first.
fn addresses(endpoint: &HealthEndpoint) -> Vec<IpAddr> {
    let v4 = endpoint.ipv4().map(IpAddr::V4);
    let v6 = endpoint.ipv6().map(IpAddr::V6);
    v4.into_iter().chain(v6).collect()
}
