//! Addresses and ports that no service may take from their users.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use health_model::policy::Protocol;
use ipnet::IpNet;

use super::frontend::{FrontendKind, Listen};
use crate::spec::ServiceName;

/// Why a service is not served at an address or port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReservedFor {
    /// The gateway of all endpoints.
    Gateway,
    /// An endpoint of this node, with its name.
    Endpoint(String),
    /// A pod of a node: with the node's name, and its pod CIDR.
    Pods(String, IpNet),
    /// A source of this agent's settings, such as the API server, with its description.
    Source(String),
    /// A port on which this agent listens, with the setting that names it.
    Agent(String),
    /// The health-check node port of a service.
    HealthCheck(ServiceName),
    /// A port on which another node's agent listens, with the node's name.
    Peer(String),
    /// A node, with its name, whose addresses the settings do not allow as external addresses.
    Node(String),
    /// The settings refuse all external addresses, or those outside certain networks.
    Outside,
}

impl fmt::Display for ReservedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gateway => f.write_str("the gateway of this node's endpoints"),
            Self::Endpoint(name) => write!(f, "the address of the endpoint {name} of this node"),
            Self::Pods(node, cidr) => write!(f, "in the pod CIDR {cidr} of the node {node}"),
            Self::Source(what) => write!(f, "the address of {what}"),
            Self::Agent(setting) => write!(f, "a port of this node's agent ({setting})"),
            Self::HealthCheck(service) => write!(f, "the health-check node port of {service}"),
            Self::Peer(node) => write!(f, "a port of the agent of the node {node}"),
            Self::Node(node) => write!(
                f,
                "an address of the node {node}, which --service-external-ips refuses"
            ),
            Self::Outside => f.write_str("refused by --service-external-ips"),
        }
    }
}

/// The external addresses (`spec.externalIPs`) that services may have. Anyone who may write a service may write any
/// address there, and receives what this node and its pods send to it (CVE-2020-8554).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// All except addresses of nodes.
    #[default]
    NoNodes,
    /// All.
    All,
    /// Those in these networks, whoever owns them; none if the list is empty.
    Within(Vec<IpNet>),
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// The TCP port on which its agent answers the mesh.
    pub port: u16,
}

/// What services must leave to this node and its peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Addresses that this node's endpoints use. No service of any kind is served there.
    pub addresses: BTreeMap<IpAddr, ReservedFor>,
    /// Where the servers listen that the agent depends on, over TCP, with a description. No address that a user wrote
    /// into a service is served there.
    pub sources: BTreeMap<SocketAddr, String>,
    /// The pod CIDRs of all nodes, by first address, with the node's name. No such address is served there either.
    pub pod_cidrs: BTreeMap<IpAddr, (IpNet, String)>,
    /// The name of this node.
    pub node: String,
    /// All addresses of this node, including those that move between nodes.
    pub own: BTreeSet<IpAddr>,
    /// The addresses by which the registry knows this node.
    pub registered: BTreeSet<IpAddr>,
    /// The addresses at which its NodePorts are served.
    pub node_ports: BTreeSet<IpAddr>,
    /// The ports on which the agent listens, and the settings that name them.
    pub ports: BTreeMap<(Protocol, u16), String>,
    /// The addresses of other nodes.
    pub peers: BTreeMap<IpAddr, Peer>,
    /// Which external addresses services may have.
    pub external_ips: ExternalIps,
}

impl Reserved {
    /// Why a frontend of this kind must not be served here; `None` if it may be, as far as other services allow it.
    pub(super) fn reason(
        &self,
        kind: FrontendKind,
        protocol: Protocol,
        listen: Listen,
    ) -> Option<ReservedFor> {
        let own_port = |port: u16| {
            let setting = self.ports.get(&(protocol, port));
            setting.map(|setting| ReservedFor::Agent(setting.clone()))
        };
        let address = match listen {
            Listen::NodePort(port) => return own_port(port),
            Listen::Address(address) => address,
        };
        let (ip, port) = (address.ip(), address.port());
        if let Some(reserved) = self.addresses.get(&ip) {
            return Some(reserved.clone());
        }
        if self.own.contains(&ip)
            && let Some(reserved) = own_port(port)
        {
            return Some(reserved);
        }
        let peer = self.peers.get(&ip);
        if let Some(peer) = peer.filter(|peer| (protocol, port) == (Protocol::TCP, peer.port)) {
            return Some(ReservedFor::Peer(peer.name.clone()));
        }
        let own = self.registered.contains(&ip).then_some(&self.node);
        let node = own.or(peer.map(|peer| &peer.name));
        // The cluster assigns ClusterIPs, but never a node's address, and agents may reach the API server through its
        // ClusterIP.
        if kind == FrontendKind::ClusterIp {
            return node.cloned().map(ReservedFor::Node);
        }
        let source = self.sources.get(&address);
        if let Some(what) = source.filter(|_| protocol == Protocol::TCP) {
            return Some(ReservedFor::Source(what.clone()));
        }
        if let Some((cidr, node)) = self.pod_cidr_of(ip) {
            return Some(ReservedFor::Pods(node.clone(), *cidr));
        }
        if kind != FrontendKind::ExternalIp {
            return None;
        }
        match &self.external_ips {
            ExternalIps::All => None,
            ExternalIps::NoNodes => node.cloned().map(ReservedFor::Node),
            ExternalIps::Within(networks) => {
                let is_in_one = networks.iter().any(|network| network.contains(&ip));
                (!is_in_one).then_some(ReservedFor::Outside)
            }
        }
    }

    /// Whether everything except the endpoints' addresses is the same.
    pub(super) fn differs_in_addresses_alone(&self, other: &Self) -> bool {
        let Self {
            addresses: _,
            sources,
            pod_cidrs,
            node,
            own,
            registered,
            node_ports,
            ports,
            peers,
            external_ips,
        } = self;
        (sources, pod_cidrs, node, own)
            == (&other.sources, &other.pod_cidrs, &other.node, &other.own)
            && (node_ports, ports, peers) == (&other.node_ports, &other.ports, &other.peers)
            && *registered == other.registered
            && *external_ips == other.external_ips
    }

    /// The pod CIDR that contains an address. No two overlap.
    fn pod_cidr_of(&self, ip: IpAddr) -> Option<&(IpNet, String)> {
        let (_, found) = self.pod_cidrs.range(..=ip).next_back()?;
        found.0.contains(&ip).then_some(found)
    }

    /// Whether NodePorts are served at this address.
    pub(super) fn serves_node_ports(&self, ip: IpAddr) -> bool {
        self.node_ports.contains(&ip)
    }
}
