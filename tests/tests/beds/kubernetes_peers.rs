//! Peers of policies that Kubernetes objects name: services, with and without pods, and the API servers.

use std::net::IpAddr;

use anyhow::ensure;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Kind, node};
use tests::bed::{add_host, registry, sysctl};
use tests::ping::is_answered;
use tests::{PATIENCE, wait_for};

use crate::kubernetes_labels::Stand;
use crate::kubernetes_policies::{FOLLOWING, Pods, cilium_policy};

/// A host behind the node. It is named like a node's namespace, so that the bed removes it too.
const FAR: &str = "hnode253";
/// Addresses of that host: one outside the cluster, and one that the registry gives to another node.
const OUTSIDE: &str = "192.0.2.9";
const OTHER_NODE: &str = "192.0.2.10";

/// The pods, a host behind their node, and the services that each cluster has.
struct Peers {
    pods: Pods,
}

impl Peers {
    fn start() -> anyhow::Result<Self> {
        // An agent that has found no such kind asks for it again only after 20 s.
        let pods = Pods::connect_to(Stand::start_after(ApiServer::define_cilium, FOLLOWING)?)?;
        let stand = &pods.stand;
        add_far(stand)?;
        tests::bed::add_address(FAR, &format!("{OTHER_NODE}/24"), "eth0")?;
        let other = format!("- name: far\n  cluster: default\n  addresses: [\"{OTHER_NODE}\"]\n");
        let nodes = registry(stand.bed.nodes()) + &other;
        stand.bed.write_nodes_file(&nodes)?;
        stand
            .server
            .put(service("default", "kubernetes", &Value::Null));
        let peers = Self { pods };
        peers.put_slice("default", "kubernetes", &["172.31.0.1"]);
        for address in [OUTSIDE, OTHER_NODE] {
            peers.wait(address, true, "an answer without a policy")?;
        }
        Ok(peers)
    }

    /// Puts the slice of a service that does not select pods.
    fn put_slice(&self, namespace: &str, service: &str, addresses: &[&str]) {
        let endpoints: Vec<_> = addresses
            .iter()
            .map(|address| json!({ "addresses": [address] }))
            .collect();
        self.pods.stand.server.put(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "namespace": namespace, "name": service,
                "labels": { "kubernetes.io/service-name": service },
            },
            "addressType": "IPv4", "endpoints": endpoints, "ports": [],
        }));
    }

    /// Puts a policy that allows the client only this egress.
    fn allow(&self, egress: &Value) {
        self.pods.stand.server.put(cilium_policy(egress));
    }

    /// Whether the client's pings reach an address.
    fn reaches(&self, address: &str) -> anyhow::Result<bool> {
        let address: IpAddr = address.parse()?;
        is_answered(self.pods.stand.namespaces[1].name(), address)
    }

    fn wait(&self, address: &str, is_expected: bool, what: &str) -> anyhow::Result<()> {
        wait_for(what, PATIENCE, || {
            Ok((self.reaches(address)? == is_expected).then_some(()))
        })
    }

    fn revision(&self) -> anyhow::Result<u64> {
        Ok(self.pods.listed()?.revision)
    }
}

/// Adds the host behind the node, which routes its packets.
fn add_far(stand: &Stand) -> anyhow::Result<()> {
    add_host(
        FAR,
        (stand.node().name(), "far0"),
        ["192.0.2.1/24", "2001:db8::1/64"],
        [&format!("{OUTSIDE}/24"), "2001:db8::9/64"],
    )?;
    sysctl(stand.node().name(), "net.ipv4.ip_forward=1")
}

fn service(namespace: &str, name: &str, selector: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": namespace, "name": name, "labels": { "team": name } },
        "spec": { "selector": selector, "ports": [{ "port": 80 }] },
    })
}

#[test]
#[ignore = "needs root"]
fn egress_to_a_service_reaches_the_pods_that_it_selects_now() -> anyhow::Result<()> {
    let peers = Peers::start()?;
    let server = &peers.pods.stand.server;
    peers.allow(&json!({ "toServices": [{ "k8sService": { "serviceName": "web" } }] }));
    peers
        .pods
        .wait_reached(false, "a service that does not exist to match nothing")?;
    // Another namespace has a service of that name.
    server.put(service("other", "web", &json!({ "app": "web" })));
    server.put(service("shop", "web", &json!({ "app": "web" })));
    peers
        .pods
        .wait_reached(true, "the service to match its pods")?;
    ensure!(!peers.reaches(OUTSIDE)?, "an answer of something else");

    let before = peers.revision()?;
    let mut relabelled = service("shop", "web", &json!({ "app": "web" }));
    relabelled["metadata"]["labels"] = json!({ "team": "b" });
    server.put(relabelled);
    server.put(service("shop", "marker", &json!({ "app": "none" })));
    server.put(service("shop", "web", &json!({ "app": "other" })));
    peers
        .pods
        .wait_reached(false, "the service to match other pods")?;
    assert_eq!(peers.revision()?, before + 1);

    peers.allow(&json!({
        "toServices": [{ "k8sServiceSelector": {
            "namespace": "other", "selector": { "matchLabels": { "team": "web" } },
        } }],
        "toPorts": [{ "ports": [{ "port": "80", "protocol": "TCP" }] }],
    }));
    server.put(service("shop", "web", &json!({ "app": "web" })));
    wait_for("the changed policy", PATIENCE, || {
        Ok((peers.revision()? > before + 1).then_some(()))
    })?;
    // Pods of another namespace are not meant, and pings have no port. The service may change before the policy.
    peers
        .pods
        .wait_reached(false, "pods of another namespace not to be meant")
}

#[test]
#[ignore = "needs root"]
fn egress_to_a_service_without_pods_reaches_its_addresses_also_after_a_restart()
-> anyhow::Result<()> {
    let mut peers = Peers::start()?;
    let server = &peers.pods.stand.server;
    server.put(service("shop", "db", &Value::Null));
    peers.put_slice("shop", "db", &["203.0.113.1"]);
    peers.allow(&json!({ "toServices": [{ "k8sService": { "serviceName": "db" } }] }));
    peers.wait(OUTSIDE, false, "the policy to be in force")?;
    peers.put_slice("shop", "db", &[OUTSIDE]);
    peers.wait(OUTSIDE, true, "the service to have its new address")?;
    ensure!(!peers.pods.is_reached()?, "an answer of a pod");

    // Nodes are not outside of the cluster.
    peers.put_slice("shop", "db", &[OUTSIDE, OTHER_NODE]);
    peers.put_slice("shop", "other", &["203.0.113.2"]);
    ensure!(!peers.reaches(OTHER_NODE)?, "an answer of another node");

    peers.pods.wait_saved(OUTSIDE)?;
    peers.pods.stand.server.stop();
    peers.pods.stand.node().kill_agent(Signal::SIGKILL)?;
    peers.pods.stand.start_agent(FOLLOWING)?;
    peers
        .pods
        .stand
        .wait_labels("client", &["k8s:app=client"])?;
    peers.wait(
        OUTSIDE,
        true,
        "the address that was known before the restart",
    )?;
    ensure!(
        !peers.pods.is_reached()?,
        "an answer of a pod after the restart"
    );

    peers.pods.stand.server.resume()?;
    peers.pods.stand.server.delete_of(Kind::Service, "shop/db");
    peers.wait(OUTSIDE, false, "the deleted service to match nothing")?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_api_servers_are_reached_outside_the_cluster_and_on_another_node() -> anyhow::Result<()> {
    let peers = Peers::start()?;
    peers.allow(&json!({ "toEntities": ["kube-apiserver"] }));
    for address in [OUTSIDE, OTHER_NODE] {
        peers.wait(address, false, "the policy to be in force")?;
    }
    peers.put_slice("default", "kubernetes", &[OUTSIDE]);
    peers.wait(OUTSIDE, true, "the API server outside the cluster")?;
    ensure!(!peers.reaches(OTHER_NODE)?, "an answer of another node");

    peers.put_slice("default", "kubernetes", &[OTHER_NODE]);
    peers.wait(OTHER_NODE, true, "the API server on another node")?;
    peers.wait(OUTSIDE, false, "the former API server to be like any host")?;
    // It is still another node.
    peers.allow(&json!({ "toEntities": ["host"] }));
    peers.wait(OTHER_NODE, false, "the policy for the host to be in force")?;
    peers.allow(&json!({ "toEntities": ["remote-node"] }));
    peers.wait(
        OTHER_NODE,
        true,
        "the policy for other nodes to be in force",
    )?;

    // This host is an API server, too.
    let own = peers.pods.stand.node().ipv4().to_string();
    peers.allow(&json!({ "toEntities": ["kube-apiserver"] }));
    peers.wait(&own, false, "the host to be no API server")?;
    peers.put_slice("default", "kubernetes", &[&own]);
    peers.wait(&own, true, "the host to be an API server")?;
    peers.wait(OTHER_NODE, false, "the other node to be none any more")?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_import_may_name_services_only_where_there_is_a_cluster() -> anyhow::Result<()> {
    let peers = Peers::start()?;
    let stand = &peers.pods.stand;
    stand
        .server
        .put(service("shop", "web", &json!({ "app": "web" })));
    let egress = json!({ "toServices": [{ "k8sService": { "serviceName": "web" } }] });
    let policy = cilium_policy(&egress);
    stand.import(&policy)?;
    peers.wait(OUTSIDE, false, "the policy to be in force")?;
    peers
        .pods
        .wait_reached(true, "the service to match its pods")?;

    stand.node().cli("policy delete --all")?.success()?;
    stand.node().kill_agent(Signal::SIGTERM)?;
    stand.start_agent("")?;
    stand.wait_labels("client", &["k8s:app=client"])?;
    let refused = stand.try_import(&policy)?;
    assert_ne!(refused.code, Some(0));
    let reason = "spec.egress[0].toServices: matching by service needs a Kubernetes cluster";
    assert!(refused.stderr.contains(reason), "{}", refused.stderr);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn ingress_from_nodes_takes_packets_of_nodes_with_these_labels() -> anyhow::Result<()> {
    let far = |zone: &str| {
        let mut far = node("far", &[OUTSIDE], &[]);
        far["metadata"]["labels"] = json!({ "zone": zone });
        far
    };
    let prepare = |server: &ApiServer| {
        server.define_cilium();
        server.put(far("a"));
    };
    let pods = Pods::connect_to(Stand::start_in_cluster(prepare, "")?)?;
    let server = &pods.stand.server;
    add_far(&pods.stand)?;
    let wait = |is_expected: bool, what: &str| {
        wait_for(what, PATIENCE, || {
            let is_answered = is_answered(FAR, pods.web)?;
            Ok((is_answered == is_expected).then_some(()))
        })
    };
    wait(true, "an answer without a policy")?;
    let from = |zone: &str| {
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": { "name": "web", "namespace": "shop", "uid": "p-9" },
            "spec": {
                "endpointSelector": { "matchLabels": { "app": "web" } },
                "ingress": [{ "fromNodes": [{ "matchLabels": { "node:zone": zone } }] }],
            },
        })
    };
    server.put(from("b"));
    wait(false, "nodes of another zone to be refused")?;
    server.put(from("a"));
    wait(true, "nodes of the zone to be admitted")?;
    ensure!(!pods.is_reached()?, "an answer to a pod");
    server.put(far("b"));
    wait(false, "the node that has moved to be refused")?;
    server.put(far("a"));
    wait(true, "the node that has come back to be admitted")?;
    server.delete("far");
    wait(false, "a host outside the cluster to be refused")?;
    Ok(())
}
