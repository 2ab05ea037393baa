//! Agents, nodes and API servers that go and come back.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;
use tests::kubernetes::Cluster;
use tests::ping::{Pace, Pinging};
use tests::{PATIENCE, wait_for};

use super::NODES;
use super::client::{Pod, deployment, namespace, pod, service, while_asking};

const NAMESPACE: &str = "shop";
/// How long the API server is away.
const OUTAGE: Duration = Duration::from_secs(60);
/// The name of a client's network namespace on this machine.
const CLIENT: &str = "h-client";

#[test]
fn pods_and_services_survive_upgrades_outages_and_reboots() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(&NODES)?;
    let labels = json!({ "app": "client" });
    cluster.plane.apply(&[namespace(NAMESPACE, &json!({}))])?;
    cluster
        .plane
        .apply(&[pod(NAMESPACE, "client", NODES[0], &labels)])?;
    cluster
        .plane
        .apply(&deployment(NAMESPACE, "web", 4, 30080))?;
    let wait = format!("rollout status -n {NAMESPACE} deployment/web --timeout 300s");
    cluster.plane.kubectl(&wait)?;
    let target = service(&cluster, NAMESPACE, "web")?;

    upgrade(&cluster, target)?;
    lose_api_server(&mut cluster, target)?;
    reboot(&mut cluster, target)
}

/// Nothing is lost while the agents are replaced, node by node.
fn upgrade(cluster: &Cluster, target: SocketAddr) -> anyhow::Result<()> {
    let client = Pod::ready(cluster, NAMESPACE, "client")?;
    let servers = Pod::all(cluster, NAMESPACE, "app=web")?;
    let remote = servers.iter().find(|server| server.node != client.node);
    let remote = remote.map(Pod::ipv4).transpose()?;
    give_name(&client)?;
    let pinging = Pinging::start(CLIENT, remote.unwrap_or(target.ip()), Pace::DENSE);
    let ((), requests) = while_asking(&client, target, || {
        cluster
            .plane
            .kubectl("rollout restart -n health-agent daemonset/health-agent")?;
        cluster.wait_until_ready()
    })?;
    let pings = pinging.end()?;
    println!(
        "agents were replaced under {} requests and {} pings",
        requests.answered, pings.transmitted
    );
    ensure!(requests.errors.is_empty(), "{requests:?}");
    ensure!(pings.lost() == 0, "{pings:?}");
    Ok(())
}

/// Makes the namespace of a pod one of this machine, by the name [`CLIENT`].
fn give_name(pod: &Pod) -> anyhow::Result<()> {
    let folder = Path::new("/run/netns");
    fs::create_dir_all(folder)?;
    let path = folder.join(CLIENT);
    fs::write(&path, "")?;
    let (from, nothing) = (pod.netns.path(), None::<&str>);
    nix::mount::mount(
        Some(from),
        &path,
        nothing,
        nix::mount::MsFlags::MS_BIND,
        nothing,
    )?;
    Ok(())
}

/// Traffic goes on while the API server is away, and all nodes are ready when it is back.
fn lose_api_server(cluster: &mut Cluster, target: SocketAddr) -> anyhow::Result<()> {
    let client = Pod::ready(cluster, NAMESPACE, "client")?;
    cluster.plane.kill_api_server();
    let ((), requests) = while_asking(&client, target, || {
        thread::sleep(OUTAGE);
        Ok(())
    })?;
    println!(
        "{} requests were answered during the outage",
        requests.answered
    );
    ensure!(requests.errors.is_empty(), "{requests:?}");
    cluster.plane.start_api_server()?;
    cluster.wait_until_ready()
}

/// A node that lost its power has its pods again, and they are reached.
fn reboot(cluster: &mut Cluster, target: SocketAddr) -> anyhow::Result<()> {
    cluster.reboot(NODES[1])?;
    cluster.wait_until_ready()?;
    let wait = format!("rollout status -n {NAMESPACE} deployment/web --timeout 300s");
    cluster.plane.kubectl(&wait)?;
    let client = Pod::ready(cluster, NAMESPACE, "client")?;
    wait_for(
        "the pods of the rebooted node to be reached",
        PATIENCE,
        || {
            let servers = Pod::all(cluster, NAMESPACE, "app=web")?;
            let rebooted = servers.iter().filter(|server| server.node == NODES[1]);
            let rebooted: Vec<_> = rebooted.collect();
            ensure!(!rebooted.is_empty(), "no pod is ready on {}", NODES[1]);
            for server in rebooted {
                let name = client.ask((server.ipv4()?, 8080).into())?;
                ensure!(
                    name == server.name,
                    "{name} answers at the address of {}",
                    server.name
                );
            }
            client.ask(target)?;
            Ok(Some(()))
        },
    )
}
