//! Hosts of the cluster: policies tell them apart by the labels of their nodes.

use std::collections::BTreeMap;

use health_common::identity::LOCAL_NODE;
use health_policy::{ClusterServices, Kind, read_policy};
use health_registry::identity::LocalNumbers;
use health_registry::nodes::Node;
use serde_json::json;

use super::*;
use crate::enforcement::local::Distinctions;

/// A node of this zone. The address of node `n` is 192.0.2.`n`.
fn node(n: u8, zone: &str) -> Node {
    let labels = [("zone", zone), ("team", "x")];
    Node {
        name: format!("n{n}"),
        cluster: "default".to_owned(),
        addresses: vec![IpAddr::from([192, 0, 2, n])],
        secondary_addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        health_addresses: Vec::new(),
        labels: labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    }
}

fn set(zones: &[&str]) -> Arc<NodeSet> {
    let nodes = (1..).zip(zones).map(|(n, zone)| node(n, zone));
    Arc::new(NodeSet {
        nodes: nodes.collect(),
        sources: Vec::new(),
    })
}

/// A policy that allows endpoints only the egress to nodes of this zone.
fn to_zone(zone: &str) -> ClusterPolicies {
    let object = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": { "name": "zone" },
        "spec": {
            "endpointSelector": { "matchLabels": { "app": "a" } },
            "egress": [{ "toNodes": [{ "matchLabels": { "zone": zone } }] }],
        },
    });
    let policy = Arc::new(read_policy(&object).unwrap());
    ClusterPolicies {
        objects: [(policy.name().clone(), Ok(policy))].into(),
        complete: Kind::ALL.into(),
        ..ClusterPolicies::default()
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_with_the_same_named_labels_share_an_identity_while_policies_name_them() {
    let site = Site {
        follows_cluster: true,
        ..Site::new()
    };
    site.nodes.send_replace(set(&["a", "a", "b", "a"]));
    let agent = site.start().await;
    let id = agent.create(1, "app=a").await;
    let others = || [2, 3, 4].map(|n| agent.enforcer.identity_of([192, 0, 2, n].into()));
    let reaches = |identity: Identity| {
        let table = site.kernel.table_of(id).unwrap();
        table.keys().any(|key| key.identity == identity.0)
    };
    assert_eq!(others(), [Identity::REMOTE_NODE; 3]);

    agent.enforcer.set_cluster_policies(&to_zone("a")).unwrap();
    tokio::time::sleep(LONG).await;
    let [two, three, four] = others();
    assert!(two.is_local() && three.is_local());
    assert_eq!(two, four);
    assert_ne!(two, three);
    assert!(reaches(two) && !reaches(three) && !reaches(Identity::REMOTE_NODE));
    // This host is in the zone, too.
    assert!(reaches(Identity::HOST));

    // Labels that no policy names change nothing.
    let mut relabelled = NodeSet::clone(&set(&["a", "a", "b", "a"]));
    relabelled.nodes[1]
        .labels
        .insert("team".to_owned(), "y".to_owned());
    site.nodes.send_replace(Arc::new(relabelled));
    tokio::time::sleep(LONG).await;
    assert_eq!(others(), [two, three, four]);

    site.nodes.send_replace(set(&["b", "b", "b", "a"]));
    tokio::time::sleep(LONG).await;
    assert_eq!(others(), [three, three, four]);
    assert!(reaches(four) && !reaches(Identity::HOST));

    // An API server has another identity than the other nodes of its zone.
    let mut given = to_zone("a");
    let server = (
        "default/kubernetes".to_owned(),
        ["192.0.2.4".parse().unwrap()].into(),
    );
    given.services.addresses = Some(Arc::new([server].into()));
    agent.enforcer.set_cluster_policies(&given).unwrap();
    tokio::time::sleep(LONG).await;
    let [two, three, server] = others();
    assert_eq!(two, three);
    assert!(server.is_local() && server != four && reaches(server));
    let labels = agent.enforcer.identities().labels[&server].clone();
    for name in ["remote-node", "kube-apiserver"] {
        assert!(labels.has_reserved(name), "{labels:?}");
    }

    let mut none = to_zone("a");
    none.objects.clear();
    agent.enforcer.set_cluster_policies(&none).unwrap();
    tokio::time::sleep(LONG).await;
    let [two, three, server] = others();
    assert_eq!([two, three], [Identity::REMOTE_NODE; 2]);
    assert_eq!(server, Identity::KUBE_APISERVER);
    let local = agent.enforcer.identities().labels.clone();
    let local = local.keys().filter(|identity| identity.is_local());
    // Only the prefix of the API server is left.
    assert_eq!(local.count(), 1);
    assert_eq!(site.kernel.now().mistakes, [""; 0]);
}

#[test]
fn while_endpoints_lag_behind_nodes_get_no_identity_that_their_tables_may_not_know() {
    let mut repository = Repository::default();
    let rules = json!([{
        "labels": ["nodes"], "endpointSelector": {},
        "egress": [{ "toNodes": [{ "matchLabels": { "zone": "a" } }] }],
    }]);
    repository.import(&rules.to_string()).unwrap();
    let servers = BTreeMap::from([(
        "default/kubernetes".to_owned(),
        ["192.0.2.5".parse().unwrap()].into(),
    )]);
    repository.set_services(&ClusterServices {
        services: None,
        addresses: Some(Arc::new(servers)),
    });
    let distinctions =
        |zones: &[&str]| Distinctions::of(&repository, &surroundings(), &set(zones).nodes);
    let former = distinctions(&["a", "a", "b"]);
    let now = distinctions(&["a", "c", "b", "d", "d"]);
    assert_eq!(former.needs.nodes.len(), 2);
    // The fifth node is an API server.
    assert_eq!(now.needs.nodes.len(), 4);
    let wanted = former.needs.nodes.union(&now.needs.nodes).cloned();
    let numbers = LocalNumbers {
        nodes: wanted.zip((LOCAL_NODE | 1..).map(Identity)).collect(),
        ..LocalNumbers::default()
    };
    let nodes = |of: &Distinctions, in_use| -> Vec<Identity> {
        let addresses = of.addresses(&numbers, in_use);
        addresses.nodes.into_values().collect()
    };
    let before = nodes(&former, None);
    assert!(before.iter().all(|identity| identity.is_local()));
    let in_use = (2..).map(|n| IpNet::from(IpAddr::from([192, 0, 2, n])));
    let in_use: BTreeMap<IpNet, Identity> = in_use.zip(before.clone()).collect();
    assert_eq!(
        nodes(&now, Some(&in_use)),
        [
            before[0],
            before[1],
            Identity::REMOTE_NODE,
            Identity::KUBE_APISERVER
        ]
    );
    let after = nodes(&now, None);
    assert_eq!(after[1], before[1]);
    let all: BTreeSet<Identity> = after.into_iter().collect();
    assert!(all.len() == 4 && all.iter().all(|identity| identity.is_local()));
}

#[tokio::test(start_paused = true)]
async fn an_import_that_names_nodes_is_refused_without_a_cluster() {
    let site = Site::new();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let text = json!([{
        "labels": ["nodes"], "endpointSelector": {},
        "ingress": [{ "fromNodes": [{ "matchLabels": { "zone": "a" } }] }],
    }]);
    let error = enforcer.import(&text.to_string()).unwrap_err().to_string();
    let expected = "[0].ingress[0].fromNodes: matching by node labels needs a Kubernetes cluster";
    assert!(error.contains(expected), "{error}");
}
