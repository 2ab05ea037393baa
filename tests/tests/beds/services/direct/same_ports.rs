//! A client connects from one port to several services with the same backend, of which one is answered directly.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tests::outside::FAR;
use tests::served::{Connection, ServiceManifest};
use tests::{Node, PATIENCE, wait_for};

use super::super::Stand;
use super::super::outside::{node_port, node_targets};
use super::super::wait_answered_by;

/// The backend of all these services.
const BACKEND: &str = "web-2";

/// Creates two services, one that the first node answers and one that the backend's node answers. Returns the addresses
/// of both, with the client's source address for each.
fn services(
    stand: &Stand,
    names: [&str; 2],
    number: u8,
) -> anyhow::Result<Vec<([SocketAddr; 2], IpAddr)>> {
    let numbers = [number, number + 100];
    for ((name, forwarding), number) in names.into_iter().zip(["snat", "dsr"]).zip(numbers) {
        let mut service = ServiceManifest::new(name, number)
            .of([stand.backend(BACKEND)?])
            .with_node_port(node_port(number));
        service.annotations = json!({ "service.health-agent.io/forwarding": forwarding });
        stand.write(&service)?;
    }
    let [masqueraded, direct] = numbers.map(|number| node_targets(stand, number));
    let both = masqueraded.into_iter().zip(direct);
    both.map(|((masqueraded, client), (direct, _))| {
        for target in [masqueraded, direct] {
            wait_answered_by(FAR, target, &[BACKEND])?;
        }
        Ok(([masqueraded, direct], client))
    })
    .collect()
}

/// Number of the node's conntrack entries for a client port.
fn tracked(node: &Node, client: IpAddr, port: u16) -> anyhow::Result<usize> {
    let listed = node.listing(&format!("bpf ct list --proto tcp --src {client}"))?;
    let rows = listed.as_array().context("no list")?;
    Ok(rows.iter().filter(|row| row["source-port"] == port).count())
}

/// A reset connection leaves conntrack while the other one is still open, to which the shared flow to the backend then
/// belongs.
pub(super) fn outlives(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let mut open = Vec::new();
    let ports = (25_001..).step_by(10);
    for ((targets, client), base) in services(stand, ["old", "new"], number)?
        .into_iter()
        .zip(ports)
    {
        for (order, port) in [[0, 1], [1, 0]].into_iter().zip(base..) {
            let [first, second] = order.map(|index: usize| targets[index]);
            let mut connection = Connection::open_from(FAR, port, first)?;
            connection.ask()?;
            connection.reset()?;
            let mut connection = Connection::open_from(FAR, port, second)
                .with_context(|| format!("after one to {first}"))?;
            connection.ask()?;
            ensure!(
                tracked(node, client, port)? == 2,
                "from {port} to {first} and {second}"
            );
            open.push((connection, client, port, first, second));
        }
    }
    for (connection, client, port, first, second) in &mut open {
        wait_for(
            "the connection that was reset to be forgotten",
            PATIENCE,
            || Ok((tracked(node, *client, *port)? == 1).then_some(())),
        )?;
        connection
            .ask()
            .with_context(|| format!("to {second}, once that to {first} is forgotten"))?;
        // The new connection goes through another port and through this node.
        let mut other = Connection::open_from(FAR, *port, *first)
            .with_context(|| format!("to {first}, beside {second}"))?;
        other.ask()?;
        connection
            .ask()
            .with_context(|| format!("to {second}, beside one to {first}"))?;
    }
    Ok(())
}

/// The client's port is free at once, although the first node does not see the backend's FIN.
pub(super) fn are_free(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let ports = (26_001..).step_by(10);
    for (([masqueraded, direct], _), base) in services(stand, ["masked", "plain"], number)?
        .into_iter()
        .zip(ports)
    {
        for port in base..base + 5 {
            for target in [direct, masqueraded] {
                let mut connection = Connection::open_from(FAR, port, target)
                    .with_context(|| format!("from {port} to {target}"))?;
                connection.ask()?;
            }
        }
    }
    Ok(())
}
