//! Pods and services.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::ensure;
use health_model::api::Endpoint;
use serde_json::json;
use tests::kubernetes::Cluster;
use tests::{PATIENCE, wait_for};

use super::NODES;
use super::client::{PORTS, Pod, ask, deployment, namespace, pod, service, while_asking};

const NAMESPACE: &str = "shop";
const REPLICAS: usize = 20;
const NODE_PORT: u16 = 30080;

#[test]
fn pods_and_services_are_reached_while_a_deployment_rolls_and_a_namespace_leaves_nothing()
-> anyhow::Result<()> {
    let cluster = Cluster::start(&NODES)?;
    let before = left(&cluster)?;
    let labels = json!({ "app": "client" });
    cluster.plane.apply(&[namespace(NAMESPACE, &json!({}))])?;
    cluster.plane.apply(&[
        pod(NAMESPACE, "client-1", NODES[0], &labels),
        pod(NAMESPACE, "client-2", NODES[1], &labels),
    ])?;
    cluster
        .plane
        .apply(&deployment(NAMESPACE, "web", REPLICAS, NODE_PORT))?;
    rolled_out(&cluster)?;

    reach_pods(&cluster)?;
    reach_services(&cluster)?;
    roll(&cluster)?;

    cluster
        .plane
        .kubectl(&format!("delete namespace {NAMESPACE}"))?;
    wait_for("nothing to be left of the namespace", PATIENCE, || {
        let now = left(&cluster)?;
        ensure!(now == before, "left: {now:?}, before: {before:?}");
        Ok(Some(()))
    })
}

fn rolled_out(cluster: &Cluster) -> anyhow::Result<()> {
    let wait = format!("rollout status -n {NAMESPACE} deployment/web --timeout 300s");
    cluster.plane.kubectl(&wait).map(drop)
}

/// Each client reaches each pod of the Deployment at all its addresses, on both nodes.
fn reach_pods(cluster: &Cluster) -> anyhow::Result<()> {
    let servers = Pod::all(cluster, NAMESPACE, "app=web")?;
    ensure!(
        servers.len() == REPLICAS,
        "{} pods are ready",
        servers.len()
    );
    let nodes: BTreeSet<_> = servers.iter().map(|server| &*server.node).collect();
    ensure!(nodes.len() == NODES.len(), "all pods are on {nodes:?}");
    for client in ["client-1", "client-2"] {
        let client = Pod::ready(cluster, NAMESPACE, client)?;
        for server in &servers {
            ensure!(server.addresses.len() == 2, "{server:?}");
            for address in &server.addresses {
                let name = client.ask((*address, PORTS[0]).into())?;
                ensure!(name == server.name, "{address} is {name}");
            }
        }
    }
    Ok(())
}

/// Each backend is chosen sometimes, by the service's address from each node, and by the node port from outside.
fn reach_services(cluster: &Cluster) -> anyhow::Result<()> {
    let servers = Pod::all(cluster, NAMESPACE, "app=web")?;
    let all: BTreeSet<String> = servers.into_iter().map(|server| server.name).collect();
    let inside = service(cluster, NAMESPACE, "web")?;
    for client in ["client-1", "client-2"] {
        let client = Pod::ready(cluster, NAMESPACE, client)?;
        all_answer(&all, || client.ask(inside))?;
    }
    for node in cluster.nodes() {
        let outside = SocketAddr::from((node.address(), NODE_PORT));
        all_answer(&all, || ask(outside))?;
    }
    Ok(())
}

fn all_answer(
    all: &BTreeSet<String>,
    mut ask: impl FnMut() -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    wait_for("each backend to be chosen", PATIENCE, || {
        seen.insert(ask()?);
        Ok((seen == *all).then_some(()))
    })
}

/// No request fails while all pods of the Deployment are replaced.
fn roll(cluster: &Cluster) -> anyhow::Result<()> {
    let client = Pod::ready(cluster, NAMESPACE, "client-1")?;
    let target = service(cluster, NAMESPACE, "web")?;
    let ((), requests) = while_asking(&client, target, || {
        let restart = format!("rollout restart -n {NAMESPACE} deployment/web");
        cluster.plane.kubectl(&restart)?;
        rolled_out(cluster)
    })?;
    println!(
        "{} requests were answered while the pods were replaced",
        requests.answered
    );
    ensure!(requests.errors.is_empty(), "{requests:?}");
    Ok(())
}

/// What the nodes have of the pods: endpoints and devices of each node, and the names of its services.
fn left(cluster: &Cluster) -> anyhow::Result<Vec<(usize, usize, String)>> {
    let nodes = cluster.nodes().iter().map(|node| {
        let endpoints: Vec<Endpoint> = serde_json::from_str(&node.agent("endpoint list -o json")?)?;
        let devices = node.run("ip -oneline link")?.lines().count();
        Ok((endpoints.len(), devices, node.agent("service list")?))
    });
    nodes.collect()
}
