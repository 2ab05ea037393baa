//! Nodes that take no part in the health of endpoints: without a pod CIDR, or as they are told.

use std::fs;
use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use health_model::api::{Endpoint, HealthStatus, NodeStatus, Reachability};
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Whether the node has the health endpoint's device.
fn has_device(node: &Node) -> bool {
    node.exec("ip link show lxc_health").is_ok()
}

/// What a report says of a node.
fn of<'a>(report: &'a HealthStatus, node: &Node) -> anyhow::Result<&'a NodeStatus> {
    let name = node.full_name();
    let found = report.nodes.iter().find(|one| one.name == name);
    found.with_context(|| format!("{name} is not in the report"))
}

/// Waits until `here` reports hosts only, all reachable, and `there` the same of `here`.
fn wait_hosts_only(here: &Node, there: &Node) -> anyhow::Result<HealthStatus> {
    let is_well = |node: &NodeStatus| node.reachability() == Reachability::Reachable;
    wait_for("hosts alone to be probed", PATIENCE, || {
        let [own, others] = [here.status()?, there.status()?];
        ensure!(own.nodes.iter().all(|node| node.hosts_only), "{own:?}");
        ensure!(own.nodes.iter().all(is_well), "{own:?}");
        ensure!(of(&others, here)?.hosts_only, "{others:?}");
        ensure!(others.nodes.iter().all(is_well), "{others:?}");
        ensure!(!of(&others, there)?.hosts_only, "{others:?}");
        Ok(Some(own))
    })
}

#[test]
#[ignore = "needs root"]
fn a_node_without_a_pod_cidr_is_probed_at_its_host_alone() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (here, there) = (bed.node(1), bed.node(2));
    let registry = |pod_cidrs: &str| {
        format!(
            "nodes:\n- {{name: {}, addresses: [{}]{pod_cidrs}}}\n- {{name: {}, addresses: [{}], podCIDRs: [{}]}}\n",
            here.name(),
            here.ipv4(),
            there.name(),
            there.ipv4(),
            there.pod_cidrs()[0],
        )
    };
    bed.write_nodes_file(&registry(""))?;
    here.start_agent()?;
    there.start_agent()?;
    let status = wait_hosts_only(here, there)?;
    let why = "this node has no pod CIDR";
    assert_eq!(status.local.hosts_only.as_deref(), Some(why));
    let text = here.cli("status")?.success()?;
    assert!(text.contains(&format!("not probed, {why}")), "{text}");
    assert!(!has_device(here));
    assert_eq!(here.listing("endpoint list")?, serde_json::json!([]));
    let refused = here.cli("endpoint create --netns /proc/self/ns/net")?;
    assert!(refused.code != Some(0), "{}", refused.stdout);

    // As Kubernetes does some time after a node came.
    let cidr = &here.pod_cidrs()[0];
    bed.write_nodes_file(&registry(&format!(", podCIDRs: [{cidr}]")))?;
    wait_for("the agent to end", PATIENCE, || {
        let log = here.log()?;
        Ok(log.contains("has a pod CIDR by now").then_some(()))
    })?;
    wait_for("the agent to start anew", PATIENCE, || {
        here.start_agent().map(Some)
    })?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(has_device(here));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn without_endpoint_health_workloads_are_served_and_hosts_probed() -> anyhow::Result<()> {
    const FORWARDING: &str = "/proc/sys/net/ipv4/conf/eth0/forwarding";
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (here, there) = (bed.node(1), bed.node(2));
    let forwarding = || here.run_in(|| fs::read_to_string(FORWARDING));
    here.run_in(|| fs::write(FORWARDING, "0"))??;
    let before = forwarding()??;
    for node in [here, there] {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    // The endpoint of the agent before goes.
    here.kill_agent(Signal::SIGTERM)?;
    here.start_agent_with("--endpoint-health off")?;
    let status = wait_hosts_only(here, there)?;
    let why = "--endpoint-health is off";
    assert_eq!(status.local.hosts_only.as_deref(), Some(why));
    assert!(!has_device(here));

    let name = "hosts-only";
    let _namespace = NetNs::create(name)?;
    let made = here.cli(&format!(
        "endpoint create --netns /run/netns/{name} -o json"
    ))?;
    let endpoint: Endpoint = serde_json::from_str(&made.success()?)?;
    let address: IpAddr = endpoint.ipv4.context("it has no address")?;
    wait_for("the endpoint to be reached", PATIENCE, || {
        Ok(there.pings(address)?.then_some(()))
    })?;
    assert_eq!(forwarding()??.trim(), "1");
    // What others change is put right.
    here.run_in(|| fs::write(FORWARDING, "0"))??;
    wait_for("the host to forward again", PATIENCE, || {
        Ok((forwarding()??.trim() == "1").then_some(()))
    })?;
    here.cli(&format!("endpoint delete {}", endpoint.id))?
        .success()?;
    health_net::netns::remove(name)?;

    here.kill_agent(Signal::SIGTERM)?;
    here.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(has_device(here));
    here.kill_agent(Signal::SIGTERM)?;
    here.start_agent_with("--endpoint-health off")?;
    wait_hosts_only(here, there)?;
    here.kill_agent(Signal::SIGTERM)?;
    here.cli("cleanup")?.success()?;
    assert_eq!(forwarding()??, before);
    Ok(())
}
