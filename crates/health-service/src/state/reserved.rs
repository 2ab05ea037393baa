//! Addresses and ports that no service may take away from their users.

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
    /// An endpoint of this node, by name.
    Endpoint(String),
    /// A node's pods, by the node's name and its pod CIDR.
    Pods(String, IpNet),
    /// A source of this agent's settings, such as the API server, by description.
    Source(String),
    /// A port on which this agent listens, by the setting that names it.
    Agent(String),
    /// The health-check node port of a service.
    HealthCheck(ServiceName),
    /// A port on which another node's agent listens, by the node's name.
    Peer(String),
    /// A node, by name, whose addresses the settings do not allow as external addresses.
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
/// address there, and then receives the packets that this node and its pods send to that address (CVE-2020-8554).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// All addresses except those of nodes.
    #[default]
    NoNodes,
    /// All addresses.
    All,
    /// Addresses in these networks, whoever owns them; none if the list is empty.
    Within(Vec<IpNet>),
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The node's name.
    pub name: String,
    /// The TCP port on which the node's agent answers the mesh.
    pub port: u16,
}

/// The addresses and ports that services must leave to this node and its peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Addresses used by this node's endpoints. No service of any kind is served there.
    pub addresses: BTreeMap<IpAddr, ReservedFor>,
    /// The TCP addresses of the servers on which the agent depends, with a description. No address that a user wrote
    /// into a service is served there.
    pub sources: BTreeMap<SocketAddr, String>,
    /// The pod CIDRs of all nodes by their first address, with the node's name. User-written addresses are not served
    /// there either.
    pub pod_cidrs: BTreeMap<IpAddr, (IpNet, String)>,
    /// The name of this node.
    pub node: String,
    /// All addresses of this node, including those that move between nodes.
    pub own: BTreeSet<IpAddr>,
    /// The addresses by which the registry knows this node.
    pub registered: BTreeSet<IpAddr>,
    /// The addresses at which this node's NodePorts are served.
    pub node_ports: BTreeSet<IpAddr>,
    /// The ports on which the agent listens, with the settings that name them.
    pub ports: BTreeMap<(Protocol, u16), String>,
    /// The addresses of other nodes.
    pub peers: BTreeMap<IpAddr, Peer>,
    /// The external addresses that services may have.
    pub external_ips: ExternalIps,
}

impl Reserved {
    /// Returns why a frontend of this kind must not be served here; `None` if it may be, subject to other services'
    /// claims.
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
        // The cluster assigns ClusterIPs and never uses a node's address for one. Also, agents may reach the API server
        // through its ClusterIP.
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

    /// Whether the two differ at most in the endpoints' addresses.
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

    /// Returns the pod CIDR that contains an address. No two pod CIDRs overlap.
    fn pod_cidr_of(&self, ip: IpAddr) -> Option<&(IpNet, String)> {
        let (_, found) = self.pod_cidrs.range(..=ip).next_back()?;
        found.0.contains(&ip).then_some(found)
    }

    /// Whether NodePorts are served at this address.
    pub(super) fn serves_node_ports(&self, ip: IpAddr) -> bool {
        self.node_ports.contains(&ip)
    }
}
