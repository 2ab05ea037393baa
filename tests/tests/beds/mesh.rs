//! Every node of a cluster can reach every other node, and reports where round trips were timestamped.

use health_model::api::{NodeStatus, RttSource};
use tests::{Bed, PATIENCE};

#[test]
#[ignore = "needs root"]
fn three_nodes_reach_each_other_soon_and_peers_are_timed_in_the_kernel() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(3).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    for node in bed.nodes() {
        let status = node.status()?;
        assert_eq!(status.local.name, node.full_name());
        for peer in &status.nodes {
            let expected = if peer.name == node.full_name() {
                // This path does not cross an uplink.
                RttSource::Socket
            } else {
                RttSource::Kernel
            };
            for (address, source, latency) in icmp_results(peer) {
                assert_eq!(source, Some(expected), "{} to {address}", node.name());
                assert!(latency > 0, "{} to {address}", node.name());
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn eight_nodes_reach_each_other_by_both_families() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(8).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let status = bed.node(1).status()?;
    assert_eq!(status.nodes.len(), 8);
    for node in &status.nodes {
        assert_eq!(
            icmp_results(node).len(),
            4,
            "two families, host and endpoint"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn endpoints_keep_their_address_over_a_restart() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let before = node.health_addresses()?;
    node.kill_agent(nix::sys::signal::Signal::SIGTERM)?;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    assert_eq!(node.health_addresses()?, before);
    Ok(())
}

fn icmp_results(node: &NodeStatus) -> Vec<(String, Option<RttSource>, i64)> {
    node.host
        .paths()
        .chain(
            node.health_endpoint
                .iter()
                .flat_map(|endpoint| endpoint.paths()),
        )
        .filter_map(|path| {
            let icmp = path.icmp.as_ref()?;
            Some((path.ip.to_string(), icmp.rtt_source, icmp.latency))
        })
        .collect()
}
