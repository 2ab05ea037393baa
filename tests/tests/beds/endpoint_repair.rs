//! When other processes change the host's side of a workload's endpoint, the endpoint's log reports the change, and the
//! endpoint is repaired.

use anyhow::{Context as _, ensure};
use health_endpoint::log::{LogEntry, Status};
use health_model::api::{Endpoint, EndpointHealth, HealthState};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

/// Waits until the endpoint is well: anything missing stays missing for a moment.
fn wait_well(node: &Node, member: &Member) -> anyhow::Result<()> {
    let id = member.endpoint.id;
    wait_for("the endpoint to be well", PATIENCE, || {
        let health = node.listing(&format!("endpoint health {id}"))?;
        let health: EndpointHealth = serde_json::from_value(health)?;
        let mut is_well = health.overall_health == HealthState::Ok && health.connected;
        for address in member.addresses() {
            is_well = is_well && node.pings(address)?;
        }
        Ok(is_well.then_some(()))
    })
}

/// Number of log entries that report a failure in these words.
fn reported(node: &Node, member: &Member, words: &str) -> anyhow::Result<usize> {
    let log = node.listing(&format!("endpoint log {}", member.endpoint.id))?;
    let log: Vec<LogEntry> = serde_json::from_value(log)?;
    let failures = log.iter().filter(|line| line.status == Status::Failure);
    Ok(failures.filter(|line| line.message.contains(words)).count())
}

#[test]
#[ignore = "needs root"]
fn the_devices_of_an_endpoint_are_put_right() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let member = Member::on(node, "broken", "--label app=broken")?;
    let device = &member.endpoint.interface;
    let ipv4 = member.ipv4()?;
    let ipv6 = member.endpoint.ipv6.context("no IPv6 address")?;
    let inside = format!("ip netns exec {} ip", member.name);
    wait_well(node, &member)?;
    for (words, harm) in [
        (
            format!("the route to {ipv4}/32 is missing"),
            format!("ip route delete {ipv4}"),
        ),
        (
            format!("the route to {ipv6}/128 is missing"),
            format!("ip -6 route delete {ipv6}"),
        ),
        (
            format!("the neighbour entry of {ipv4} is missing"),
            format!("ip neighbour delete {ipv4} dev {device}"),
        ),
    ] {
        let before = reported(node, &member, &words)?;
        node.exec(&harm)?;
        wait_for(&format!("the repair of: {words}"), PATIENCE, || {
            Ok((reported(node, &member, &words)? > before).then_some(()))
        })?;
        wait_well(node, &member)?;
    }
    // A workload may change anything in its own namespace.
    node.exec(&format!("{inside} link set lo up"))?;
    node.exec(&format!("{inside} route replace default dev lo"))?;
    // The kernel removes the routes of a device that goes down.
    node.exec(&format!("ip link set {device} down"))?;
    node.exec(&format!("ip link set {device} up"))?;
    wait_for("the routes of a device that was down", PATIENCE, || {
        let routes = node.exec(&format!("ip route show dev {device}"))?;
        Ok(routes.contains(&ipv4.to_string()).then_some(()))
    })?;
    let routes = node.exec(&format!("{inside} route show default"))?;
    ensure!(routes.trim() == "default dev lo scope link", "{routes}");
    node.exec(&format!("{inside} route delete default"))?;
    let shown = node.listing(&format!("endpoint get {}", member.endpoint.id))?;
    let shown: Endpoint = serde_json::from_value(shown)?;
    let repairs = shown.repairs;
    for cause in ["route-lost", "neighbour-missing"] {
        ensure!(repairs.contains_key(cause), "{repairs:?}");
    }
    Ok(())
}
