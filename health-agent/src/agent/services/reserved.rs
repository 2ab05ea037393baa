//! Addresses and ports that are reserved for this node and its peers, so that no service takes them over.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use health_endpoint::manager::Manager;
use health_model::address::parse_ip;
use health_model::policy::Protocol;
use health_model::task::AbortOnDrop;
use health_registry::nodes::{Node, NodeSet};
use health_registry::queried_servers::{self, QueriedServer};
use health_service::provider::ebpf::NodeAddresses;
use health_service::state::{ExternalIps, Peer, Reserved, ReservedFor};
use health_settings::{ExternalIpSetting, ListenAddress, Settings};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::publish::publish;

/// Time between two lookups of the names that the agent connects to.
const RESOLVE_PERIOD: Duration = Duration::from_secs(60);

/// Addresses that the agent connects to, with a description of each.
type ServerAddresses = BTreeMap<SocketAddr, String>;

/// Sources of the reserved addresses.
pub(in crate::agent) struct ReservedSources {
    /// The gateways of all endpoints.
    pub(in crate::agent) gateways: Vec<IpAddr>,
    /// The endpoints, including the health endpoint.
    pub(in crate::agent) endpoints: Manager,
    /// The nodes of the mesh.
    pub(in crate::agent) nodes: watch::Receiver<Arc<NodeSet>>,
}

/// This node's addresses.
pub(super) struct OwnAddresses {
    /// All addresses that others can reach.
    pub(super) all: watch::Receiver<NodeAddresses>,
    /// Addresses at which NodePorts are served.
    pub(super) node_ports: watch::Receiver<NodeAddresses>,
}

/// Follows all sources. Stops when the receiver is dropped. Must be called in a tokio runtime.
pub(super) async fn follow(
    config: &Settings,
    own: &Node,
    mut from: ReservedSources,
    mut addresses: OwnAddresses,
) -> watch::Receiver<Arc<Reserved>> {
    let fixed = Reserved {
        node: own.full_name(),
        ports: ports(config),
        external_ips: external_ips(&config.services.service_external_ips),
        ..Reserved::default()
    };
    let own = own.clone();
    let port = config.mesh.health_port;
    let look_up = |one: QueriedServer| async move { queried_servers::addresses(&[one]).await };
    let (mut sources, look_ups) = resolve(queried_servers::of_settings(config).await, look_up);
    let now = move |from: &mut ReservedSources,
                    addresses: &mut OwnAddresses,
                    sources: &mut watch::Receiver<ServerAddresses>| {
        let nodes = from.nodes.borrow_and_update().clone();
        let own_addresses = addresses.all.borrow_and_update().clone();
        let node_ports = addresses.node_ports.borrow_and_update().clone();
        let mut reserved = Reserved {
            addresses: taken(&from.gateways, &from.endpoints),
            sources: sources.borrow_and_update().clone(),
            own: (*own_addresses).clone(),
            node_ports: (*node_ports).clone(),
            ..fixed.clone()
        };
        add_nodes(&mut reserved, &nodes, &own, port);
        reserved
    };
    let mut changes = from.endpoints.changes();
    let (sender, receiver) = watch::channel(Arc::new(now(&mut from, &mut addresses, &mut sources)));
    tokio::spawn(async move {
        // The lookups stop with this task.
        let _look_ups = look_ups;
        loop {
            tokio::select! {
                () = sender.closed() => return,
                changed = changes.changed() => if changed.is_err() { return },
                // A source that has ended reports nothing more.
                Ok(()) = from.nodes.changed() => {}
                Ok(()) = addresses.all.changed() => {}
                Ok(()) = addresses.node_ports.changed() => {}
                Ok(()) = sources.changed() => {}
            }
            publish(&sender, now(&mut from, &mut addresses, &mut sources));
        }
    });
    receiver
}

/// Follows the addresses that the agent connects to. Looks up names periodically, each in its own task, so that an
/// unresponsive name server delays nothing else. Keeps every address that a name has ever had.
fn resolve<F>(
    servers: Vec<QueriedServer>,
    look_up: impl Fn(QueriedServer) -> F + Clone + Send + 'static,
) -> (watch::Receiver<ServerAddresses>, Vec<AbortOnDrop>)
where
    F: Future<Output = ServerAddresses> + Send,
{
    // Starting must not depend on an answer from a name server.
    let (sender, receiver) = watch::channel(literals(&servers));
    let names = servers
        .into_iter()
        .filter(|one| parse_ip(&one.host).is_err());
    let look_ups = names.map(|one| {
        let (sender, look_up) = (sender.clone(), look_up.clone());
        AbortOnDrop::spawn(async move {
            let mut ticks = interval(RESOLVE_PERIOD);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let found = look_up(one.clone()).await;
                sender.send_if_modified(|known| {
                    let is_known = |(address, what)| known.get(address) == Some(what);
                    let is_new = !found.iter().all(is_known);
                    known.extend(found);
                    is_new
                });
            }
        })
    });
    (receiver, look_ups.collect())
}

/// The literal addresses in the settings.
fn literals(servers: &[QueriedServer]) -> ServerAddresses {
    let literal = |one: &QueriedServer| {
        let ip = parse_ip(&one.host).ok()?;
        Some((SocketAddr::new(ip, one.port), one.what.clone()))
    };
    servers.iter().filter_map(literal).collect()
}

fn taken(gateways: &[IpAddr], endpoints: &Manager) -> BTreeMap<IpAddr, ReservedFor> {
    // A node without a pod CIDR has no endpoints.
    let taken = endpoints.taken_addresses().unwrap_or_default().into_iter();
    let taken = taken.map(|taken| (taken.address, ReservedFor::Endpoint(taken.name)));
    let gateways = gateways.iter();
    let gateways = gateways.map(|address| (*address, ReservedFor::Gateway));
    taken.chain(gateways).collect()
}

/// Adds the addresses and pod CIDRs of all nodes.
fn add_nodes(reserved: &mut Reserved, nodes: &NodeSet, own: &Node, port: u16) {
    let full_name = own.full_name();
    let peers = nodes
        .nodes
        .iter()
        .filter(|node| node.full_name() != full_name);
    for node in peers.chain([own]) {
        let name = node.full_name();
        for cidr in &node.pod_cidrs {
            let network = cidr.trunc();
            reserved
                .pod_cidrs
                .insert(network.network(), (network, name.clone()));
        }
        let addresses = node.addresses.iter().chain(&node.secondary_addresses);
        if name == full_name {
            reserved.own.extend(addresses.clone());
            reserved.registered.extend(addresses);
            continue;
        }
        for address in addresses {
            let peer = Peer {
                name: name.clone(),
                port,
            };
            reserved.peers.insert(*address, peer);
        }
    }
}

/// The ports on which this agent listens, and the flags that set them.
fn ports(config: &Settings) -> BTreeMap<(Protocol, u16), String> {
    let services = &config.services;
    let pages: [(&str, ListenAddress); 4] = [
        (
            "--service-healthz-address",
            services.service_healthz_address,
        ),
        (
            "--service-metrics-address",
            services.service_metrics_address,
        ),
        ("--healthz-address", config.api.healthz_address),
        ("--metrics-address", config.api.metrics_address),
    ];
    let pages = pages
        .into_iter()
        .filter_map(|(flag, address)| Some((address.port()?, flag)));
    let api = config.api.api_addresses.iter();
    let all = pages
        .chain(api.map(|address| (address.port(), "--api-address")))
        .chain([(config.mesh.health_port, "--health-port")]);
    all.map(|(port, flag)| ((Protocol::TCP, port), flag.to_owned()))
        .collect()
}

fn external_ips(setting: &ExternalIpSetting) -> ExternalIps {
    match setting {
        ExternalIpSetting::NoNodes => ExternalIps::NoNodes,
        ExternalIpSetting::All => ExternalIps::All,
        ExternalIpSetting::None => ExternalIps::Within(Vec::new()),
        ExternalIpSetting::Within(networks) => ExternalIps::Within(networks.clone()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn node(name: &str, address: &str, cidr: &str) -> Node {
        Node {
            name: name.to_owned(),
            cluster: "west".to_owned(),
            addresses: vec![address.parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: vec![cidr.parse().unwrap()],
            health_addresses: Vec::new(),
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn a_node_keeps_its_addresses_apart_from_those_of_its_peers() {
        let own = node("a", "172.30.0.1", "10.244.1.0/24");
        let peer = node("b", "172.30.0.2", "10.244.2.0/24");
        let nodes = NodeSet {
            nodes: vec![own.clone(), peer],
            sources: Vec::new(),
        };
        let mut reserved = Reserved::default();
        add_nodes(&mut reserved, &nodes, &own, 4240);
        let own_addresses: BTreeSet<IpAddr> = [[172, 30, 0, 1].into()].into();
        assert_eq!(reserved.own, own_addresses);
        assert_eq!(reserved.registered, own_addresses);
        let peers: Vec<_> = reserved.peers.iter().collect();
        let expected = Peer {
            name: "west/b".to_owned(),
            port: 4240,
        };
        assert_eq!(peers, [(&[172, 30, 0, 2].into(), &expected)]);
        assert_eq!(reserved.pod_cidrs.len(), 2);
        // This node is included even before it is in the registry.
        let mut alone = Reserved::default();
        add_nodes(&mut alone, &NodeSet::default(), &own, 4240);
        assert_eq!((alone.own.len(), alone.pod_cidrs.len()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_is_never_resolved_holds_up_no_other_one() {
        let servers = ["192.0.2.1", "slow.example", "fast.example"].map(|host| QueriedServer {
            what: format!("etcd http://{host}:2379"),
            host: host.to_owned(),
            port: 2379,
        });
        let look_up = |one: QueriedServer| async move {
            if one.host == "slow.example" {
                std::future::pending::<()>().await;
            }
            BTreeMap::from([(([192, 0, 2, 7], one.port).into(), one.what)])
        };
        let (mut found, _look_ups) = resolve(servers.to_vec(), look_up);
        let literal: SocketAddr = ([192, 0, 2, 1], 2379).into();
        assert!(found.borrow_and_update().keys().eq([&literal]));
        found.changed().await.unwrap();
        let named: SocketAddr = ([192, 0, 2, 7], 2379).into();
        assert!(found.borrow_and_update().keys().eq([&literal, &named]));
        // An identical answer is not a change.
        tokio::time::sleep(3 * RESOLVE_PERIOD).await;
        assert!(!found.has_changed().unwrap());
    }
}
