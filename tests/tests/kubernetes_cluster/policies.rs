//! NetworkPolicy, as the usual recipes use it.

use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tests::kubernetes::Cluster;
use tests::{PATIENCE, wait_for};

use super::NODES;
use super::client::{PORTS, Pod, namespace, pod};

const SHOP: &str = "shop";
const OTHER: &str = "other";

/// Who reaches the pod `web`: `friend` of its namespace at both ports, and `stranger` of another one at the first port.
type Reached = (bool, bool, bool);

const ALL: Reached = (true, true, true);

#[test]
fn recipes_of_network_policies_are_enforced_and_kubelets_probes_pass() -> anyhow::Result<()> {
    let cluster = Cluster::start(&NODES)?;
    cluster.plane.apply(&[
        namespace(SHOP, &json!({ "team": "shop" })),
        namespace(OTHER, &json!({ "team": "other" })),
    ])?;
    cluster.plane.apply(&[
        pod(SHOP, "web", NODES[0], &json!({ "app": "web" })),
        pod(SHOP, "friend", NODES[1], &json!({ "app": "friend" })),
        pod(OTHER, "stranger", NODES[1], &json!({ "app": "stranger" })),
    ])?;
    let stand = Stand::new(&cluster)?;
    stand.expect("no policy", ALL)?;

    let web = json!({ "matchLabels": { "app": "web" } });
    let stranger = stand.stranger.ipv4()?;
    for (name, spec, reached) in [
        (
            "deny-all",
            json!({ "podSelector": {}, "policyTypes": ["Ingress"] }),
            (false, false, false),
        ),
        (
            "by-label",
            json!({ "podSelector": web, "ingress": [
                { "from": [{ "podSelector": { "matchLabels": { "app": "friend" } } }] },
            ] }),
            (true, true, false),
        ),
        (
            "by-namespace",
            json!({ "podSelector": web, "ingress": [
                { "from": [{ "namespaceSelector": { "matchLabels": { "team": "other" } } }] },
            ] }),
            (false, false, true),
        ),
        (
            "by-port",
            json!({ "podSelector": web, "ingress": [{ "ports": [{ "port": PORTS[1] }] }] }),
            (false, true, false),
        ),
        (
            "by-port-name",
            json!({ "podSelector": web, "ingress": [{ "ports": [{ "port": "http" }] }] }),
            (true, false, true),
        ),
        (
            "egress",
            json!({
                "podSelector": { "matchLabels": { "app": "friend" } },
                "policyTypes": ["Egress"],
                "egress": [{ "to": [{ "podSelector": web }], "ports": [{ "port": PORTS[0] }] }],
            }),
            (true, false, true),
        ),
        (
            "block-with-exception",
            json!({ "podSelector": web, "ingress": [{ "from": [{ "ipBlock": {
                "cidr": "10.244.0.0/16", "except": [format!("{stranger}/32")],
            } }] }] }),
            // Blocks select no pods: only what is outside the cluster.
            (false, false, false),
        ),
    ] {
        let policy = policy(SHOP, name, &spec);
        cluster.plane.apply(std::slice::from_ref(&policy))?;
        stand.expect(name, reached)?;
        if name == "deny-all" {
            // The kubelet probes a pod that comes while nothing is allowed.
            cluster
                .plane
                .apply(&[pod(SHOP, "late", NODES[1], &json!({ "app": "late" }))])?;
            Pod::ready(&cluster, SHOP, "late")?;
        }
        let delete = format!("delete networkpolicy -n {SHOP} {name}");
        cluster.plane.kubectl(&delete)?;
        stand.expect("no policy again", ALL)?;
    }
    Ok(())
}

fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": name, "namespace": namespace }, "spec": spec,
    })
}

struct Stand {
    web: Pod,
    friend: Pod,
    stranger: Pod,
}

impl Stand {
    fn new(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self {
            web: Pod::ready(cluster, SHOP, "web")?,
            friend: Pod::ready(cluster, SHOP, "friend")?,
            stranger: Pod::ready(cluster, OTHER, "stranger")?,
        })
    }

    /// Waits until exactly these reach the web server, at each of its addresses.
    fn expect(&self, name: &str, reached: Reached) -> anyhow::Result<()> {
        wait_for("the policy to be in force", PATIENCE, || {
            for address in &self.web.addresses {
                let target = |port| SocketAddr::from((*address, port));
                let now = (
                    self.friend.reaches(target(PORTS[0]))?,
                    self.friend.reaches(target(PORTS[1]))?,
                    self.stranger.reaches(target(PORTS[0]))?,
                );
                ensure!(
                    now == reached,
                    "{address} is reached by {now:?}, not {reached:?}"
                );
            }
            Ok(Some(()))
        })
        .with_context(|| name.to_owned())
    }
}
