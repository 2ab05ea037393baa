//! Creates the health endpoint and its datapath when an agent starts, and rolls back on failure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use health_common::config::{
    EARLY_FRAGMENTS, HOST_ROUTING, PASSIVE_RTT, SERVICES, SERVICES_HANDOVER,
};
use health_common::endpoint::EndpointInfo;
use health_common::service::NUMBER_MASK;
use health_common::service::xdp::XDP_FLOWS;
use health_datapath::services::{SHARE, ServiceMapSizes};
use health_datapath::{
    Attachments, Datapath, LoadSettings, MapSizes, ProgramLog, Workload, pin_folder, process,
};
use health_endpoint::health::{self, HealthEndpoint, HealthEndpointSpec, forwarding};
use health_endpoint::workload::SavedEndpoint;
use health_mesh::hello::{Identity, Responder};
use health_mesh::mesh_key::MeshKeys;
use health_model::ipam::{Family, NodeIpam};
use health_model::settings::ServiceXdp;
use health_net::netlink::Handle;
use health_net::{cgroup, netns};
use health_service::maglev;
use health_settings::{ServiceProxyMode, ServiceSettings, Settings};
use tokio::sync::watch;
use tracing::{info, warn};

use super::previous::PreviousState;
use super::{LeftFaults, NodeDatapath, addresses, mtu_of};
use crate::agent::start_context::StartContext;
use crate::agent::uplinks::{UplinkSurvey, Uplinks};
use crate::agent::{own_addresses, own_node};

impl NodeDatapath {
    /// Takes over whatever a previous agent left and creates the rest. A failure leaves nothing new behind.
    pub(in crate::agent) async fn establish(
        context: &StartContext<'_>,
        attachments: Attachments,
        keys: MeshKeys,
        (uplinks, found): (Uplinks, UplinkSurvey),
        endpoints: &[SavedEndpoint],
    ) -> anyhow::Result<Self> {
        let StartContext {
            config,
            own,
            netlink,
        } = context;
        let spec = HealthEndpointSpec {
            instance: config.location.instance.clone(),
            node_addresses: own.addresses.clone(),
            pod_cidrs: own.pod_cidrs.clone(),
            unusable_addresses: found.unusable,
            fixed_addresses: own.health_addresses.clone(),
            excluded: config.endpoints.ipam_excludes.clone(),
            taken_ids: endpoints.iter().map(|saved| saved.id).collect(),
            mtu_device: found.devices.first().cloned(),
            uplinks: found.devices,
            state_dir: config.location.state_dir.clone(),
        };
        pin_folder::require_unused(&config.location)?;
        let before = PreviousState::find(&config.location, netlink).await?;
        let ipam = NodeIpam::new(&spec.pod_cidrs, &spec.node_addresses, &[], Duration::ZERO)?;
        let gateways = Family::ALL.map(|family| ipam.gateway(family));
        let endpoint = ensure_endpoint(context, &spec, &ipam).await?;
        let mtu = match &endpoint {
            Some(endpoint) => endpoint.mtu(),
            None => {
                let mtu = mtu_of(netlink, spec.mtu_device.as_deref()).await?;
                mtu.unwrap_or(health::ETHERNET_MTU)
            }
        };
        let workloads = endpoints.iter().filter_map(workload).collect();
        let made = async {
            let datapath = Self::load(config, attachments, &spec, workloads)?;
            // Before packets reach the programs.
            own_addresses::note(netlink, &mut datapath.own_addresses()?).await?;
            let parts = NodeParts {
                name: own.full_name(),
                keys,
                datapath,
                uplinks,
                spec: spec.clone(),
                before: before.clone(),
                endpoint,
                gateways,
                netlink: netlink.clone(),
                mtu,
            };
            Self::make(config, parts)
        };
        let made: anyhow::Result<Self> = made.await;
        match made {
            Ok(node) => Ok(node),
            Err(error) => {
                before.restore(&spec).await;
                Err(error)
            }
        }
    }

    /// Removes a previous agent's health endpoint from a node that should have none. Called late, so that a start that
    /// fails earlier leaves the endpoint in service.
    pub(in crate::agent) async fn remove_former_endpoint(&self) {
        if self.endpoint.is_some() {
            return;
        }
        health::take_back(&self.spec, None).await;
        // The removal also reverts the endpoint's settings.
        if let Err(error) = self.ensure_forwarding() {
            warn!(%error, "cannot enable forwarding of endpoint packets; it will be retried");
        }
    }

    /// Rolls back after a later step of the start has failed: removes whatever this start created from scratch.
    /// Anything taken over from a previous agent stays in service.
    pub(in crate::agent) async fn take_back(self) {
        let Self { before, spec, .. } = self;
        before.restore(&spec).await;
    }

    /// Loads the programs with their maps.
    fn load(
        config: &Settings,
        attachments: Attachments,
        spec: &HealthEndpointSpec,
        workloads: Vec<Workload>,
    ) -> anyhow::Result<Datapath> {
        let log = if tracing::enabled!(tracing::Level::DEBUG) {
            ProgramLog::Debug
        } else {
            ProgramLog::Warn
        };
        let (settings, addresses) = (&config.masquerade, &spec.node_addresses);
        let masquerade = if config.services.has_services() {
            settings.of_serving_node(addresses, &spec.pod_cidrs)?
        } else {
            settings.of_node(addresses, &spec.pod_cidrs)?
        };
        let sizes = MapSizes {
            conntrack: config.conntrack_max_entries(),
            conntrack_any: config.conntrack.conntrack_any_max_entries,
            nat: config.conntrack.nat_max_entries,
            nat_any: config.conntrack.nat_any_max_entries,
            services: service_map_sizes(&config.services),
            xdp_flows: match config.services.xdp() {
                ServiceXdp::Off => XDP_FLOWS,
                ServiceXdp::Native | ServiceXdp::Generic => {
                    config.services.maps.service_flow_max_entries
                }
            },
        };
        let settings = LoadSettings {
            sizes,
            masquerade: masquerade.is_on(),
            log,
        };
        let mut datapath = Datapath::load(&config.location, settings)?;
        datapath.set_attachments(attachments);
        datapath.set_socket_root(socket_root(config).as_deref())?;
        datapath.set_xdp(config.services.xdp());
        datapath.adopt_workloads(workloads);
        datapath.set_masquerade(masquerade)?;
        datapath.forward_log()?;
        Ok(datapath)
    }

    /// Starts the responder, then configures and attaches the programs.
    fn make(config: &Settings, parts: NodeParts) -> anyhow::Result<Self> {
        let NodeParts {
            name,
            keys,
            datapath,
            uplinks,
            spec,
            before,
            endpoint,
            gateways,
            netlink,
            mtu,
        } = parts;
        let listeners = match &endpoint {
            Some(endpoint) => endpoint.listen(config.mesh.health_port)?,
            None => Vec::new(),
        };
        let (health_addresses, addresses_known) =
            watch::channel(endpoint.as_ref().map(addresses).unwrap_or_default());
        let arrivals = Arc::new(datapath.arrivals()?);
        let identity = Identity {
            node: name,
            keys: keys.hello.clone(),
            hosts_only: endpoint.is_none(),
        };
        let responder = Responder::start(identity, listeners, addresses_known, arrivals)
            .context("cannot start the responder in the health endpoint")?;
        let mut node = Self {
            has_device: endpoint.is_some(),
            endpoint,
            gateways,
            netlink,
            mtu,
            datapath: Arc::new(Mutex::new(datapath)),
            responder,
            icmp_id: rand::random(),
            session: rand::random_range(1..=u32::MAX),
            keys,
            tai_offset_ns: 0,
            repairs: BTreeMap::new(),
            uplinks,
            spec,
            is_planned: true,
            before,
            port: config.mesh.health_port,
            flags: flags(config),
            netns_cookie: if has_sockets(config) {
                netns::cookie().context("cannot identify the host's network namespace")?
            } else {
                0
            },
            agent_tgid: if has_sockets(config) {
                process::tgid().context("cannot read this process's ID")?
            } else {
                0
            },
            timeouts: config.conntrack.timeouts.into(),
            is_followed: true,
            responder_is_elsewhere: false,
            health_addresses,
            left: LeftFaults::default(),
        };
        node.configure()?;
        let hooks = node.hooks();
        node.datapath().attach(&hooks)?;
        if let Some(driver) = node.without_native_xdp() {
            anyhow::bail!(driver);
        }
        Ok(node)
    }
}

/// The parts of a [`NodeDatapath`].
struct NodeParts {
    /// Full name of the node.
    name: String,
    keys: MeshKeys,
    datapath: Datapath,
    uplinks: Uplinks,
    spec: HealthEndpointSpec,
    before: PreviousState,
    endpoint: Option<HealthEndpoint>,
    gateways: [Option<IpAddr>; 2],
    netlink: Handle,
    mtu: u32,
}

/// Creates or takes over the health endpoint. On a node without one, only enables forwarding on the host.
async fn ensure_endpoint(
    StartContext { config, own, .. }: &StartContext<'_>,
    spec: &HealthEndpointSpec,
    ipam: &NodeIpam,
) -> anyhow::Result<Option<HealthEndpoint>> {
    if let Some(why) = own_node::hosts_only(config, own) {
        info!(%why, "no health endpoint; probing only hosts");
        forwarding::ensure(&spec.state_dir, &spec.uplinks, ipam.families())?;
        return Ok(None);
    }
    let (endpoint, repaired) = HealthEndpoint::ensure(spec).await?;
    for repair in &repaired {
        warn!(cause = repair.0.cause(), "repaired: {repair}");
    }
    Ok(Some(endpoint))
}

/// Converts a previous agent's endpoint from its saved state. Existing map entries take precedence.
fn workload(saved: &SavedEndpoint) -> Option<Workload> {
    Some(Workload {
        device: saved.device.clone(),
        addresses: saved.addresses().collect(),
        info: EndpointInfo {
            ifindex: saved.ifindex?,
            identity: saved.identity.0,
            id: saved.id,
            mac: saved.mac.0,
            host_mac: saved.host_mac.0,
            ..EndpointInfo::default()
        },
    })
}

/// Whether programs serve services to the host's own sockets. IPVS needs no programs for this.
fn has_sockets(config: &Settings) -> bool {
    let services = &config.services;
    services.has_services() && services.service_proxy_mode == ServiceProxyMode::Ebpf
}

/// The cgroup to which the programs for the host's own sockets are attached, if any.
fn socket_root(config: &Settings) -> Option<PathBuf> {
    if !has_sockets(config) {
        return None;
    }
    let root = cgroup::root().unwrap_or_else(|error| {
        warn!(%error, "cannot find the cgroup2 root");
        None
    });
    if root.is_none() {
        warn!(
            "host sockets cannot reach services: the cgroup2 root is not mounted here; endpoints can reach them"
        );
    }
    root
}

/// The programs' feature flags.
fn flags(config: &Settings) -> u16 {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    // Regardless of the current mode, another mode may have been in use until now.
    let services = flag(config.services.has_services(), SERVICES | SERVICES_HANDOVER);
    EARLY_FRAGMENTS
        | flag(config.mesh.passive_rtt, PASSIVE_RTT)
        | flag(config.services.has_host_routing(), HOST_ROUTING)
        | services
}

/// Capacities of the service maps; `None` without services.
fn service_map_sizes(settings: &ServiceSettings) -> Option<ServiceMapSizes> {
    let maps = settings.maps;
    // One namespace may use as many entries as the settings allow; the rest is for other namespaces.
    let shared = |room: u32| room + room.div_ceil(SHARE);
    settings.has_services().then_some(ServiceMapSizes {
        frontends: shared(maps.service_frontend_max_entries),
        // Flow entries cannot refer to backends above this number.
        backends: shared(maps.service_backend_max_entries).min(NUMBER_MASK),
        // An endpoint may be in two lists, each with weights; most are in one list without weights.
        slots: 4 * shared(maps.service_backend_max_entries),
        maglev: maps.service_maglev_tables * maglev::SIZE,
        source_ranges: shared(maps.service_source_range_max_entries),
        affinity: maps.service_affinity_max_entries,
        flows: maps.service_flow_max_entries,
        flows_any: maps.service_flow_any_max_entries,
        sockets: maps.service_socket_max_entries,
    })
}
