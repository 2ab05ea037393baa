//! The condition that an agent keeps in its Node object.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_registry::kubernetes::{ConditionStatus, ConditionWriter, NodeCondition};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Behaviour, node};
use tests::{PATIENCE, wait_for};

use crate::agent_status::controller;
use crate::kubernetes_labels::Stand;

const NODE: &str = "hnode1";
const TYPE: &str = "HealthAgentReady";

/// The condition of this type in the node's object.
fn condition(server: &ApiServer, kind: &str) -> Option<Value> {
    let node = server.get(NODE)?;
    let conditions = node["status"]["conditions"].as_array()?;
    conditions.iter().find(|one| one["type"] == kind).cloned()
}

/// Waits until the condition has this status and reason.
fn wait_condition(server: &ApiServer, status: &str, reason: &str) -> anyhow::Result<Value> {
    let found = wait_for("the condition", PATIENCE, || {
        let found = condition(server, TYPE);
        Ok(found.filter(|one| one["status"] == status && one["reason"] == reason))
    });
    found.with_context(|| format!("{status} {reason}: {:?}", server.get(NODE)))
}

fn writes(server: &ApiServer) -> usize {
    let requests = server.requests();
    let start = format!("PATCH /api/v1/nodes/{NODE}/status");
    requests
        .iter()
        .filter(|one| one.starts_with(&start))
        .count()
}

/// A condition that the kubelet writes.
fn of_kubelet() -> Value {
    json!({ "type": "Ready", "status": "True", "reason": "KubeletReady" })
}

#[test]
#[ignore = "needs root"]
fn the_condition_of_a_node_is_about_its_agent_alone() -> anyhow::Result<()> {
    let with_condition = |server: &ApiServer| {
        let mut object = server.get(NODE).unwrap_or_default();
        object["status"]["conditions"] = json!([of_kubelet()]);
        server.put(object);
    };
    let stand = Stand::start_in_cluster(with_condition, "--node-condition")?;
    let server = &stand.server;
    let well = wait_condition(server, "True", "AgentOk")?;
    assert_eq!(well["message"], "the agent does all its work");
    assert_eq!(condition(server, "Ready"), Some(of_kubelet()));
    let writer = controller(stand.node(), "node-condition")?;
    assert_eq!(writer.consecutive_failures, 0, "{writer:?}");
    assert_eq!(writer.interval.as_deref(), Some("5m0s"));

    // A node that nobody can reach says nothing of the others.
    let written = writes(server);
    server.put(node("ghost", &["172.30.0.99"], &[]));
    wait_for("the ghost to be unreachable", PATIENCE, || {
        let brief = stand.node().cli("status --brief")?;
        Ok((brief.stdout == "Failing: 1/2 reachable\n").then_some(()))
    })?;
    assert_eq!(writes(server), written);

    let aside = stand.node().socket().with_extension("aside");
    fs::rename(stand.node().socket(), &aside)?;
    let ill = wait_condition(server, "False", "AgentFailing")?;
    let message = ill["message"].as_str().unwrap_or_default();
    ensure!(message.contains("api-socket"), "{ill}");
    fs::rename(&aside, stand.node().socket())?;
    let well = wait_condition(server, "True", "AgentOk")?;

    stand.node().kill_agent(Signal::SIGTERM)?;
    let stopped = condition(server, TYPE).context("no condition")?;
    assert_eq!(
        (&stopped["status"], &stopped["reason"]),
        (&json!("Unknown"), &json!("AgentStopped"))
    );
    let since = |condition: &Value| condition["lastTransitionTime"].as_str().map(str::to_owned);
    ensure!(since(&stopped) >= since(&well), "{stopped} {well}");
    assert_eq!(condition(server, "Ready"), Some(of_kubelet()));
    Ok(())
}

/// A server with the node, and a writer of its condition.
fn opened(folder: &tempfile::TempDir) -> anyhow::Result<(ApiServer, ConditionWriter)> {
    let server = ApiServer::start()?;
    server.put(node(NODE, &["172.30.0.1"], &[]));
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let writer = ConditionWriter::open(Some(&kubeconfig), NODE, TYPE)?;
    Ok((server, writer))
}

fn is_well(message: &str) -> NodeCondition {
    NodeCondition {
        status: ConditionStatus::True,
        reason: "AgentOk",
        message: message.to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_condition_is_written_on_change_alone_and_its_transition_outlives_the_agent()
-> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (server, writer) = opened(&folder)?;
    writer.set(is_well("1/1 reachable"));
    let first = wait_condition(&server, "True", "AgentOk")?;
    // Other messages with the same status are not worth a write at once.
    for count in 0..100 {
        writer.set(is_well(&format!("{count}/100 reachable")));
    }
    let last = NodeCondition {
        status: ConditionStatus::True,
        reason: "AgentStopped",
        message: String::new(),
    };
    ensure!(writer.close(last.clone()).await, "not written");
    assert_eq!(writes(&server), 2);
    writer.set(is_well("too late"));
    let stopped = condition(&server, TYPE).context("no condition")?;
    assert_eq!(stopped["reason"], "AgentStopped");

    let next = ConditionWriter::open(Some(&folder.path().join("config")), NODE, TYPE)?;
    next.set(is_well("1/1 reachable"));
    let again = wait_condition(&server, "True", "AgentOk")?;
    assert_eq!(again["lastTransitionTime"], first["lastTransitionTime"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_is_reported_with_the_right_that_lacks_and_tried_again()
-> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let (server, writer) = opened(&folder)?;
    let error = || {
        let status = writer.controller().status(jiff::Timestamp::now());
        status.last_error.unwrap_or_default()
    };
    server.behave(Behaviour::Forbidden);
    writer.set(is_well("1/1 reachable"));
    wait_for("the refusal", PATIENCE, || {
        Ok(error().contains("(403)").then_some(()))
    })?;
    server.behave(Behaviour::Serve);
    wait_condition(&server, "True", "AgentOk")?;
    // A server that hangs does not keep an agent from stopping.
    server.behave(Behaviour::Hang);
    let closing = tokio::time::timeout(Duration::from_millis(100), writer.close(is_well("")));
    ensure!(closing.await.is_err(), "written by a server that hangs");
    Ok(())
}

#[test]
fn the_component_for_the_condition_adds_the_flag_and_the_right() -> anyhow::Result<()> {
    const COMPONENT: &str = include_str!("../../../deploy/kubernetes/condition/kustomization.yaml");
    let component: Value = serde_saphyr::from_str(COMPONENT)?;
    let patches = component["patches"].as_array().context("no patches")?;
    let added = |kind: &str| -> anyhow::Result<Value> {
        let mut patches = patches.iter();
        let patch = patches.find(|patch| patch["target"]["kind"] == kind);
        let patch = patch.and_then(|patch| patch["patch"].as_str());
        let changes: Vec<Value> = serde_saphyr::from_str(patch.context("no patch")?)?;
        Ok(changes[0]["value"].clone())
    };
    let rule = json!({ "apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"] });
    assert_eq!(added("ClusterRole")?, rule);
    assert_eq!(added("DaemonSet")?, "--node-condition");
    Ok(())
}
