//! The registry of a Kubernetes cluster, against an API server that works, fails or lies on demand.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use health_registry::nodes::kubernetes::{
    EXCLUDE_LABEL, IPV4_HEALTH_ANNOTATION, IPV6_HEALTH_ANNOTATION, KubernetesRegistry,
};
use health_registry::nodes::{Node, NodeSet, Registry, Standing};
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Behaviour, node};
use tests::{PATIENCE, wait_for};
use tokio::sync::watch::Receiver;

struct Bed {
    server: ApiServer,
    registry: KubernetesRegistry,
    watch: Receiver<Arc<NodeSet>>,
    _folder: tempfile::TempDir,
}

impl Bed {
    /// A registry of the cluster `west` that has not annotated anything yet. Its own node is `n1`.
    fn start(nodes: &[Value]) -> anyhow::Result<Self> {
        let server = ApiServer::start()?;
        for node in nodes {
            server.put(node.clone());
        }
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("config");
        server.write_kubeconfig(&kubeconfig)?;
        let registry = open(&kubeconfig)?;
        Ok(Self {
            watch: registry.watch(),
            registry,
            server,
            _folder: folder,
        })
    }

    async fn until(
        &mut self,
        what: &str,
        is_reached: impl Fn(&NodeSet) -> bool,
    ) -> anyhow::Result<Arc<NodeSet>> {
        until(&mut self.watch, what, is_reached).await
    }

    /// Waits until exactly these nodes are known and the set is confirmed to be current.
    async fn until_nodes(&mut self, names: &[&str]) -> anyhow::Result<Arc<NodeSet>> {
        let what = format!("exactly the nodes {names:?}");
        self.until(&what, |set| {
            self::names(set) == names && reason(set).is_none()
        })
        .await
    }

    fn lists(&self) -> usize {
        let requests = self.server.requests();
        // A list of one object only asks for the revision.
        let is_list = |request: &&String| {
            let is_other = request.contains("watch=true") || request.ends_with("limit=1");
            request.starts_with("GET ") && !is_other
        };
        requests.iter().filter(is_list).count()
    }

    fn annotation(&self, key: &str) -> Option<String> {
        let node = self.server.get("n1")?;
        Some(node["metadata"]["annotations"][key].as_str()?.to_owned())
    }

    fn wait_for_annotations(&self, v4: Option<&str>, v6: Option<&str>) -> anyhow::Result<()> {
        wait_for(
            &format!("the annotations {v4:?} and {v6:?}"),
            PATIENCE,
            || {
                let is_reached = self.annotation(IPV4_HEALTH_ANNOTATION).as_deref() == v4
                    && self.annotation(IPV6_HEALTH_ANNOTATION).as_deref() == v6;
                Ok(is_reached.then_some(()))
            },
        )
    }
}

fn open(kubeconfig: &Path) -> anyhow::Result<KubernetesRegistry> {
    Ok(KubernetesRegistry::open(
        Some(kubeconfig),
        "west",
        Some("n1"),
    )?)
}

async fn until(
    watch: &mut Receiver<Arc<NodeSet>>,
    what: &str,
    is_reached: impl Fn(&NodeSet) -> bool,
) -> anyhow::Result<Arc<NodeSet>> {
    let reached = tokio::time::timeout(PATIENCE, watch.wait_for(|set| is_reached(set))).await;
    let reached = reached.map(|set| set.map(|set| set.clone()));
    match reached {
        Ok(set) => set.context("the registry ended"),
        Err(_) => anyhow::bail!("waited in vain for {what}; it is {:#?}", watch.borrow()),
    }
}

fn names(set: &NodeSet) -> Vec<&str> {
    set.nodes.iter().map(|node| node.name.as_str()).collect()
}

fn reason(set: &NodeSet) -> Option<&str> {
    Some(set.sources[0].stale.as_ref()?.reason.as_str())
}

fn three_nodes() -> Vec<Value> {
    vec![
        node(
            "n1",
            &["172.30.0.1", "fd00:30::1"],
            &["10.244.1.0/24", "fd00:10:244:1::/64"],
        ),
        node("n2", &["172.30.0.2"], &["10.244.2.0/24"]),
        node("n3", &["172.30.0.3"], &["10.244.3.0/24"]),
    ]
}

fn own(health_addresses: &[&str]) -> Node {
    Node {
        name: "n1".to_owned(),
        cluster: "west".to_owned(),
        addresses: Vec::new(),
        secondary_addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        health_addresses: health_addresses
            .iter()
            .map(|address| address.parse().expect("an address"))
            .collect(),
        labels: BTreeMap::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_read_page_by_page_and_changes_are_followed() -> anyhow::Result<()> {
    let nodes: Vec<_> = (0..450)
        .map(|i| {
            node(
                &format!("n{i:03}"),
                &[&format!("172.30.{}.{}", i / 250, i % 250 + 1)],
                &[],
            )
        })
        .collect();
    let mut bed = Bed::start(&nodes)?;
    let set = bed
        .until("450 nodes", |set| {
            set.nodes.len() == 450 && reason(set).is_none()
        })
        .await?;
    assert_eq!(set.nodes[7].full_name(), "west/n007");
    assert_eq!(bed.lists(), 3, "{:?}", bed.server.requests());

    bed.server.put(node(
        "n007",
        &["172.31.0.7", "fd00:30::7"],
        &["10.244.7.0/24"],
    ));
    bed.server.delete("n008");
    bed.server.put(node("n450", &["172.31.0.8"], &[]));
    let set = bed
        .until("the changes", |set| {
            set.nodes[7].addresses.len() == 2 && names(set).contains(&"n450")
        })
        .await?;
    assert_eq!(set.nodes.len(), 450);
    assert_eq!(set.nodes[7].pod_cidrs, ["10.244.7.0/24".parse()?]);
    assert_eq!(bed.lists(), 3);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_cannot_be_used_are_named_and_the_others_stand() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    let mut outside = node("outside", &["172.30.0.9"], &["10.244.9.0/24"]);
    outside["metadata"]["annotations"] = json!({ IPV4_HEALTH_ANNOTATION: "10.244.8.1" });
    let mut huge = node("huge", &["172.30.0.10"], &["10.244.10.0/24"]);
    huge["metadata"]["annotations"] = json!({ IPV4_HEALTH_ANNOTATION: "x".repeat(1 << 20) });
    for bad in [
        node("without", &[], &["10.244.8.0/24"]),
        node("named", &["node.example"], &[]),
        node("second", &["172.30.0.2"], &[]),
        node("overlaps", &["172.30.0.8"], &["10.244.0.0/16"]),
        node("sla/sh", &["172.30.0.11"], &[]),
        outside,
        huge,
        node("n4", &["172.30.0.4"], &["10.244.4.0/24"]),
    ] {
        bed.server.put(bad);
    }
    let set = bed
        .until("seven to be left out, and the eighth", |set| {
            set.sources[0].rejected.len() == 7 && names(set).contains(&"n4")
        })
        .await?;
    assert_eq!(names(&set), ["n1", "n2", "n3", "n4"]);
    for (key, part) in [
        ("huge", "is not an IP address"),
        ("named", "\"node.example\" is not an IP address"),
        (
            "outside",
            "10.244.8.1 is in none of the pod CIDRs of west/outside",
        ),
        ("overlaps", "overlaps 10.244."),
        (
            "second",
            "address 172.30.0.2 is listed twice, first at Node n2",
        ),
        ("sla/sh", "slash"),
        ("without", "west/without has no address"),
    ] {
        let rejected = set.sources[0]
            .rejected
            .iter()
            .find(|rejected| rejected.key == key);
        let reason = &rejected
            .with_context(|| format!("{key} is not left out"))?
            .reason;
        assert!(
            reason.contains(part) && reason.len() < 300,
            "{key}: {reason}"
        );
    }

    bed.server.put(node("second", &["172.30.0.12"], &[]));
    bed.until("the corrected node", |set| names(set).contains(&"second"))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_take_nodes_out_of_the_mesh() -> anyhow::Result<()> {
    let mut virtual_node = node("v1", &["172.30.0.7"], &[]);
    virtual_node["metadata"]["labels"] = json!({ "type": "virtual-kubelet" });
    let mut nodes = three_nodes();
    nodes.push(virtual_node);
    let mut bed = Bed::start(&nodes)?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    let plain = nodes[1].clone();
    let mut labelled = plain.clone();
    labelled["metadata"]["labels"] = json!({ EXCLUDE_LABEL: "" });
    bed.server.put(labelled);
    bed.until_nodes(&["n1", "n3"]).await?;
    bed.server.put(plain);
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn how_this_node_stands_follows_its_own_object() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes()[1..])?;
    let mut standing = bed.registry.standing();
    bed.until_nodes(&["n2", "n3"]).await?;
    assert_eq!(
        *standing.borrow(),
        Standing::Unknown,
        "nobody knows it yet, as while it joins"
    );
    let plain = three_nodes().remove(0);
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut node = plain.clone();
        change(&mut node);
        node
    };
    let in_zone = |zone: Option<&str>, is_deleting, taints: &[&str]| Standing::Known {
        is_deleting,
        taints: taints.iter().map(|&key| key.to_owned()).collect(),
        zone: zone.map(str::to_owned),
    };
    let known = |is_deleting, taints| in_zone(None, is_deleting, taints);
    let tainted = changed(&|node| {
        node["spec"]["taints"] = json!([
            { "key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule" },
        ]);
    });
    let going = changed(&|node| {
        node["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    let placed = changed(&|node| {
        node["metadata"]["labels"] = json!({ "topology.kubernetes.io/zone": "z1" });
    });
    for (object, expected) in [
        (&plain, known(false, &[])),
        (&placed, in_zone(Some("z1"), false, &[])),
        (&tainted, known(false, &["ToBeDeletedByClusterAutoscaler"])),
        (&plain, known(false, &[])),
        (&going, known(true, &[])),
    ] {
        bed.server.put(object.clone());
        until_standing(&mut standing, &expected).await?;
    }
    bed.server.delete("n1");
    until_standing(&mut standing, &Standing::Unknown).await?;
    bed.server.put(plain.clone());
    until_standing(&mut standing, &known(false, &[])).await?;
    // The watch reports the same change for a node that is left out of the mesh.
    bed.server.put(changed(&|node| {
        node["metadata"]["labels"] = json!({ EXCLUDE_LABEL: "" });
    }));
    until_standing(&mut standing, &Standing::Unknown).await
}

async fn until_standing(
    standing: &mut Receiver<Standing>,
    expected: &Standing,
) -> anyhow::Result<()> {
    let reached = standing.wait_for(|standing| standing == expected);
    match tokio::time::timeout(PATIENCE, reached).await {
        Ok(reached) => reached.map(drop).context("the registry ended"),
        Err(_) => anyhow::bail!("waited in vain for {expected:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_the_server_does_the_last_good_set_stands_and_says_why() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    for (behaviour, part) in [
        (Behaviour::Unauthorized, "refuses the credentials (401)"),
        (Behaviour::Forbidden, "forbids it (403): nodes is forbidden"),
        (
            Behaviour::Rubbish("{\"items\": 7}".to_owned()),
            "cannot watch nodes: ",
        ),
        (
            Behaviour::Rubbish("\u{0}\u{1}".repeat(50_000)),
            "cannot watch nodes: ",
        ),
        (
            Behaviour::BadGateway,
            "answers 502: <html> <body>502 Bad Gateway",
        ),
        (Behaviour::Reset, "cannot watch nodes: "),
        (Behaviour::RubbishInWatches, "cannot watch nodes: "),
    ] {
        bed.server.behave(behaviour.clone());
        let what = format!("{part:?} for {behaviour:?}");
        let is_reported = |set: &NodeSet| reason(set).is_some_and(|reason| reason.contains(part));
        let set = bed.until(&what, is_reported).await?;
        assert_eq!(names(&set), ["n1", "n2", "n3"], "{behaviour:?}");
        let since = set.sources[0].stale.clone().context("stale")?.since;

        bed.server.delete("n3");
        // During the same outage, three more requests change neither the set nor its age.
        let before = bed.server.requests().len();
        wait_for("three more requests", PATIENCE, || {
            Ok((bed.server.requests().len() >= before + 3).then_some(()))
        })?;
        let set = bed.watch.borrow_and_update().clone();
        assert_eq!(names(&set), ["n1", "n2", "n3"], "{behaviour:?}");
        let stale = set.sources[0].stale.clone().context("stale still")?;
        assert_eq!(stale.since, since, "{behaviour:?}: {stale:?}");
        assert!(stale.reason.len() < 300, "{stale:?}");

        bed.server.behave(Behaviour::Serve);
        bed.until_nodes(&["n1", "n2"]).await?;
        bed.server.put(three_nodes().remove(2));
        bed.until_nodes(&["n1", "n2", "n3"]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_lost_is_not_believed() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    bed.server.stop();
    bed.server.put(node("n4", &["172.30.0.4"], &[]));
    bed.server.compact();
    bed.server.behave(Behaviour::LostStore);
    bed.server.resume()?;
    let is_reported =
        |set: &NodeSet| reason(set).is_some_and(|reason| reason.contains("lists no nodes"));
    let set = bed
        .until("the empty list to be refused", is_reported)
        .await?;
    assert_eq!(names(&set), ["n1", "n2", "n3"]);
    bed.server.behave(Behaviour::Serve);
    bed.until_nodes(&["n1", "n2", "n3", "n4"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_opens_without_a_server_and_fills_when_there_is_one() -> anyhow::Result<()> {
    let mut server = ApiServer::start()?;
    server.put(node("n1", &["172.30.0.1"], &[]));
    server.stop();
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let registry = open(&kubeconfig)?;
    let mut watch = registry.watch();
    let set = watch.borrow().clone();
    assert!(set.nodes.is_empty() && reason(&set).is_some(), "{set:?}");
    let is_reported = |set: &NodeSet| {
        reason(set).is_some_and(|reason| reason.contains("cannot list nodes: Connection refused"))
    };
    until(&mut watch, "the refusal", is_reported).await?;
    server.resume()?;
    until(&mut watch, "the node", |set| {
        names(set) == ["n1"] && reason(set).is_none()
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_takes_requests_and_answers_none_is_reported() -> anyhow::Result<()> {
    let server = ApiServer::start()?;
    server.behave(Behaviour::Hang);
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    server.write_kubeconfig(&kubeconfig)?;
    let registry = open(&kubeconfig)?;
    let is_reported =
        |set: &NodeSet| reason(set).is_some_and(|reason| reason.contains("no answer within"));
    until(
        &mut registry.watch(),
        "the silence to be reported",
        is_reported,
    )
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_that_forgot_the_changes_is_listed_again() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    bed.server.stop();
    let set = bed.until("stale", |set| reason(set).is_some()).await?;
    assert_eq!(names(&set), ["n1", "n2", "n3"]);
    bed.server.delete("n2");
    bed.server.put(node("n4", &["172.30.0.4"], &[]));
    bed.server.compact();
    bed.server.resume()?;
    bed.until_nodes(&["n1", "n3", "n4"]).await?;
    assert_eq!(bed.lists(), 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_bookmark_a_broken_watch_goes_on_without_a_list() -> anyhow::Result<()> {
    let mut left_out = node("v1", &["172.30.0.7"], &[]);
    left_out["metadata"]["labels"] = json!({ EXCLUDE_LABEL: "" });
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    // Changes that tell this watch nothing but their revision.
    for i in 0..10 {
        left_out["metadata"]["annotations"] = json!({ "count": i.to_string() });
        bed.server.put(left_out.clone());
    }
    bed.server.bookmark();
    // This comes after the bookmark in the stream.
    bed.server.put(node("n4", &["172.30.0.4"], &[]));
    bed.until_nodes(&["n1", "n2", "n3", "n4"]).await?;
    bed.server.compact();
    bed.server.behave(Behaviour::BadGateway);
    bed.until("stale", |set| reason(set).is_some()).await?;
    bed.server.behave(Behaviour::Serve);
    bed.until_nodes(&["n1", "n2", "n3", "n4"]).await?;
    assert_eq!(bed.lists(), 1, "{:?}", bed.server.requests());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_restored_from_a_backup_is_noticed() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    let backup = bed.server.backup();
    bed.server.delete("n3");
    bed.server.put(node("n4", &["172.30.0.4"], &[]));
    bed.until_nodes(&["n1", "n2", "n4"]).await?;
    bed.server.restore(&backup);
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    // Changes below the revision that was seen before are followed, too.
    bed.server.put(node("n5", &["172.30.0.5"], &[]));
    bed.until_nodes(&["n1", "n2", "n3", "n5"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_addresses_are_published_and_kept() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    bed.registry
        .publish(own(&["10.244.1.7", "fd00:10:244:1::7"]));
    bed.wait_for_annotations(Some("10.244.1.7"), Some("fd00:10:244:1::7"))?;
    let set = bed
        .until("the set to follow", |set| {
            set.nodes[0].health_addresses.len() == 2
        })
        .await?;
    assert_eq!(
        set.nodes[0].health_addresses,
        own(&["10.244.1.7", "fd00:10:244:1::7"]).health_addresses
    );

    // The annotations are removed, and later overwritten with others.
    bed.server.put(three_nodes().remove(0));
    bed.wait_for_annotations(Some("10.244.1.7"), Some("fd00:10:244:1::7"))?;
    let mut wrong = three_nodes().remove(0);
    wrong["metadata"]["annotations"] = json!({ IPV4_HEALTH_ANNOTATION: "rubbish", "kept": "yes" });
    bed.server.put(wrong);
    bed.wait_for_annotations(Some("10.244.1.7"), Some("fd00:10:244:1::7"))?;
    assert_eq!(bed.annotation("kept").as_deref(), Some("yes"));

    bed.registry.publish(own(&["fd00:10:244:1::8"]));
    bed.wait_for_annotations(None, Some("fd00:10:244:1::8"))?;
    // The object is deleted, and the node's kubelet registers it again.
    bed.server.delete("n1");
    bed.until_nodes(&["n2", "n3"]).await?;
    bed.server.put(three_nodes().remove(0));
    bed.wait_for_annotations(None, Some("fd00:10:244:1::8"))?;
    let others = bed.server.get("n2").context("n2")?;
    assert_eq!(others["metadata"]["annotations"], Value::Null);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_publication_is_tried_again() -> anyhow::Result<()> {
    let mut bed = Bed::start(&three_nodes())?;
    bed.until_nodes(&["n1", "n2", "n3"]).await?;
    bed.server.behave(Behaviour::Forbidden);
    bed.registry.publish(own(&["10.244.1.7"]));
    wait_for("two attempts", PATIENCE, || {
        let requests = bed.server.requests();
        let attempts = requests
            .iter()
            .filter(|request| request.starts_with("PATCH "))
            .count();
        Ok((attempts >= 2).then_some(()))
    })?;
    assert_eq!(bed.annotation(IPV4_HEALTH_ANNOTATION), None);
    bed.server.behave(Behaviour::Serve);
    bed.wait_for_annotations(Some("10.244.1.7"), None)
}

/// Runs the first test again in a process that finds no certificates, as in a small image.
#[test]
fn a_server_without_tls_needs_none_of_the_systems_certificates() -> anyhow::Result<()> {
    let mut tests = Command::new(std::env::current_exe()?);
    tests
        .args([
            "--exact",
            "kubernetes::nodes_are_read_page_by_page_and_changes_are_followed",
        ])
        .envs([("SSL_CERT_FILE", "/none"), ("SSL_CERT_DIR", "/none")]);
    let reported = tests::process::run(&mut tests)?.success()?;
    ensure!(reported.contains("1 passed"), "{reported}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_credentials_are_read_again() -> anyhow::Result<()> {
    let refusing = ApiServer::start()?;
    refusing.behave(Behaviour::Unauthorized);
    let serving = ApiServer::start()?;
    serving.put(node("n1", &["172.30.0.1"], &[]));
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("config");
    refusing.write_kubeconfig(&kubeconfig)?;
    let registry = open(&kubeconfig)?;
    let mut watch = registry.watch();
    until(&mut watch, "the refusal", |set| {
        reason(set).is_some_and(|reason| reason.contains("401"))
    })
    .await?;
    serving.write_kubeconfig(&kubeconfig)?;
    until(&mut watch, "the node", |set| {
        names(set) == ["n1"] && reason(set).is_none()
    })
    .await?;
    Ok(())
}
