//! Removal of the agents from a cluster.

use std::fs;

use anyhow::{Context as _, ensure};
use serde_json::json;
use tests::deploy;
use tests::kubernetes::{Cluster, ClusterNode};
use tests::process::run_with_input;

use super::NODES;
use super::client::{deployment, namespace};

const NAMESPACE: &str = "shop";

#[test]
fn agents_are_removed_node_by_node_with_all_that_they_made() -> anyhow::Result<()> {
    let cluster = Cluster::start(&NODES)?;
    let plane = &cluster.plane;
    plane.apply(&[namespace(NAMESPACE, &json!({}))])?;
    plane.apply(&deployment(NAMESPACE, "web", 4, 30080))?;
    plane.kubectl(&format!(
        "rollout status -n {NAMESPACE} deployment/web --timeout 300s"
    ))?;
    for node in cluster.nodes() {
        print_memory(node)?;
        ensure!(!left(node)?.is_empty(), "nothing is there to remove");
    }
    // In place of a drain, which would leave the pods pending.
    plane.kubectl(&format!("delete namespace {NAMESPACE} --timeout 300s"))?;

    let removal = json!({ "apiVersion": "v1", "kind": "List", "items": deploy::removal()? });
    let mut replace = plane.kubectl_command();
    run_with_input(replace.args(["replace", "-f", "-"]), &removal.to_string())?.success()?;
    plane.kubectl("rollout status -n health-agent daemonset/health-agent --timeout 300s")?;
    for node in cluster.nodes() {
        let left = left(node)?;
        ensure!(
            left.is_empty(),
            "{} is left on {}",
            left.join(", "),
            node.name()
        );
        let plugins = fs::read_dir(node.file("/opt/cni/bin")?)?;
        ensure!(plugins.count() == 1, "the plugin loopback is gone");
    }
    Ok(())
}

/// Files in the agents' folders that are not theirs: the plugin of the cluster, and those that the kernel puts into
/// each bpffs.
const OTHERS: [&str; 3] = ["loopback", "maps.debug", "progs.debug"];

/// What agents made on a node.
fn left(node: &ClusterNode) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    for folder in [
        "/etc/cni/net.d",
        "/opt/cni/bin",
        "/sys/fs/bpf",
        "/run/health-agent",
        "/var/lib/health-agent",
    ] {
        let path = node.file(folder)?;
        for entry in fs::read_dir(&path).with_context(|| format!("cannot list {folder}"))? {
            let name = entry?.file_name().into_string().unwrap_or_default();
            if !OTHERS.contains(&name.as_str()) {
                left.push(format!("{folder}/{name}"));
            }
        }
    }
    let links = node.run("ip -brief link")?;
    let links = links
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    left.extend(
        links
            .filter(|link| link.starts_with("lxc"))
            .map(str::to_owned),
    );
    Ok(left)
}

/// Prints the memory usage of the agent's control group, on which the requests and limits in the manifests are based.
fn print_memory(node: &ClusterNode) -> anyhow::Result<()> {
    let pid = node.run("pidof health-agent")?;
    let pid = pid.split_whitespace().next().context("no agent")?;
    let groups = node.run(&format!("cat /proc/{pid}/cgroup"))?;
    let group = groups.lines().find_map(|line| line.split_once(":memory:"));
    let (_, group) = group.context("no control group of memory")?;
    let usage = node.run(&format!(
        "cat /sys/fs/cgroup/memory{group}/memory.usage_in_bytes"
    ))?;
    let usage: u64 = usage.trim().parse()?;
    println!("the agent of {} takes {} MiB", node.name(), usage >> 20);
    Ok(())
}
