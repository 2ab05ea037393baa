//! A cluster of one agent and very many simulated peers: a second namespace owns whole prefixes. It answers for live
//! peers and drops packets to dead ones.
//!
//! A dedicated veth pair joins the two namespaces, without a bridge. A packet to a peer and its reply are both handled
//! in the context of the packet's sender, so the prober's CPU time includes the far side's part of an echo.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use super::responder::Responder;
use crate::bed::Builder;
use crate::{Bed, Node};

/// Port of `/hello`.
pub(super) const PORT: u16 = 4240;

/// Addresses of both ends of the link.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 127, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 127, 0, 2);
const DEVICE: &str = "up0";
/// Contains all four prefixes below.
const CLUSTER: &str = "10.128.0.0/10";
/// First addresses of the /12 prefixes.
const LIVING: Prefixes = Prefixes {
    hosts: Ipv4Addr::new(10, 128, 0, 0),
    endpoints: Ipv4Addr::new(10, 144, 0, 0),
};
const DEAD: Prefixes = Prefixes {
    hosts: Ipv4Addr::new(10, 160, 0, 0),
    endpoints: Ipv4Addr::new(10, 176, 0, 0),
};

#[derive(Clone, Copy)]
struct Prefixes {
    hosts: Ipv4Addr,
    endpoints: Ipv4Addr,
}

/// Which peers are dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeadPeers {
    /// No peer.
    None,
    /// Three in ten, evenly mixed with the live ones.
    ThreeOfTen,
}

impl DeadPeers {
    fn includes(self, peer: u32) -> bool {
        self == Self::ThreeOfTen && matches!(peer % 10, 2 | 5 | 8)
    }
}

/// The addresses of a peer's host and health endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peer {
    host: Ipv4Addr,
    endpoint: Ipv4Addr,
}

impl Peer {
    fn new(index: u32, dead: DeadPeers) -> Self {
        let prefixes = if dead.includes(index) { DEAD } else { LIVING };
        let address = |first: Ipv4Addr| Ipv4Addr::from_bits(first.to_bits() + index + 1);
        Self {
            host: address(prefixes.hosts),
            endpoint: address(prefixes.endpoints),
        }
    }
}

/// The namespaces, and the responder in the far one. All are removed on drop.
pub(super) struct Cluster {
    // Dropped before the bed, in whose namespace the responder listens.
    responder: Responder,
    bed: Bed,
    peers: u32,
    dead: DeadPeers,
}

impl Cluster {
    /// Creates the cluster without starting an agent. `agent_flags` are for `health-agent run`.
    pub(super) fn new(peers: u32, dead: DeadPeers, agent_flags: &str) -> anyhow::Result<Self> {
        let bed = builder(agent_flags).start()?;
        link(bed.node(1), bed.node(2))?;
        bed.write_nodes_file(&registry(bed.node(1).name(), peers, dead))?;
        Ok(Self {
            responder: Responder::start(bed.node(2), PORT)?,
            bed,
            peers,
            dead,
        })
    }

    /// The measured agent's node.
    pub(super) fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// The node that represents the rest of the cluster.
    pub(super) fn rest(&self) -> &Node {
        self.bed.node(2)
    }

    pub(super) fn responder(&self) -> &Responder {
        &self.responder
    }

    /// Number of addresses to probe, including this node's own: two per node, each counted once for both protocols.
    pub(super) fn probed_addresses(&self) -> u32 {
        2 * (self.peers + 1)
    }

    /// All addresses of all peers, alternating between host and health endpoint.
    pub(super) fn peers_addresses(&self) -> Vec<Ipv4Addr> {
        (0..self.peers)
            .flat_map(|index| {
                let Peer { host, endpoint } = Peer::new(index, self.dead);
                [host, endpoint]
            })
            .collect()
    }
}

/// Whether a peer has this address.
pub(super) fn is_peer(address: IpAddr) -> bool {
    const PREFIX_LEN: u32 = 10;
    match address {
        IpAddr::V4(address) => {
            (address.to_bits() ^ LIVING.hosts.to_bits()) >> (u32::BITS - PREFIX_LEN) == 0
        }
        IpAddr::V6(_) => false,
    }
}

/// Builds two nodes without agents. The second represents the rest of the cluster.
fn builder(agent_flags: &str) -> Builder {
    Bed::builder()
        .nodes(2)
        .without_agents()
        .agent_args(agent_flags)
}

fn link(own: &Node, rest: &Node) -> anyhow::Result<()> {
    let peer_netns = rest.name();
    own.exec(&format!(
        "ip link add {DEVICE} type veth peer name {DEVICE} netns {peer_netns}"
    ))?;
    for (node, address) in [(own, OWN), (rest, GATEWAY)] {
        node.exec(&format!("ip address add {address}/30 dev {DEVICE}"))?;
        node.exec(&format!("ip link set {DEVICE} up"))?;
    }
    own.exec(&format!("ip route add {CLUSTER} via {GATEWAY}"))?;
    for prefix in [LIVING.hosts, LIVING.endpoints] {
        rest.exec(&format!("ip route add local {prefix}/12 dev lo"))?;
    }
    for prefix in [DEAD.hosts, DEAD.endpoints] {
        rest.exec(&format!("ip route add blackhole {prefix}/12"))?;
    }
    Ok(())
}

/// The node registry with this node and the peers.
fn registry(own: &str, peers: u32, dead: DeadPeers) -> String {
    let mut yaml = format!(
        "nodes:\n- name: {own}\n  cluster: default\n  addresses: [{OWN}]\n  podCIDRs: [10.244.1.0/24]\n"
    );
    for index in 0..peers {
        let Peer { host, endpoint } = Peer::new(index, dead);
        // Writing to a string cannot fail.
        let _ = write!(
            yaml,
            "- name: peer{index}\n  cluster: default\n  addresses: [{host}]\n  podCIDRs: [{endpoint}/32]\n  \
             healthAddresses: [{endpoint}]\n"
        );
    }
    yaml
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn three_of_ten_peers_are_dead_and_no_two_share_an_address() {
        let peers: Vec<Peer> = (0..50_000)
            .map(|index| Peer::new(index, DeadPeers::ThreeOfTen))
            .collect();
        let mut seen = HashSet::new();
        assert!(
            peers
                .iter()
                .all(|peer| seen.insert(peer.host) && seen.insert(peer.endpoint))
        );
        assert!(
            peers
                .iter()
                .all(|peer| is_peer(peer.host.into()) && is_peer(peer.endpoint.into()))
        );
        assert!(!is_peer(OWN.into()));
        let dead = peers.iter().filter(|peer| peer.host >= DEAD.hosts);
        assert_eq!(dead.count(), 15_000);
        assert_eq!(
            Peer::new(2, DeadPeers::None).host,
            "10.128.0.3".parse::<Ipv4Addr>().unwrap()
        );
    }

    #[test]
    fn the_registry_names_all() {
        let yaml = registry("hnode1", 3, DeadPeers::ThreeOfTen);
        assert_eq!(yaml.matches("- name: ").count(), 4);
        assert!(yaml.contains(
            "- name: peer2\n  cluster: default\n  addresses: [10.160.0.3]\n  \
             podCIDRs: [10.176.0.3/32]\n  healthAddresses: [10.176.0.3]\n"
        ));
    }
}
