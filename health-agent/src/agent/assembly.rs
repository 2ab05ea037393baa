//! Builds an agent in stages: inputs, preflight, datapath, parts, and the tasks that follow changes. Until all parts
//! have started, the API and the metrics report a starting agent; then all parts appear at once.

use std::collections::BTreeSet;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context as _;
use health_datapath::Attachments;
use health_datapath::conntrack::{Collector, Pace};
use health_endpoint::manager::Survey;
use health_mesh::mesh_key::MeshKeys;
use health_metrics::Exporter;
use health_model::activity::{self, Activity, Controller, Reporter};
use health_model::settings::Location;
use health_model::task::AbortOnDrop;
use health_net::netlink;
use health_probe::supervisor::Supervisor;
use health_registry::identity::{self, IdentityAllocator, Timing};
use health_registry::nodes::{Node, Registry};
use health_settings::{GcInterval, RegistrySpec, Settings};
use tokio::sync::watch::{Receiver, Sender, channel};
use tracing::info;

use super::containers::{self, ContainerProbes, Sources};
use super::deletions;
use super::endpoints::{self, EndpointSources, WorkloadEndpoints};
use super::event_relay::EventRelay;
use super::kubernetes_pods::KubernetesPods;
use super::kubernetes_policies::KubernetesPolicies;
use super::node::NodeDatapath;
use super::own_addresses;
use super::own_node;
use super::pages;
use super::preflight::{OpenedResources, Preflight};
use super::probing::{Probing, ProbingInputs};
use super::registration;
use super::routes;
use super::services::reserved::ReservedSources;
use super::services::{self, ServedServices, kept_checks};
use super::source::AgentSource;
use super::start_context::StartContext;
use super::started_parts::{ReportingPart, Responders, StartedParts};
use super::supervise::Agent;

/// Inputs known before the start.
pub(super) struct StartInputs {
    /// How programs are attached.
    pub(super) attachments: Attachments,
    pub(super) keys: MeshKeys,
    pub(super) registry: Box<dyn Registry>,
    /// This node's entry; `None` if the registry may still deliver it.
    pub(super) own: Option<Node>,
}

/// Starts an agent. A failed start leaves nothing new behind.
pub(super) async fn start(
    config: &Settings,
    inputs: StartInputs,
    source: Arc<AgentSource>,
) -> anyhow::Result<Agent> {
    let StartInputs {
        attachments,
        keys,
        registry,
        own,
    } = inputs;
    let exporter = Arc::new(Exporter::new(source.clone(), config.location.clone()));
    // Served before the wait for this node's entry: nobody should restart an agent that waits.
    let page_servers = pages::serve(config, &source, &exporter)?;
    let context = start_context(config, own, &*registry, &source).await?;
    let Preflight {
        uplinks,
        survey,
        opened,
    } = Preflight::run(&context, &source).await?;
    let node =
        NodeDatapath::establish(&context, attachments, keys, uplinks, &survey.living).await?;
    let assembly = Assembly {
        context: &context,
        node: &node,
        registry: &*registry,
        source: &source,
    };
    let (core, extras) = match assembly.start_parts(&exporter, opened, survey).await {
        Ok(parts) => parts,
        Err(error) => {
            node.take_back().await;
            return Err(error);
        }
    };
    // Begins only now, so that a failed start leaves no trace in the store.
    core.identities.begin();
    let tasks = assembly.complete(&core, &extras);
    let StartContext { own, netlink, .. } = context;
    Ok(Agent {
        health_addresses: node.health_addresses(),
        node,
        source,
        registry,
        own,
        unbound: Vec::new(),
        netlink,
        endpoints: core.endpoints.manager,
        containers: extras.containers,
        services: extras.services,
        without_programs: BTreeSet::new(),
        mesh: core.probing.mesh,
        host_responder: core.probing.host_responder,
        events: core.events,
        page_servers,
        tasks,
        _collector: core.collector,
        _identities: core.identities,
        _kubernetes_pods: core.kubernetes_pods,
        kubernetes_policies: core.kubernetes_policies.map(|(task, _)| task),
        _own_addresses: core.own_addresses,
    })
}

/// Waits for this node's entry unless it is already known.
async fn start_context<'a>(
    config: &'a Settings,
    own: Option<Node>,
    registry: &dyn Registry,
    source: &AgentSource,
) -> anyhow::Result<StartContext<'a>> {
    let netlink = netlink::open()?;
    let own = match own {
        Some(own) => own,
        None => own_node::wait(registry, config, &netlink, source).await?,
    };
    Ok(StartContext {
        config,
        own,
        netlink,
    })
}

/// Starts the agent's parts on this node's datapath.
struct Assembly<'a> {
    context: &'a StartContext<'a>,
    node: &'a NodeDatapath,
    registry: &'a dyn Registry,
    source: &'a Arc<AgentSource>,
}

/// The parts that every agent has.
struct Core {
    /// Keeps the host's addresses up to date in the programs.
    own_addresses: AbortOnDrop,
    collector: Collector,
    probing: Probing,
    events: EventRelay,
    identities: Arc<IdentityAllocator>,
    kubernetes_pods: Option<KubernetesPods>,
    /// The task that follows the policies of the Kubernetes cluster, if any.
    kubernetes_policies: Option<(AbortOnDrop, Activity)>,
    endpoints: WorkloadEndpoints,
}

/// The parts that depend on the settings.
struct Extras {
    containers: Option<ContainerProbes>,
    services: Option<ServedServices>,
    /// Service addresses for policy, which in mode `ipvs` sees these instead of the backends.
    service_addresses: Receiver<Arc<BTreeSet<IpAddr>>>,
}

impl Assembly<'_> {
    async fn start_parts(
        &self,
        exporter: &Exporter<AgentSource, Location>,
        opened: OpenedResources,
        survey: Survey,
    ) -> anyhow::Result<(Core, Extras)> {
        let OpenedResources {
            listeners,
            kubernetes_pods,
            kubernetes_policies,
            pods,
            services,
        } = opened;
        let kubernetes = (kubernetes_pods, kubernetes_policies);
        let core = self
            .start_core(exporter, listeners, survey, kubernetes)
            .await?;
        self.node.remove_former_endpoint().await;
        // Before any client can request endpoints.
        deletions::carry_out(&self.context.config.location, &core.endpoints.manager).await;
        let extras = self.start_extras(&core, pods, services).await?;
        // Comes last, so that nothing can fail after it.
        registration::remember(self.context.config)?;
        Ok((core, extras))
    }

    async fn start_core(
        &self,
        exporter: &Exporter<AgentSource, Location>,
        listeners: Vec<TcpListener>,
        survey: Survey,
        (kubernetes_pods, kubernetes_policies): (
            Option<KubernetesPods>,
            Option<KubernetesPolicies>,
        ),
    ) -> anyhow::Result<Core> {
        let Self { context, node, .. } = *self;
        let StartContext {
            config, netlink, ..
        } = context;
        let own_addresses = node.datapath().own_addresses()?;
        let own_addresses = own_addresses::follow(
            netlink.clone(),
            own_addresses,
            self.reporter("own-addresses"),
        )
        .await?;
        exporter.maps_are_there()?;
        let collector = Collector::start(node.datapath().tables()?, pace(config));
        let (lag, policy_lag) = channel(None);
        let inputs = ProbingInputs {
            nodes: self.registry.watch(),
            listeners,
            full_maps: collector.pressed(),
            policy_lag,
            problems: self.source.problems(),
        };
        let probing = Probing::start(context, node, inputs)?;
        let events = EventRelay::start(node)?;
        let identities = Arc::new(open_identities(config)?);
        let sources = EndpointSources {
            identities: identities.clone(),
            pods: kubernetes_pods.as_ref().map(KubernetesPods::labels),
            has_cluster_policies: kubernetes_policies.is_some(),
        };
        let endpoints = endpoints::start(context, node, survey, sources, lag)?;
        let kubernetes_policies =
            kubernetes_policies.map(|policies| self.follow_policies(policies, &endpoints));
        Ok(Core {
            endpoints,
            kubernetes_policies,
            own_addresses,
            collector,
            probing,
            events,
            identities,
            kubernetes_pods,
        })
    }

    /// The reporter of a controller that reports list.
    fn reporter(&self, name: &'static str) -> Reporter {
        let (reporter, activity) = activity::channel();
        let controller = Controller::new(name, activity);
        self.source.list_controllers([controller]);
        reporter
    }

    fn follow_policies(
        &self,
        policies: KubernetesPolicies,
        endpoints: &WorkloadEndpoints,
    ) -> (AbortOnDrop, Activity) {
        let (reporter, activity) = activity::channel();
        let nodes = self.registry.watch();
        let count = move || nodes.borrow().nodes.len();
        let task = policies.follow(endpoints.enforcer.clone(), count, reporter);
        (task, activity)
    }

    async fn start_extras(
        &self,
        core: &Core,
        pods: Option<Sources>,
        parts: Option<services::ProxyParts>,
    ) -> anyhow::Result<Extras> {
        let endpoints = &core.endpoints.manager;
        let containers = pods
            .map(|pods| containers::start(self.context, endpoints.clone(), pods))
            .transpose()?;
        let (reported, service_addresses) = channel(Arc::default());
        let services = match parts {
            Some(parts) => {
                let links = self.service_links(core, reported)?;
                let probes = containers.as_ref().map(|probes| &probes.supervisor);
                Some(services::start(self.context, parts, probes, links).await?)
            }
            None => {
                kept_checks::remove(&self.context.config.location.state_dir)
                    .context("cannot remove the saved health-check answers of services")?;
                None
            }
        };
        Ok(Extras {
            containers,
            services,
            service_addresses,
        })
    }

    fn service_links(
        &self,
        core: &Core,
        addresses: Sender<Arc<BTreeSet<IpAddr>>>,
    ) -> anyhow::Result<services::Links> {
        let node = self.node;
        // Takes the lock twice in a row, never nested.
        let tables = node.datapath().services()?;
        let sockets = node.datapath().socket_table()?;
        Ok(services::Links {
            tables,
            sockets,
            standing: self.registry.standing(),
            addresses,
            forwarding: services::forwarding(self.context.config, &node.keys),
            reserved: ReservedSources {
                gateways: node.gateways().collect(),
                endpoints: core.endpoints.manager.clone(),
                nodes: self.registry.watch(),
            },
        })
    }

    /// Publishes the started agent, registers this node, and starts the tasks that follow changes.
    fn complete(&self, core: &Core, extras: &Extras) -> Vec<AbortOnDrop> {
        let StartContext {
            config,
            own,
            netlink,
        } = self.context;
        let (route_reporter, routes) = activity::channel();
        let (policy_reporter, policy) = activity::channel();
        let started = started_parts(self.node, core, extras, [routes, policy]);
        self.source.publish(started);
        self.registry.publish(own_node::with_health_addresses(
            own,
            &self.node.health_addresses().borrow(),
        ));
        let surroundings = endpoints::surroundings(
            self.context,
            self.node,
            self.registry,
            extras.service_addresses.clone(),
        );
        info!(node = own.full_name(), uplinks = ?self.node.uplinks(), "agent is up");
        let WorkloadEndpoints { manager, enforcer } = &core.endpoints;
        let mut tasks = vec![
            AbortOnDrop::spawn(self.source.clone().report_problems()),
            AbortOnDrop::spawn(routes::keep(
                netlink.clone(),
                own.clone(),
                self.registry.watch(),
                route_reporter,
            )),
            AbortOnDrop::spawn(deletions::keep_carrying_out(
                config.location.clone(),
                manager.clone(),
                self.reporter("endpoint-deletions"),
            )),
            AbortOnDrop::spawn(enforcer.clone().follow(
                manager.clone(),
                surroundings,
                policy_reporter,
            )),
        ];
        if let RegistrySpec::Kubernetes(_) = config.identity_store() {
            tasks.push(endpoints::describe(
                manager.clone(),
                core.identities.clone(),
            ));
        }
        tasks
    }
}

/// The parts that the API and the metrics read.
fn started_parts(
    node: &NodeDatapath,
    core: &Core,
    extras: &Extras,
    [routes, policy]: [Activity; 2],
) -> StartedParts {
    let containers = extras.containers.as_ref();
    let containers = containers.map(|probes| probes.supervisor.clone());
    let identities = core.identities.activities();
    let mut reporting = vec![
        ReportingPart::needed("events", core.events.activity.clone()),
        ReportingPart::needed("conntrack", core.collector.activity()),
        ReportingPart::needed("routes", routes),
        ReportingPart::needed("policy", policy),
        // Known identities stay in force while the store is unavailable.
        ReportingPart::optional("identity-store", identities.store),
        ReportingPart::optional("identity-collector", identities.collector),
    ];
    let probes = containers.as_ref().map(Supervisor::activity);
    let policies = core.kubernetes_policies.as_ref();
    // Known policies stay in force while the API server is unavailable.
    reporting.extend(
        policies
            .map(|(_, activity)| ReportingPart::optional("kubernetes-policies", activity.clone())),
    );
    reporting.extend(probes.map(|probes| ReportingPart::needed("container-probes", probes)));
    StartedParts {
        mesh: core.probing.mesh.clone(),
        responders: Responders::of([&core.probing.host_responder, &node.responder]),
        reporting,
        collections: core.collector.shared_counts(),
        events: core.events.hub.clone(),
        manager: core.endpoints.manager.clone(),
        enforcer: core.endpoints.enforcer.clone(),
        identities: core.identities.identities(),
        containers,
        services: extras
            .services
            .as_ref()
            .map(|services| services.catalog().clone()),
    }
}

/// Starts following the cluster's identities.
fn open_identities(config: &Settings) -> Result<IdentityAllocator, identity::OpenError> {
    IdentityAllocator::open_idle(
        &config.identity_store(),
        &config.node.cluster_name,
        &config.node.node_name,
        Timing::default(),
    )
}

fn pace(config: &Settings) -> Pace {
    match config.conntrack.conntrack_gc_interval {
        GcInterval::Adaptive => Pace::Adaptive {
            longest: config.conntrack.conntrack_gc_max_interval,
        },
        GcInterval::Fixed(interval) => Pace::Fixed(interval),
    }
}
