//! The registry of nodes.

use health_registry::nodes::kubernetes::{
    EXCLUDE_LABEL, IPV4_HEALTH_ANNOTATION, KubernetesRegistry,
};
use health_registry::nodes::{Node, NodeSet, Registry as _};
use serde_json::Value;
use tests::apiserver::node;
use tests::kubernetes::ControlPlane;
use tests::{PATIENCE, wait_for};

use super::{ApiServer, RBAC, until};

const NODES: usize = 450;

fn reason(set: &NodeSet) -> Option<&str> {
    Some(set.sources[0].stale.as_ref()?.reason.as_str())
}

fn is_right(set: &NodeSet, nodes: usize) -> bool {
    reason(set).is_none() && set.nodes.len() == nodes
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_holds_what_a_real_api_server_says() -> anyhow::Result<()> {
    let mut server = ApiServer::start()?;
    let kubeconfig = server.agents()?;
    let named = |i: usize| {
        let (high, low) = (i / 250, i % 250 + 1);
        node(
            &format!("n{i:03}"),
            &[&format!("172.30.{high}.{low}")],
            &[&format!("10.{}.{low}.0/24", 100 + high)],
        )
    };
    let nodes: Vec<Value> = (0..NODES).map(named).collect();
    server.plane.apply(&nodes)?;

    let registry = KubernetesRegistry::open(Some(&kubeconfig), "west", Some("n001"))?;
    let mut watch = registry.watch();
    let set = until(&mut watch, "all nodes", |set| is_right(set, NODES)).await?;
    assert_eq!(set.sources[0].rejected, []);
    assert_eq!(set.nodes[7].pod_cidrs, ["10.100.8.0/24".parse()?]);

    let own = Node {
        health_addresses: vec!["10.100.2.7".parse()?],
        ..set.nodes[1].clone()
    };
    registry.publish(own);
    wait_for_annotation(&server.plane, "n001", "10.100.2.7")?;
    let is_reported = |set: &NodeSet| set.nodes[1].health_addresses.len() == 1;
    until(&mut watch, "the published address", is_reported).await?;
    let remove = format!("{IPV4_HEALTH_ANNOTATION}-");
    server
        .plane
        .kubectl(&format!("annotate node n001 {remove}"))?;
    wait_for_annotation(&server.plane, "n001", "10.100.2.7")?;

    let label = format!("{EXCLUDE_LABEL}=yes");
    server.plane.kubectl(&format!("label node n002 {label}"))?;
    until(&mut watch, "the node to leave", |set| {
        is_right(set, NODES - 1)
    })
    .await?;
    let unlabel = format!("{EXCLUDE_LABEL}-");
    server
        .plane
        .kubectl(&format!("label node n002 {unlabel}"))?;
    until(&mut watch, "the node to return", |set| is_right(set, NODES)).await?;
    server.plane.apply(&[node("z", &["not-an-address"], &[])])?;
    let is_reported = |set: &NodeSet| set.sources[0].rejected.len() == 1;
    let set = until(&mut watch, "the rejection", is_reported).await?;
    assert_eq!(set.sources[0].rejected[0].key, "z");
    assert!(is_right(&set, NODES));

    // Kills and restarts the server, during which nothing is lost.
    server.plane.kill_api_server();
    let set = until(&mut watch, "stale", |set| reason(set).is_some()).await?;
    assert_eq!(set.nodes.len(), NODES);
    server.plane.start_api_server()?;
    until(&mut watch, "the server's return", |set| {
        is_right(set, NODES)
    })
    .await?;

    // Changes that the watch misses and that no history contains.
    server.plane.kill_api_server();
    until(&mut watch, "stale", |set| reason(set).is_some()).await?;
    let removed = ["n003", "n004"].map(|node| format!("/registry/minions/{node}"));
    for key in &removed {
        server.plane.etcdctl(&format!("del {key}"))?;
    }
    let read = server.plane.etcdctl("get --write-out=json /registry")?;
    let read: Value = serde_json::from_str(&read)?;
    let revision = &read["header"]["revision"];
    server.plane.etcdctl(&format!("compact {revision}"))?;
    server.plane.start_api_server()?;
    until(&mut watch, "the two to go", |set| is_right(set, NODES - 2)).await?;

    // Access is revoked, which the server reports at the next request.
    server.revoke()?;
    let is_reported = |set: &NodeSet| reason(set).is_some_and(|reason| reason.contains("(403)"));
    let set = until(&mut watch, "the refusal", is_reported).await?;
    assert_eq!(set.nodes.len(), NODES - 2);
    server.apply(RBAC)?;
    until(&mut watch, "the access", |set| is_right(set, NODES - 2)).await?;
    Ok(())
}

/// The annotation as kubectl reports it, and whether the agent wrote it.
fn annotation(plane: &ControlPlane, name: &str) -> anyhow::Result<(Option<String>, bool)> {
    let object = plane.get(&format!("node {name} --show-managed-fields"))?;
    let metadata = &object["metadata"];
    let managers = metadata["managedFields"].as_array();
    let is_ours = managers.is_some_and(|managers| {
        managers.iter().any(|entry| {
            let fields = &entry["fieldsV1"]["f:metadata"]["f:annotations"];
            let key = format!("f:{IPV4_HEALTH_ANNOTATION}");
            entry["manager"] == "health-agent" && !fields[key].is_null()
        })
    });
    let value = metadata["annotations"][IPV4_HEALTH_ANNOTATION].as_str();
    Ok((value.map(str::to_owned), is_ours))
}

fn wait_for_annotation(plane: &ControlPlane, name: &str, address: &str) -> anyhow::Result<()> {
    wait_for("the annotation", PATIENCE, || {
        let annotation = annotation(plane, name)?;
        Ok((annotation == (Some(address.to_owned()), true)).then_some(()))
    })
}
