//! The pods of a node.

use anyhow::Context as _;
use health_probe::source::ObjectPod;
use health_registry::kubernetes::{ObjectTable, PodWatch};
use serde_json::{Value, json};

use super::{ApiServer, until};

type Pods = ObjectTable<ObjectPod>;

/// A pod that already has a node, so that no scheduler is needed.
fn pod(node: &str, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "nodeName": node, "automountServiceAccountToken": false,
            "containers": [{
                "name": "app", "image": "busybox",
                "livenessProbe": { "exec": { "command": ["test", "-e", "/tmp/alive"] } },
                "readinessProbe": { "httpGet": { "port": 8080 }, "periodSeconds": 2 },
            }],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_of_a_node_are_those_of_a_real_api_server() -> anyhow::Result<()> {
    let mut server = ApiServer::start()?;
    // In a real cluster, a controller creates this account.
    server.plane.kubectl("create serviceaccount default")?;
    let kubeconfig = server.agents()?;
    let mut bad = pod("n1", "bad");
    bad["metadata"]["annotations"] = json!({ "probe.health-agent.io/app.liveness.period": "fast" });
    let objects = [pod("n1", "a"), pod("n2", "elsewhere"), bad];
    server.plane.apply(&objects)?;

    let watched = PodWatch::open(Some(&kubeconfig), "n1", ObjectPod::read)?;
    let mut watch = watched.pods.table();
    let is_right = |pods: &Pods, count| pods.stale.is_none() && pods.objects.len() == count;
    let seen = until(&mut watch, "the pods", |pods| is_right(pods, 2)).await?;
    let a = seen.objects["default/a"].pod().context("a pod")?;
    // The server added a UID and defaults.
    assert_eq!(a.spec.uid.len(), 36);
    assert!(a.spec.containers[0].liveness.is_some());
    assert_eq!(seen.objects["default/a"].problems().count(), 0);
    assert_eq!(seen.objects["default/bad"].problems().count(), 1);

    server.plane.apply(&[pod("n1", "b")])?;
    until(&mut watch, "another one", |pods| is_right(pods, 3)).await?;
    // With a grace period, a pod stays in deletion until its kubelet reports that it is gone.
    server.plane.kubectl("delete pod b --wait=false")?;
    until(&mut watch, "its end to be reported", |pods| {
        let b = pods.objects.get("default/b").and_then(|b| b.pod());
        b.and_then(|b| b.status.as_ref())
            .is_some_and(|status| status.deleting)
    })
    .await?;
    let gone = "delete pod b --force --grace-period=0";
    server.plane.kubectl(gone)?;
    until(&mut watch, "it to be gone", |pods| is_right(pods, 2)).await?;

    server.plane.kill_api_server();
    let stale = until(&mut watch, "stale", |pods| pods.stale.is_some()).await?;
    assert_eq!(stale.objects.len(), 2);
    server.plane.start_api_server()?;
    server.plane.apply(&[pod("n1", "c")])?;
    until(&mut watch, "the server's return", |pods| is_right(pods, 3)).await?;

    server.revoke()?;
    let is_reported = |pods: &Pods| {
        let reason = pods.stale.as_ref().map(|stale| stale.reason.as_str());
        reason.is_some_and(|reason| reason.contains("(403)"))
    };
    let refused = until(&mut watch, "the refusal", is_reported).await?;
    assert_eq!(refused.objects.len(), 3);
    Ok(())
}
