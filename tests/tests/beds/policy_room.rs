//! Policy that fills most of its map: changes still take effect, and rules that do not fit are reported and do not
//! block others.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::policy::POLICY_ENTRIES;
use health_model::api::PolicyLag;
use tempfile::TempDir;
use tests::liveness::liveness;
use tests::{Bed, Member, Node, PATIENCE, wait_for};

/// Number of ports per rule, the maximum. Only every other port is used, so that each needs its own entry.
const PORTS: u16 = 40;

/// Rules that let a friend reach an endpoint on some ports, and allow traffic with this many outside hosts in both
/// directions.
fn rules(first_port: u16, hosts: u32) -> String {
    let ports = (0..PORTS)
        .map(|n| format!(r#"{{"port": "{}", "protocol": "UDP"}}"#, first_port + 2 * n))
        .collect::<Vec<_>>()
        .join(", ");
    let first = u32::from(Ipv4Addr::new(198, 18, 0, 0));
    let hosts = (0..hosts)
        .map(|n| format!(r#""{}/32""#, Ipv4Addr::from(first + n)))
        .collect::<Vec<_>>()
        .join(", ");
    format!(
        r#"[{{"labels": ["name=web"], "endpointSelector": {{"matchLabels": {{"app": "web"}}}},
             "ingress": [
               {{"fromEndpoints": [{{"matchLabels": {{"role": "friend"}}}}], "toPorts": [{{"ports": [{ports}]}}]}},
               {{"fromCIDR": [{hosts}], "toPorts": [{{"ports": [{ports}]}}]}}],
             "egress": [{{"toCIDR": [{hosts}], "toPorts": [{{"ports": [{ports}]}}]}}]}}]"#
    )
}

/// Number of hosts that makes the rules need at least this many entries.
fn hosts_for(entries: u32) -> u32 {
    entries / u32::from(PORTS) / 2
}

/// A bed with two nodes that share their identities, and a folder for policy documents.
fn bed() -> anyhow::Result<(Bed, TempDir)> {
    let folder = tempfile::tempdir()?;
    let store = folder.path().join("identities.json");
    let bed = Bed::builder()
        .nodes(2)
        .agent_args(&format!("--identity-store file:{}", store.display()))
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok((bed, folder))
}

/// Imports rules. Returns whether they were in force before the answer.
fn import(node: &Node, folder: &Path, text: &str) -> anyhow::Result<bool> {
    let file = folder.join("policy");
    fs::write(&file, text)?;
    let said = node
        .cli(&format!("policy import {}", file.display()))?
        .success()?;
    Ok(said.contains("is in force after"))
}

/// Imports rules and waits until they are in force, which takes a while for large rules on a slow machine.
fn enforce(node: &Node, folder: &Path, text: &str) -> anyhow::Result<()> {
    wait_for("the rules to be in force", PATIENCE, || {
        Ok(import(node, folder, text)?.then_some(()))
    })
}

/// Whether a datagram gets through within a short time.
fn passes(from: &Member, to: &Member, port: u16) -> anyhow::Result<bool> {
    let target = SocketAddr::new(to.ipv4()?, port);
    let listener = to.netns.run_in(|| UdpSocket::bind(target))??;
    listener.set_read_timeout(Some(Duration::from_millis(50)))?;
    let own = SocketAddr::new(from.ipv4()?, 0);
    let sender = from.netns.run_in(|| UdpSocket::bind(own))??;
    sender.send_to(b"passes?", target)?;
    Ok(listener.recv_from(&mut [0; 16]).is_ok())
}

fn wait_passes(from: &Member, to: &Member, port: u16) -> anyhow::Result<()> {
    wait_for("a datagram to arrive", PATIENCE, || {
        Ok(passes(from, to, port)?.then_some(()))
    })
}

fn lag(node: &Node) -> anyhow::Result<Option<PolicyLag>> {
    Ok(node.status()?.local.policy_lag)
}

fn log_has(node: &Node, member: &Member, words: &str) -> anyhow::Result<bool> {
    let log = node.cli(&format!("endpoint log {}", member.endpoint.id))?;
    Ok(log.success()?.contains(words))
}

#[test]
#[ignore = "needs root"]
fn policy_of_most_of_its_map_changes_over() -> anyhow::Result<()> {
    let (bed, folder) = bed()?;
    let node = bed.node(1);
    let friend = Member::on(node, "friend", "--label role=friend")?;
    let webs = [
        Member::on(node, "web1", "--label app=web")?,
        Member::on(node, "web2", "--label app=web")?,
    ];
    let hosts = hosts_for(200_000);
    for (former, first) in [(20_001, 20_000), (20_000, 20_001)] {
        enforce(node, folder.path(), &rules(first, hosts))?;
        for web in &webs {
            wait_passes(&friend, web, first)?;
            ensure!(!passes(&friend, web, former)?, "the former rules hold");
        }
        ensure!(lag(node)?.is_none(), "{:?}", lag(node)?);
    }
    for web in &webs {
        ensure!(log_has(node, web, "no room for the previous policy")?);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn policy_without_room_is_reported_and_holds_nobody_up() -> anyhow::Result<()> {
    let (bed, folder) = bed()?;
    let (here, there) = (bed.node(1), bed.node(2));
    let near = Member::on(here, "near", "--label role=friend")?;
    let web = Member::on(here, "web", "--label app=web")?;
    enforce(here, folder.path(), &rules(20_000, 1))?;

    let too_many = hosts_for(POLICY_ENTRIES + 10_000);
    ensure!(!import(here, folder.path(), &rules(20_001, too_many))?);
    let reported = wait_for("the lack of room to be reported", PATIENCE, || {
        let lag = lag(here)?.context("nothing is reported")?;
        ensure!(lag.reason.contains("HEALTH_POLICY"), "{lag:?}");
        Ok(Some(lag))
    })?;
    ensure!(reported.endpoints == 1, "{reported:?}");
    ensure!(log_has(here, &web, "HEALTH_POLICY")?);
    let shown = here.cli("status")?;
    ensure!(
        shown
            .stdout
            .contains("Policy:   not in force for 1 endpoint: ")
    );
    let (code, liveness) = liveness(here)?;
    let problems = liveness.problems();
    let policy = problems.iter().find(|one| one.check == "policy");
    let policy = policy.with_context(|| format!("{liveness:?}"))?;
    ensure!(code == 200 && !policy.is_failure, "{liveness:?}");
    ensure!(policy.message.contains("HEALTH_POLICY"), "{policy:?}");

    // The previous rules stay in force, also for new endpoints.
    wait_passes(&near, &web, 20_000)?;
    ensure!(!passes(&near, &web, 20_001)?, "the new rules hold");
    let far = Member::on(there, "far", "--label role=friend")?;
    let address: IpAddr = far.ipv4()?;
    wait_for("the address of another node's endpoint", PATIENCE, || {
        let known = here.listing(&format!("bpf ipcache get {address}"))?;
        let entry = known.get(0).unwrap_or(&known);
        ensure!(entry["identity"] == far.endpoint.identity, "{known}");
        Ok(Some(()))
    })?;
    wait_passes(&far, &web, 20_000)?;

    enforce(here, folder.path(), &rules(20_001, 2))?;
    ensure!(lag(here)?.is_none(), "{:?}", lag(here)?);
    wait_passes(&far, &web, 20_001)?;
    ensure!(!passes(&far, &web, 20_000)?, "the former rules hold");
    Ok(())
}
