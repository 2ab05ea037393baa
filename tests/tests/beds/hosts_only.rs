//! Nodes without endpoint health, either because they have no pod CIDR or because a flag turns it off.

use std::fs;
use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use health_model::api::{Endpoint, HealthStatus, NodeStatus, Reachability, TakenAddress};
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use tests::{Bed, Node, PATIENCE, http, wait_for};

/// Whether the node has the health endpoint's device.
fn has_device(node: &Node) -> bool {
    node.exec("ip link show lxc_health").is_ok()
}

/// A node's entry in a report.
fn of<'a>(report: &'a HealthStatus, node: &Node) -> anyhow::Result<&'a NodeStatus> {
    let name = node.full_name();
    let found = report.nodes.iter().find(|one| one.name == name);
    found.with_context(|| format!("{name} is not in the report"))
}

/// Waits until `here` reports only hosts, all of them reachable, and `there` reports the same about `here`.
fn wait_hosts_only(here: &Node, there: &Node) -> anyhow::Result<HealthStatus> {
    let is_well = |node: &NodeStatus| node.reachability() == Reachability::Reachable;
    wait_for("hosts alone to be probed", PATIENCE, || {
        let [own, others] = [here.status()?, there.status()?];
        // An agent that is starting knows no nodes yet.
        ensure!(own.nodes.len() == others.nodes.len(), "{own:?}");
        ensure!(own.nodes.iter().all(|node| node.hosts_only), "{own:?}");
        ensure!(own.nodes.iter().all(is_well), "{own:?}");
        ensure!(of(&others, here)?.hosts_only, "{others:?}");
        ensure!(others.nodes.iter().all(is_well), "{others:?}");
        ensure!(!of(&others, there)?.hosts_only, "{others:?}");
        Ok(Some(own))
    })
}

/// The registry of two nodes. `has_pod_cidr` refers to the first one.
fn registry(here: &Node, there: &Node, has_pod_cidr: bool) -> String {
    let node = |node: &Node, has_pod_cidr| {
        let (name, address) = (node.name(), node.ipv4());
        let cidrs: &[String] = if has_pod_cidr { &node.pod_cidrs() } else { &[] };
        let cidrs = cidrs.join(", ");
        format!("- {{name: {name}, addresses: [{address}], podCIDRs: [{cidrs}]}}\n")
    };
    format!("nodes:\n{}{}", node(here, has_pod_cidr), node(there, true))
}

/// Assigns a pod CIDR, as Kubernetes does some time after a node joins. The agent exits, so that it can be started
/// again.
fn give_pod_cidr(bed: &Bed, here: &Node, there: &Node) -> anyhow::Result<()> {
    bed.write_nodes_file(&registry(here, there, true))?;
    wait_for("the agent to end", PATIENCE, || {
        let log = here.log()?;
        Ok(log.contains("now has a pod CIDR").then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn without_endpoint_health_endpoints_are_made_once_there_is_a_pod_cidr() -> anyhow::Result<()> {
    const FLAGS: &str = "--endpoint-health off";
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (here, there) = (bed.node(1), bed.node(2));
    bed.write_nodes_file(&registry(here, there, false))?;
    here.start_agent_with(FLAGS)?;
    there.start_agent()?;
    wait_hosts_only(here, there)?;
    give_pod_cidr(&bed, here, there)?;
    wait_for("the agent to start again", PATIENCE, || {
        here.start_agent_with(FLAGS).map(Some)
    })?;
    let name = "late-pod-cidr";
    let _namespace = NetNs::create(name)?;
    wait_for("an endpoint", PATIENCE, || {
        let made = here.cli(&format!("endpoint create --netns /run/netns/{name}"))?;
        made.success().map(Some)
    })?;
    health_net::netns::remove(name)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_node_without_a_pod_cidr_is_probed_at_its_host_alone() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (here, there) = (bed.node(1), bed.node(2));
    bed.write_nodes_file(&registry(here, there, false))?;
    here.start_agent()?;
    there.start_agent()?;
    let status = wait_hosts_only(here, there)?;
    let why = "this node has no pod CIDR";
    assert_eq!(status.local.hosts_only_reason.as_deref(), Some(why));
    let text = here.cli("status")?.success()?;
    assert!(text.contains(&format!("not probed, {why}")), "{text}");
    assert!(!has_device(here));
    assert_eq!(here.listing("endpoint list")?, serde_json::json!([]));
    let name = "no-pod-cidr";
    let _namespace = NetNs::create(name)?;
    let refused = here.cli(&format!("endpoint create --netns /run/netns/{name}"))?;
    assert!(refused.stderr.contains("no pod CIDR"), "{}", refused.stderr);
    // The query of a runtime before it sends containers to the node.
    let addresses = http::of_agent::<Vec<TakenAddress>>(here, "/v1/ipam");
    let refused = format!("{:#}", addresses.expect_err("there are none"));
    assert!(refused.contains("no pod CIDR"), "{refused}");
    health_net::netns::remove(name)?;

    give_pod_cidr(&bed, here, there)?;
    wait_for("the agent to start again", PATIENCE, || {
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
    // The previous agent's endpoint is removed.
    here.kill_agent(Signal::SIGTERM)?;
    here.start_agent_with("--endpoint-health off")?;
    let status = wait_hosts_only(here, there)?;
    let why = "--endpoint-health is off";
    assert_eq!(status.local.hosts_only_reason.as_deref(), Some(why));
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
    // The agent reverts changes made by others.
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

#[test]
#[ignore = "needs root"]
fn a_start_that_fails_leaves_the_former_health_endpoint() -> anyhow::Result<()> {
    const FLAGS: &str = "--endpoint-health off";
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (here, there) = (bed.node(1), bed.node(2));
    let endpoint = here.health_ipv4()?;
    here.kill_agent(Signal::SIGTERM)?;
    // This file is one of the last to be read.
    let policies = here.runtime_dir().join("state/policies.json");
    let before = fs::read(&policies).ok();
    fs::write(&policies, "{ rubbish")?;
    // The agent's API responds before that file is read.
    let _ = here.start_agent_with(FLAGS);
    wait_for("the start to fail", PATIENCE, || {
        Ok(here.check_agent().is_err().then_some(()))
    })?;
    let log = here.log()?;
    ensure!(log.contains("cannot read the policies in"), "{log}");
    ensure!(has_device(here), "the endpoint is gone");
    ensure!(there.pings(endpoint)?, "the endpoint does not answer");

    match before {
        Some(text) => fs::write(&policies, text)?,
        None => fs::remove_file(&policies)?,
    }
    wait_for("the agent to start again", PATIENCE, || {
        here.start_agent_with(FLAGS).map(Some)
    })?;
    wait_for("the endpoint to go", PATIENCE, || {
        Ok((!has_device(here)).then_some(()))
    })?;
    Ok(())
}
