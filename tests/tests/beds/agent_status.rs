//! The agent's own part of `status`: what it waits for, the state of its controllers, and its addresses.

use std::net::Ipv4Addr;

use anyhow::ensure;
use health_model::api::ControllerStatus;
use jiff::Timestamp;
use tests::bed::Etcd;
use tests::{Bed, Node, PATIENCE, wait_for};

use crate::kubernetes_labels::Stand;

const SERVER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);

pub(crate) fn controller(node: &Node, name: &str) -> anyhow::Result<ControllerStatus> {
    let report: serde_json::Value = serde_json::from_str(&node.cli("status -o json")?.stdout)?;
    let controllers: Vec<ControllerStatus> =
        serde_json::from_value(report["agent"]["controllers"].clone())?;
    let found = controllers.into_iter().find(|one| one.name == name);
    found.ok_or_else(|| anyhow::anyhow!("no controller {name}"))
}

/// Waits until runs of a controller have failed several times in a row for a reason with this text.
fn wait_failing(node: &Node, name: &str, reason: &str) -> anyhow::Result<()> {
    wait_for(&format!("{name} to fail"), PATIENCE, || {
        let one = controller(node, name)?;
        let error = one.last_error.unwrap_or_default();
        Ok((one.consecutive_failures > 1 && error.contains(reason)).then_some(()))
    })?;
    let shown = node.cli("status")?.stdout;
    let is_row = |line: &str| line.starts_with(&format!("  {name} ")) && line.contains(reason);
    ensure!(shown.lines().any(is_row), "{name} is missing: {shown}");
    Ok(())
}

/// Waits until the last run of a controller has succeeded, after `since`.
fn wait_well(node: &Node, name: &str, since: Timestamp) -> anyhow::Result<()> {
    wait_for(&format!("{name} to succeed"), PATIENCE, || {
        let one = controller(node, name)?;
        let is_recent = one.last_success.is_some_and(|at| at > since);
        Ok((one.consecutive_failures == 0 && is_recent).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn controllers_of_etcd_fail_with_the_cause_and_recover() -> anyhow::Result<()> {
    let flags = |index| {
        format!(
            "--registry etcd:http://{SERVER}:2379 --node-address 172.30.0.{index} \
             --pod-cidr 10.244.{index}.0/24"
        )
    };
    let bed = Bed::builder().nodes(1).registry(flags).start()?;
    let node = bed.node(1);
    // Nothing is wrong yet that the exit status could name, but the agent is not ready either.
    wait_for("etcd to be waited for", PATIENCE, || {
        let waited = node.cli("status --wait=1ms")?;
        ensure!(waited.code == Some(1), "{}", waited.stderr);
        Ok(waited.stderr.contains("etcd:http://").then_some(()))
    })?;

    let mut etcd = Etcd::start(&bed, SERVER, "")?;
    node.cli("status --wait")?.success()?;
    wait_for("all to be well", PATIENCE, || {
        let brief = node.cli("status --brief")?;
        let is_well = brief.code == Some(0) && brief.stdout == "Ok: 1/1 reachable\n";
        Ok(is_well.then_some(()))
    })?;
    for name in ["node-registry", "node-publishing", "identity-store"] {
        wait_well(node, name, Timestamp::MIN)?;
    }
    etcd.kill()?;
    for name in ["node-registry", "identity-store"] {
        wait_failing(node, name, "cannot ")?;
    }
    let back = Timestamp::now();
    etcd.restart()?;
    for name in ["node-registry", "identity-store"] {
        wait_well(node, name, back)?;
    }
    drop(bed);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn controllers_of_kubernetes_fail_with_the_cause_and_recover() -> anyhow::Result<()> {
    let mut stand = Stand::start_with("--policies-from-kubernetes={kubeconfig}")?;
    let names = ["kubernetes-pods", "kubernetes-networkpolicies"];
    for name in names {
        wait_well(stand.node(), name, Timestamp::MIN)?;
    }
    stand.server.stop();
    for name in names {
        wait_failing(stand.node(), name, "cannot ")?;
    }
    let back = Timestamp::now();
    stand.server.resume()?;
    for name in names {
        wait_well(stand.node(), name, back)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn status_shows_programs_and_the_addresses_of_endpoints() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    let shown = node.cli("status --wait --all-addresses --verbose")?;
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    let health = node.health_ipv4()?.to_string();
    let is_health = |line: &str| line.trim_start().starts_with(&health);
    let (_, addresses) = shown.stdout.split_once("Addresses:   ").unwrap_or_default();
    ensure!(addresses.lines().any(is_health), "{}", shown.stdout);
    let is_attached =
        |line: &str| line.trim_start().starts_with("to_netdev ") && line.contains("/egress");
    ensure!(shown.stdout.lines().any(is_attached), "{}", shown.stdout);
    Ok(())
}
