//! Uplinks and addresses on other devices than plain Ethernet: peers are reached, and timed in the kernel, over
//! a restart too.

use health_model::api::RttSource;
use nix::sys::signal::Signal;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Two nodes without agents, each changed by these commands.
fn bed(flags: &str, commands: impl Fn(&Node, &Node) -> Vec<String>) -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(2)
        .without_agents()
        .agent_args(flags)
        .start()?;
    for (node, peer) in [(bed.node(1), bed.node(2)), (bed.node(2), bed.node(1))] {
        for command in commands(node, peer) {
            node.exec(&command)?;
        }
    }
    Ok(bed)
}

/// Starts the agents, and waits until peers are timed in the kernel; again after a kill.
fn peers_are_timed_over_a_restart(bed: &Bed) -> anyhow::Result<()> {
    for node in bed.nodes() {
        node.start_agent()?;
    }
    let node = bed.node(1);
    bed.wait_all_reachable(PATIENCE)?;
    wait_timed(bed, node)?;
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    wait_timed(bed, node)
}

/// Waits until the node's own agent has timed its peer in the kernel, by both paths.
fn wait_timed(bed: &Bed, node: &Node) -> anyhow::Result<()> {
    wait_for("round trips that the kernel timed", PATIENCE, || {
        let status = node.status()?;
        let name = bed.node(2).full_name();
        let peer = status.nodes.iter().find(|peer| peer.name == name);
        let paths = peer.into_iter().flat_map(|peer| {
            let endpoint = peer.health_endpoint.iter();
            peer.host
                .paths()
                .chain(endpoint.flat_map(|endpoint| endpoint.paths()))
        });
        let sources: Vec<_> = paths
            .map(|path| path.icmp.as_ref().and_then(|icmp| icmp.rtt_source))
            .collect();
        Ok((sources == [Some(RttSource::Kernel); 2]).then_some(()))
    })
}

#[test]
#[ignore = "needs root and VLAN devices"]
fn peers_are_timed_on_uplinks_that_are_vlan_devices() -> anyhow::Result<()> {
    let bed = bed("", |node, _| {
        let address = node.ipv4();
        vec![
            format!("ip address delete {address}/24 dev eth0"),
            "ip link add link eth0 name vlan5 up type vlan id 5".to_owned(),
            format!("ip address add {address}/24 dev vlan5"),
        ]
    })?;
    peers_are_timed_over_a_restart(&bed)
}

#[test]
#[ignore = "needs root and dummy devices"]
fn peers_are_timed_where_a_nodes_address_is_on_a_dummy_device() -> anyhow::Result<()> {
    let bed = bed("--device eth0", |node, peer| {
        let (own, other) = (node.ipv4(), peer.ipv4());
        let [link, gateway] =
            [own, other].map(|address| format!("172.31.0.{}", address.octets()[3]));
        let mut commands = vec![
            format!("ip address delete {own}/24 dev eth0"),
            format!("ip address add {link}/24 dev eth0"),
            "ip link add service up type dummy".to_owned(),
            format!("ip address add {own}/32 dev service"),
            format!("ip route add {other}/32 via {gateway} src {own}"),
        ];
        // Agents make no routes to nodes that are on no network of theirs.
        for cidr in peer.pod_cidrs() {
            commands.push(format!("ip route add {cidr} via {gateway} src {own}"));
        }
        commands
    })?;
    peers_are_timed_over_a_restart(&bed)
}
