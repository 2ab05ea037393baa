//! Two clusters that probe each other, each with its own etcd.

use std::net::Ipv4Addr;
use std::time::Instant;

use tests::bed::Etcd;
use tests::{Bed, Node, PATIENCE, wait_for};

const EAST: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
const WEST: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 253);
const ALL: [&str; 4] = ["east/hnode1", "east/hnode2", "west/hnode3", "west/hnode4"];

/// Nodes 1 and 2 belong to the cluster `east`, nodes 3 and 4 to `west`.
fn flags(index: u8) -> String {
    let (cluster, own, other, remote) = match index {
        1 | 2 => ("east", EAST, "west", WEST),
        _ => ("west", WEST, "east", EAST),
    };
    format!(
        "--cluster-name {cluster} --registry etcd:http://{own}:2379 \
         --remote-cluster {other}=etcd:http://{remote}:2379 \
         --node-address 172.30.0.{index} --pod-cidr 10.244.{index}.0/24"
    )
}

fn all_reachable(node: &Node) -> anyhow::Result<bool> {
    let ran = node.cli("status --probe -o json")?;
    let status: serde_json::Value = serde_json::from_str(&ran.stdout)?;
    let nodes = status["nodes"].as_array().map_or(0, Vec::len);
    Ok(ran.code == Some(0) && nodes == ALL.len())
}

#[test]
#[ignore = "needs root"]
fn two_clusters_probe_each_other_and_one_stores_outage_loses_nobody() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(4)
        .registry(flags)
        .without_agents()
        .start()?;
    let east = Etcd::start(&bed, EAST, "")?;
    let mut west = Etcd::start(&bed, WEST, "")?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    for node in bed.nodes() {
        wait_for("all of both clusters to be reachable", PATIENCE, || {
            Ok((node.listed_nodes()? == ALL && all_reachable(node)?).then_some(()))
        })?;
    }

    west.kill()?;
    for node in bed.nodes() {
        wait_for("the outage to be reported", PATIENCE, || {
            let reported = node.cli("node list")?.stderr;
            let stale =
                reported.contains(&WEST.to_string()) && !reported.contains(&EAST.to_string());
            Ok(stale.then_some(()))
        })?;
        assert_eq!(node.listed_nodes()?, ALL);
        assert!(all_reachable(node)?);
    }
    west.restart()?;
    let since = Instant::now();
    // A record with the name of a node in `east`, one with an address in `east`, and one from another cluster.
    let record = |name: &str, cluster: &str, address: &str| {
        format!(r#"{{"name":"{name}","cluster":"{cluster}","addresses":["{address}"]}}"#)
    };
    let prefix = "/health-agent/v1/west/nodes";
    west.put(
        &format!("{prefix}/hnode1"),
        &record("hnode1", "west", "172.30.0.201"),
    )?;
    west.put(
        &format!("{prefix}/thief"),
        &record("thief", "west", "172.30.0.1"),
    )?;
    west.put(
        &format!("{prefix}/alien"),
        &record("alien", "north", "172.30.0.202"),
    )?;
    let node = bed.node(1);
    wait_for("the news of the west", PATIENCE, || {
        Ok(node
            .listed_nodes()?
            .contains(&"west/hnode1".to_owned())
            .then_some(()))
    })?;
    println!(
        "the news of the west were there after {:?}",
        since.elapsed()
    );
    wait_for("the refusals", PATIENCE, || {
        let reported = node.cli("node list")?.stderr;
        let by_address = reported.contains("address 172.30.0.1 is listed twice");
        let by_cluster = reported.contains("it belongs to cluster \"north\"");
        Ok((by_address && by_cluster).then_some(()))
    })?;
    for name in ALL {
        assert!(
            node.listed_nodes()?.contains(&name.to_owned()),
            "{name} is lost"
        );
    }
    // Dropped before etcd, while its nodes can still deregister.
    drop(bed);
    drop(east);
    Ok(())
}
