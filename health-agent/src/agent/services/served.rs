//! The services that this agent serves: connects the proxy with a provider, the probes and other parts of the agent.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Context as _;
use health_datapath::services::{ServiceTables, SocketTable};
use health_mesh::mesh_key::MeshKeys;
use health_net::clock;
use health_probe::supervisor::Supervisor;
use health_registry::nodes::Standing;
use health_server::services::ServiceCatalog;
use health_service::choice::Topology;
use health_service::forwarding::Forwarding;
use health_service::provider::ebpf::{self, EbpfProvider};
use health_service::services::NodeFacts;
use health_settings::{FORWARDING_NEEDS_KEY, ServiceProxyMode, Settings};
use tokio::sync::watch;

use super::announcing::AnnouncingProvider;
use super::node_addresses::NodeAddressWatch;
use super::proxy::{Proxy, ProxyOptions};
use super::proxy_parts::{ProxyParts, ipvs_settings};
use super::readiness::PodReadiness;
use super::reserved::{self, OwnAddresses, ReservedSources};
use super::sockets::SocketWatch;
use super::standing;
use super::takeover::{Other, Takeover};
use crate::agent::start_context::StartContext;

/// The services being served.
pub(in crate::agent) struct ServedServices {
    proxy: Proxy,
    takeover: Takeover,
    /// Kept only to be dropped with the proxy.
    _node_addresses: [NodeAddressWatch; 2],
    _sockets: Option<SocketWatch>,
}

/// Connections between services and other parts of the agent.
pub(in crate::agent) struct Links {
    /// The maps that the programs read.
    pub(in crate::agent) tables: ServiceTables,
    /// Records to which backends the host's own sockets were sent.
    pub(in crate::agent) sockets: SocketTable,
    /// This node's standing in its cluster.
    pub(in crate::agent) standing: watch::Receiver<Standing>,
    /// Passes service addresses to policy, which in mode `ipvs` sees these instead of the backends.
    pub(in crate::agent) addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    /// Sources of the addresses and ports reserved for this node and its peers.
    pub(in crate::agent) reserved: ReservedSources,
    /// How packets of external clients reach backends on other nodes.
    pub(in crate::agent) forwarding: Forwarding,
}

/// How packets of external clients reach backends on other nodes, given these keys.
pub(in crate::agent) fn forwarding(config: &Settings, keys: &MeshKeys) -> Forwarding {
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

/// Starts serving services. `probes` decides which endpoints on this node are ready.
pub(in crate::agent) async fn start(
    context: &StartContext<'_>,
    parts: ProxyParts,
    probes: Option<&Supervisor>,
    links: Links,
) -> anyhow::Result<ServedServices> {
    let StartContext {
        config,
        own,
        netlink,
    } = context;
    let pods = probes.map(|probes| {
        let shared = own.secondary_addresses.clone();
        PodReadiness::follow(probes.clone(), shared)
    });
    let topology = topology(config, &links.standing);
    let networks = config.services.service_node_port_cidrs.clone();
    let node_addresses = NodeAddressWatch::follow(netlink.clone(), networks).await?;
    let all_addresses = NodeAddressWatch::follow(netlink.clone(), Vec::new()).await?;
    let addresses_of_node = OwnAddresses {
        all: all_addresses.addresses(),
        node_ports: node_addresses.addresses(),
    };
    let options = ProxyOptions {
        settings: &config.services,
        forwarding: links.forwarding,
        node: NodeFacts {
            topology,
            reserved: reserved::follow(config, own, links.reserved, addresses_of_node).await,
        },
        sources: parts.sources,
        ports: parts.ports,
        syncs: parts.syncs,
        pods,
    };
    let cannot = "cannot serve services";
    let (proxy, sockets, other) = match parts.ipvs {
        Some(provider) => {
            let provider = AnnouncingProvider::new(provider, links.addresses);
            let proxy = Proxy::start(options, provider).context(cannot)?;
            (proxy, None, Other::Ebpf(Box::new(links.tables)))
        }
        None => {
            let by = ebpf::Settings {
                forwarding: links.forwarding,
                ..ebpf::Settings::new(clock::now_ns)
            };
            let provider = EbpfProvider::new(links.tables, by, node_addresses.addresses())?;
            let proxy = Proxy::start(options, provider).context(cannot)?;
            let sockets = SocketWatch::follow(links.sockets, proxy.in_force.clone())?;
            let other = Other::Ipvs(ipvs_settings(config, own), netlink.clone());
            (proxy, Some(sockets), other)
        }
    };
    let takeover = Takeover::begin(other, proxy.in_force.clone());
    notify_proxy(&proxy, &node_addresses, links.standing);
    Ok(ServedServices {
        proxy,
        takeover,
        _node_addresses: [node_addresses, all_addresses],
        _sockets: sockets,
    })
}

/// This node's location. The zone is that of the registry, unless the settings have one.
fn topology(config: &Settings, standing: &watch::Receiver<Standing>) -> watch::Receiver<Topology> {
    let zone = config.services.service_node_zone.as_deref();
    let (place, topology) = watch::channel(Topology {
        node: config.node.node_name.as_str().into(),
        zone: zone.map(Into::into),
    });
    if zone.is_none() {
        // Ends with the registry.
        tokio::spawn(standing::follow_zone(standing.clone(), place));
    }
    topology
}

/// Starts passing changes of this node's addresses and standing to the proxy.
fn notify_proxy(
    proxy: &Proxy,
    node_addresses: &NodeAddressWatch,
    standing: watch::Receiver<Standing>,
) {
    let handle = proxy.catalog.handle.clone();
    let mut changes = node_addresses.addresses();
    // Ends when the address watch ends.
    tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            handle.sync();
        }
    });
    // Ends with the registry.
    let handle = proxy.catalog.handle.clone();
    tokio::spawn(standing::follow(standing, handle));
}

impl ServedServices {
    pub(in crate::agent) fn catalog(&self) -> &ServiceCatalog {
        &self.proxy.catalog
    }

    /// Waits until the programs' service flags change, and returns them.
    pub(in crate::agent) async fn flags(&mut self) -> u16 {
        self.takeover.flags().await
    }

    /// Stops after any running sync, once pending requests are answered. The kernel keeps serving.
    pub(in crate::agent) async fn stop(self) {
        self.proxy.stop().await;
    }
}
