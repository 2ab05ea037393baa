//! The policies of a Kubernetes cluster: in force on its endpoints, kept through outages, refused by name.

use std::fs;
use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use health_model::api::{PolicyDocument, PolicyList};
use health_model::policy::PolicyOrigin;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::apiserver::{Behaviour, Kind};
use tests::liveness::page;
use tests::ping::is_answered;
use tests::plugin::{NOT_AVAILABLE, TRY_AGAIN_LATER};
use tests::{Node, PATIENCE, wait_for};

use crate::agent_status::controller;
use crate::kubernetes_labels::Stand;

/// Two connected pods of the namespace `shop`, on an agent that follows the policies of the API server.
pub(crate) struct Pods {
    pub(crate) stand: Stand,
    pub(crate) web: IpAddr,
}

fn wait_saved(node: &Node, text: &str) -> anyhow::Result<()> {
    let folder = node.runtime_dir().join("state");
    wait_for("the saved policies", PATIENCE, || {
        let saved = fs::read_to_string(folder.join("policies-kubernetes.json"));
        Ok(saved.is_ok_and(|saved| saved.contains(text)).then_some(()))
    })
}

impl Pods {
    fn connect() -> anyhow::Result<Self> {
        Self::connect_to(Stand::start_with(FOLLOWING)?)
    }

    pub(crate) fn connect_to(mut stand: Stand) -> anyhow::Result<Self> {
        let mut web = None;
        for app in ["web", "client"] {
            let uid = format!("u-{app}");
            stand.put_pod(app, &uid, &json!({ "app": app }));
            stand.connect(app, &uid)?;
            let label = format!("k8s:app={app}");
            let endpoint = stand.wait_labels(app, &[&label])?;
            web = web.or(endpoint.ipv4);
        }
        let web = web.context("no IPv4 address")?;
        Ok(Self { stand, web })
    }

    /// Whether the client's pings reach the web pod.
    pub(crate) fn is_reached(&self) -> anyhow::Result<bool> {
        let client = self.stand.namespaces[1].name();
        is_answered(client, self.web)
    }

    pub(crate) fn wait_reached(&self, is_expected: bool, what: &str) -> anyhow::Result<()> {
        wait_for(what, PATIENCE, || {
            Ok((self.is_reached()? == is_expected).then_some(()))
        })
    }

    pub(crate) fn listed(&self) -> anyhow::Result<PolicyList> {
        Ok(serde_json::from_value(
            self.stand.node().listing("policy get")?,
        )?)
    }

    /// Waits until the agent has saved policies with this text.
    pub(crate) fn wait_saved(&self, text: &str) -> anyhow::Result<()> {
        wait_saved(self.stand.node(), text)
    }

    /// Waits for exactly these policies, by name.
    fn wait_policies(&self, names: &[&str]) -> anyhow::Result<Vec<PolicyDocument>> {
        let mut last = None;
        let found = wait_for("the policies of the cluster", PATIENCE, || {
            let policies = self.listed()?.policies;
            let is_so = policies
                .iter()
                .map(|one| one.name.as_str())
                .eq(names.iter().copied());
            last = Some(policies.clone());
            Ok(is_so.then_some(policies))
        });
        found.with_context(|| format!("{last:#?}"))
    }
}

/// Makes the agent follow the policies of the API server of its pods.
pub(crate) const FOLLOWING: &str = "--policies-from-kubernetes={kubeconfig}";

/// A policy for the web pod's ingress, which allows pods with this label `app`.
fn network_policy(allowed: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": "web", "namespace": "shop", "uid": "p-1" },
        "spec": {
            "podSelector": { "matchLabels": { "app": "web" } },
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "app": allowed } } }] }],
        },
    })
}

/// A policy of Cilium for the client's egress.
pub(crate) fn cilium_policy(egress: &Value) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": { "name": "client", "namespace": "shop", "uid": "p-2" },
        "spec": {
            "endpointSelector": { "matchLabels": { "app": "client" } },
            "egress": [egress],
        },
    })
}

#[test]
#[ignore = "needs root"]
fn policies_of_the_cluster_are_in_force_and_named_with_their_origin() -> anyhow::Result<()> {
    let pods = Pods::connect()?;
    let server = &pods.stand.server;
    ensure!(pods.is_reached()?, "no answer without a policy");
    server.put(network_policy("other"));
    pods.wait_reached(false, "the policy to be in force")?;
    let listed = pods.wait_policies(&["NetworkPolicy shop/web"])?;
    assert_eq!(listed[0].origin, PolicyOrigin::Kubernetes);
    assert!(listed[0].since.is_some(), "{listed:?}");

    // Policies of both origins are in force; an imported one is deleted here, the other only in the cluster.
    pods.stand.import(&network_policy("client"))?;
    ensure!(pods.is_reached()?, "no answer although it is allowed");
    let both = pods.wait_policies(&["NetworkPolicy shop/web", "NetworkPolicy shop/web"])?;
    assert_eq!(
        [both[0].origin, both[1].origin],
        [PolicyOrigin::Imported, PolicyOrigin::Kubernetes]
    );
    pods.stand.node().cli("policy delete shop/web")?.success()?;
    ensure!(!pods.is_reached()?, "an answer although it is not allowed");
    let refused = pods.stand.node().cli("policy delete shop/web")?;
    assert_ne!(refused.code, Some(0));
    assert!(
        refused
            .stderr
            .contains("comes from the Kubernetes cluster; delete it there"),
        "{}",
        refused.stderr
    );
    pods.stand.node().cli("policy delete --all")?.success()?;
    pods.wait_policies(&["NetworkPolicy shop/web"])?;

    server.put(network_policy("client"));
    pods.wait_reached(true, "the changed policy to be in force")?;
    server.put(network_policy("other"));
    pods.wait_reached(false, "the policy to be in force again")?;
    server.delete_of(Kind::NetworkPolicy, "shop/web");
    pods.wait_reached(true, "the policy to be gone")?;
    pods.wait_policies(&[])?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_outage_changes_no_policy_of_the_cluster_even_if_the_agent_restarts() -> anyhow::Result<()> {
    let mut pods = Pods::connect()?;
    pods.stand.server.put(network_policy("other"));
    pods.wait_reached(false, "the policy to be in force")?;
    pods.wait_saved("\"web\"")?;
    pods.stand.server.stop();
    // Meanwhile the policy is deleted, which the agent cannot know.
    pods.stand.server.delete_of(Kind::NetworkPolicy, "shop/web");
    pods.stand.node().kill_agent(Signal::SIGKILL)?;
    ensure!(!pods.is_reached()?, "an answer without an agent");
    pods.stand.start_agent(FOLLOWING)?;
    pods.stand.wait_labels("client", &["k8s:app=client"])?;
    ensure!(!pods.is_reached()?, "an answer after the restart");
    let kept = pods.wait_policies(&["NetworkPolicy shop/web"])?;
    assert_eq!(kept[0].origin, PolicyOrigin::Kubernetes);
    wait_for("the outage in the report", PATIENCE, || {
        let status = pods.stand.node().cli("status --verbose")?;
        let is_named = status.stdout.contains("using the policies as of ");
        Ok(is_named.then_some(()))
    })?;

    pods.stand.server.resume()?;
    pods.wait_reached(true, "the deleted policy to be gone")?;
    pods.wait_policies(&[])?;

    // An agent that does not follow the cluster forgets its policies.
    pods.stand.server.put(network_policy("other"));
    pods.wait_reached(false, "the policy to be in force")?;
    pods.stand.node().kill_agent(Signal::SIGTERM)?;
    pods.stand.start_agent("")?;
    pods.wait_reached(true, "the policy to be forgotten")?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_enforced_is_refused_whole_in_an_event_and_in_the_listing() -> anyhow::Result<()> {
    let pods = Pods::connect()?;
    let server = &pods.stand.server;
    // The definitions of Cilium's kinds come later than the agent.
    server.define_cilium();
    let nobody = json!({ "toEndpoints": [{ "matchLabels": { "app": "nobody" } }] });
    server.put(cilium_policy(&nobody));
    pods.wait_reached(false, "the policy of Cilium to be in force")?;

    let mut refused = cilium_policy(&nobody);
    refused["metadata"]["name"] = "names".into();
    refused["metadata"]["uid"] = "p-3".into();
    refused["spec"]["egress"] = json!([
        { "toEndpoints": [{}] },
        { "toFQDNs": [{ "matchName": "example.com" }] },
    ]);
    server.put(refused.clone());
    let reason = "spec.egress[1].toFQDNs: matching by DNS name is not supported";
    let listed = wait_for("the refusal in the listing", PATIENCE, || {
        Ok(pods.listed()?.refused.pop())
    })?;
    assert_eq!(
        (listed.name.as_str(), listed.reason.as_str()),
        ("CiliumNetworkPolicy shop/names", reason)
    );
    wait_for("the number of refused policies", PATIENCE, || {
        let status = pods.stand.node().cli("status --verbose")?;
        let number = "1 policy of the Kubernetes cluster is refused";
        Ok(status.stdout.contains(number).then_some(()))
    })?;
    // The agent does its work; the object is at fault.
    let following = controller(pods.stand.node(), "kubernetes-policies")?;
    assert_eq!(following.consecutive_failures, 0, "{following:?}");
    let event = wait_for("the event", PATIENCE, || Ok(server.events().pop()))?;
    assert_eq!(event["involvedObject"]["uid"], "p-3");
    assert_eq!(event["metadata"]["namespace"], "shop");
    assert_eq!(
        (&event["reason"], &event["message"]),
        (&json!("PolicyRefused"), &json!(reason))
    );
    // Its first rule would allow it.
    ensure!(!pods.is_reached()?, "an object is in force in part");

    // An object keeps the form that was in force.
    let mut unsupported = cilium_policy(&nobody);
    unsupported["spec"]["nodeSelector"] = json!({});
    server.put(unsupported);
    wait_for("the second refusal", PATIENCE, || {
        Ok((pods.listed()?.refused.len() == 2).then_some(()))
    })?;
    ensure!(!pods.is_reached()?, "the previous form is not in force");
    let table = pods.stand.node().cli("policy get")?.success()?;
    let stays = "CiliumNetworkPolicy shop/client: spec.nodeSelector";
    let line = table.lines().find(|line| line.contains(stays));
    assert!(
        line.is_some_and(|line| line.ends_with("; the previous form stays in force")),
        "{}",
        table
    );
    refused["spec"]["egress"] = json!([{ "toEndpoints": [{}] }]);
    server.put(refused);
    pods.wait_reached(true, "the mended policy to be in force")?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_cleanup_forgets_the_policies_of_the_cluster() -> anyhow::Result<()> {
    let stand = Stand::start_with(FOLLOWING)?;
    stand.server.put(network_policy("web"));
    wait_saved(stand.node(), "\"web\"")?;
    stand.node().kill_agent(Signal::SIGTERM)?;
    stand.node().cli("cleanup")?.success()?;
    let state = stand.node().runtime_dir().join("state");
    ensure!(!state.exists(), "{:?} is left", fs::read_dir(&state)?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn no_pod_is_connected_before_the_policies_of_the_cluster_are_known() -> anyhow::Result<()> {
    let mut stand = Stand::start()?;
    stand.node().kill_agent(Signal::SIGTERM)?;
    stand.server.behave(Behaviour::BadGateway);
    stand.start_agent(FOLLOWING)?;
    let message = wait_for("the reason of the refusal", PATIENCE, || {
        let refused = stand.try_connect("web", "u-1")?;
        assert_eq!(refused.code(), TRY_AGAIN_LATER, "{}", refused.json);
        // The agent starts first.
        let is_it = refused
            .message()
            .contains("policies of the Kubernetes cluster");
        Ok(is_it.then(|| refused.message().to_owned()))
    })?;
    let expected = "the policies of the Kubernetes cluster are not known yet: ";
    assert!(
        message.contains(expected) && message.contains("502"),
        "{message}"
    );
    let status = stand.plugin.call_with(&[("CNI_COMMAND", "STATUS")])?;
    assert_eq!(status.code(), NOT_AVAILABLE, "{}", status.json);
    assert!(status.message().contains(expected), "{}", status.json);
    let (code, reason) = page(stand.node(), "/readyz")?;
    assert!(code == 503 && reason.contains(expected), "{reason}");
    assert_eq!(page(stand.node(), "/livez")?.0, 200);
    stand.server.behave(Behaviour::Serve);
    stand.connect("web", "u-1")?;
    Ok(())
}
