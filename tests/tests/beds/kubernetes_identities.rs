//! Identities in a Kubernetes cluster: agents that race for them agree at one write for each label set, and no wrong
//! identity is assigned after an outage of the server or a loss of its data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{
    EndpointDetails, IdentityAllocator, IdentityError, OnOutage, Timing,
};
use health_settings::RegistrySpec;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Kind};
use tests::{Bed, Member, PATIENCE, wait_for};

use crate::identities::{acquire_all, announce, app, count, has, until};
use crate::kubernetes_labels::Stand;
use crate::policy::{import, is_kept_from, reaches};

/// Timing short enough for a test to see what takes an agent minutes.
fn hasty() -> Timing {
    Timing {
        settle_seen: Duration::from_millis(200),
        collect_after: Duration::from_secs(1),
        look_period: Duration::from_millis(100),
        reuse_after: Duration::from_secs(1),
        ..Timing::default()
    }
}

/// An API server, and a kubeconfig for it.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    kubeconfig: PathBuf,
    _folder: tempfile::TempDir,
}

impl Cluster {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let server = ApiServer::start()?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("config");
        server.write_kubeconfig(&kubeconfig)?;
        Ok(Self {
            server,
            kubeconfig,
            _folder: folder,
        })
    }

    pub(crate) fn open(
        &self,
        node: &str,
        timing: Timing,
    ) -> anyhow::Result<Arc<IdentityAllocator>> {
        let store = RegistrySpec::Kubernetes(Some(self.kubeconfig.clone()));
        let opened = IdentityAllocator::open(&store, "default", node, timing)?;
        Ok(Arc::new(opened))
    }

    fn open_all<const N: usize>(
        &self,
        nodes: [&str; N],
    ) -> anyhow::Result<[Arc<IdentityAllocator>; N]> {
        let opened: anyhow::Result<Vec<_>> = nodes
            .iter()
            .map(|node| self.open(node, Timing::default()))
            .collect();
        opened?
            .try_into()
            .map_err(|_| anyhow::anyhow!("not as many"))
    }

    /// The label sets in the store, by number.
    pub(crate) fn stored(&self) -> BTreeMap<String, Value> {
        let objects = self.server.list_of(Kind::HealthIdentity).into_iter();
        let named = |object: Value| {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            (name.to_owned(), object["spec"].clone())
        };
        objects.map(named).collect()
    }

    /// The entries in the slices of node `a`.
    fn entries(&self) -> Vec<Value> {
        let mut slices = self.server.list_of(Kind::HealthEndpointSlice);
        slices.retain(|slice| slice["spec"]["node"] == "a");
        let entries = slices.into_iter();
        let entries = entries.map(|slice| slice["spec"]["endpoints"].as_array().cloned());
        entries.flatten().flatten().collect()
    }

    /// The number of requests so far that begin with this.
    fn requests(&self, what: &str) -> usize {
        let requests = self.server.requests();
        requests.iter().filter(|one| one.starts_with(what)).count()
    }
}

const IDENTITIES: &str = "/apis/health-agent.io/v1/healthidentities";
const SLICES: &str = "/apis/health-agent.io/v1/healthendpointslices";

async fn wait(what: &str, is_it: impl Fn() -> bool) -> anyhow::Result<()> {
    let reached = async {
        while !is_it() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    reached.map_err(|_| anyhow::anyhow!("waited in vain for {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn three_agents_that_ask_for_a_thousand_label_sets_at_once_agree_at_one_write_each()
-> anyhow::Result<()> {
    const SETS: usize = 1000;
    let cluster = Cluster::start()?;
    let agents = cluster.open_all(["a", "b", "c"])?;
    let began = std::time::Instant::now();
    let numbers = acquire_all(&agents, SETS).await?;
    let posts = cluster.requests(&format!("POST {IDENTITIES}"));
    let reads = cluster.requests(&format!("GET {IDENTITIES}/"));
    println!(
        "{SETS} sets on three agents: {:?}, {posts} POST, {reads} GET",
        began.elapsed()
    );
    assert_eq!(
        cluster.stored().len(),
        SETS,
        "one object for each label set"
    );
    assert_eq!(cluster.requests(&format!("PATCH {IDENTITIES}")), 0);

    // Another agent has what it needs from its list.
    let late = cluster.open("d", Timing::default())?;
    let same = acquire_all(std::slice::from_ref(&late), SETS).await?;
    assert_eq!(same, numbers);
    assert_eq!(cluster.requests(&format!("POST {IDENTITIES}")), posts);
    assert_eq!(cluster.requests(&format!("GET {IDENTITIES}/")), reads);
    let watches = cluster.requests(&format!("GET {IDENTITIES}?&watch=true"));
    let lists = cluster.requests(&format!("GET {IDENTITIES}?")) - watches;
    // The last agent's list has five pages.
    ensure!(
        (watches, lists) <= (4, 3 + SETS.div_ceil(200)),
        "{watches} watches, {lists} lists"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_has_the_same_numbers_and_drops_what_it_no_longer_needs()
-> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let numbers = {
        let agents = cluster.open_all(["a", "b"])?;
        let numbers = acquire_all(&agents, 20).await?;
        for (set, identity) in &numbers {
            announce_as(&agents[0], *set, *identity)?;
        }
        wait("the addresses", || cluster.entries().len() == 20).await?;
        numbers
    };
    let [agent, other] = cluster.open_all(["a", "b"])?;
    let mut addresses = other.addresses();
    until(&mut addresses, "all addresses", |now| now.0.len() == 40).await?;
    for (set, identity) in numbers.iter().take(5) {
        assert_eq!(agent.acquire(&app(*set), OnOutage::Wait).await?, *identity);
        announce_as(&agent, *set, *identity)?;
    }
    assert_eq!(cluster.entries().len(), 20);
    agent.forget_earlier();
    wait("the rest to be dropped", || cluster.entries().len() == 5).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_server_is_away_known_label_sets_have_numbers_and_new_ones_wait()
-> anyhow::Result<()> {
    let mut cluster = Cluster::start()?;
    let agents = cluster.open_all(["a", "b"])?;
    let numbers = acquire_all(&agents, 20).await?;
    let mut watch = agents[0].identities();
    let before = until(&mut watch, "all of them", |now| count(now) == 20).await?;
    cluster.server.stop();
    until(&mut watch, "the outage", |now| now.stale.is_some()).await?;
    assert_eq!(watch.borrow().labels, before.labels);
    let known = agents[0].acquire(&app(7), OnOutage::Fail).await?;
    assert_eq!(known, numbers[&7]);
    let refused = agents[0].acquire(&app(20), OnOutage::Fail).await;
    let Err(IdentityError::Unavailable { .. }) = refused else {
        anyhow::bail!("{refused:?}");
    };
    let waiting = tokio::spawn({
        let agent = agents[0].clone();
        async move { agent.acquire(&app(20), OnOutage::Wait).await }
    });
    cluster.server.resume()?;
    waiting.await??;
    let now = until(&mut watch, "the return", |now| {
        now.stale.is_none() && count(now) == 21
    });
    let now = now.await?;
    for (identity, labels) in before.labels.iter() {
        assert_eq!(now.labels.get(identity), Some(labels));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_lost_is_written_again_with_the_same_numbers() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agents = cluster.open_all(["a", "b"])?;
    let numbers = acquire_all(&agents, 20).await?;
    announce(&agents[0], "10.244.1.9", numbers[&0])?;
    let mut addresses = agents[1].addresses();
    until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
    for lost in [
        vec![Kind::HealthEndpointSlice],
        vec![Kind::HealthIdentity],
        vec![Kind::HealthIdentity, Kind::HealthEndpointSlice],
    ] {
        lost.iter().for_each(|kind| cluster.server.lose_all(*kind));
        wait("all again", || {
            let has_address = |entry: &Value| entry["addresses"][0]["ip"] == "10.244.1.9";
            cluster.stored().len() == 20 && cluster.entries().iter().any(has_address)
        })
        .await?;
        let fresh = cluster.open("fresh", Timing::default())?;
        let mut watch = fresh.identities();
        let again = until(&mut watch, "all again", |now| count(now) == 20).await?;
        for (number, identity) in &numbers {
            assert_eq!(has(&again, &app(*number)), Some(*identity), "{lost:?}");
        }
        assert_eq!(addresses.borrow_and_update().0.len(), 1);
        assert_eq!(agents[0].held().borrow().len(), 20);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_identity_is_marked_then_deleted_and_one_that_is_used_again_stays()
-> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    // The test sees the mark before the deletion.
    let timing = Timing {
        reuse_after: Duration::from_secs(3),
        ..hasty()
    };
    let agent = cluster.open("a", timing)?;
    let numbers = acquire_all(std::slice::from_ref(&agent), 4).await?;
    (1..4).for_each(|set| agent.release(&app(set)));
    let marked = |set: usize| {
        let stored = cluster.stored();
        let spec = stored.get(&numbers[&set].to_string());
        spec.is_some_and(|spec| !spec["unusedSince"].is_null())
    };
    wait("a mark", || marked(1)).await?;
    let again = agent.acquire(&app(1), OnOutage::Wait).await?;
    assert_eq!(again, numbers[&1]);
    assert!(!marked(1), "an identity in use is marked");
    let mut watch = agent.identities();
    let left = until(&mut watch, "the collection", |now| count(now) == 2).await?;
    assert_eq!(has(&left, &app(0)), Some(numbers[&0]));
    assert_eq!(has(&left, &app(1)), Some(numbers[&1]));
    assert!(!marked(0) && !marked(1), "an identity in use is marked");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_on_an_identity_in_use_is_removed() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", Timing::default())?;
    let identity = agent.acquire(&app(0), OnOutage::Wait).await?;
    cluster.server.put(json!({
        "apiVersion": "health-agent.io/v1", "kind": "HealthIdentity",
        "metadata": { "name": identity.to_string(), "uid": "by-hand" },
        "spec": { "labels": app(0), "unusedSince": "2026-01-01T00:00:00Z" },
    }));
    wait("the mark's end", || {
        cluster.stored()[&identity.to_string()]["unusedSince"].is_null()
    })
    .await?;
    assert_eq!(agent.held().borrow().values().next(), Some(&identity));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_taken_up_during_its_collection_keeps_its_number_in_the_store() -> anyhow::Result<()>
{
    const ADDRESS: &str = "10.244.1.9";
    let cluster = Cluster::start()?;
    // Both collect everything unused at once.
    let timing = Timing {
        settle_seen: Duration::ZERO,
        collect_after: Duration::ZERO,
        look_period: Duration::from_millis(5),
        reuse_after: Duration::ZERO,
        ..Timing::default()
    };
    let agents = [cluster.open("a", timing)?, cluster.open("b", timing)?];
    for round in 0..10 {
        let agent = &agents[round % 2];
        let labels = app(round % 3);
        let identity = agent.acquire(&labels, OnOutage::Wait).await?;
        announce(agent, ADDRESS, identity)?;
        wait("the identity in the store", || {
            let stored = cluster.stored();
            let spec = stored.get(&identity.to_string());
            spec.is_some_and(|spec| {
                spec["labels"] == json!(labels) && spec["unusedSince"].is_null()
            })
        })
        .await?;
        agent.withdraw(ADDRESS.parse()?);
        agent.release(&labels);
    }
    wait("the collection of all", || cluster.stored().is_empty()).await?;
    let mut watch = agents[0].identities();
    until(&mut watch, "the end of all", |now| count(now) == 0).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_the_definitions_is_named_and_used_once_it_has_them() -> anyhow::Result<()>
{
    let cluster = Cluster::start()?;
    cluster.server.lack_identities();
    let agent = cluster.open("a", Timing::default())?;
    let mut watch = agent.identities();
    let lacking = until(&mut watch, "the reason", |now| {
        let stale = now.stale.as_ref();
        stale.is_some_and(|stale| stale.reason.contains("deploy/kubernetes/crds.yaml"))
    });
    let reason = lacking
        .await?
        .stale
        .clone()
        .unwrap_or_else(|| unreachable!());
    ensure!(reason.reason.contains(".health-agent.io"), "{reason:?}");
    let refused = agent.acquire(&app(0), OnOutage::Fail).await;
    ensure!(
        matches!(refused, Err(IdentityError::Unavailable { .. })),
        "{refused:?}"
    );
    cluster.server.define_identities();
    agent.acquire(&app(0), OnOutage::Wait).await?;
    until(&mut watch, "the identity", |now| {
        now.stale.is_none() && count(now) == 1
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_objects_are_named_left_alone_and_give_nobody_an_identity() -> anyhow::Result<()>
{
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", hasty())?;
    let first = agent.acquire(&app(0), OnOutage::Wait).await?;
    let next = Identity(first.0 % 65_535 + 1);
    let mut watch = agent.identities();
    until(&mut watch, "the identity", |now| count(now) == 1).await?;
    agent.release(&app(0));
    until(&mut watch, "the collection", |now| count(now) == 0).await?;

    let identity = |name: &str, labels: Value| {
        json!({
            "apiVersion": "health-agent.io/v1", "kind": "HealthIdentity",
            "metadata": { "name": name, "uid": name }, "spec": { "labels": labels },
        })
    };
    let slice = |name: &str, number: u32| {
        json!({
            "apiVersion": "health-agent.io/v1", "kind": "HealthEndpointSlice",
            "metadata": { "name": name, "uid": name },
            "spec": { "node": "x", "count": 1, "endpoints": [
                {
                    "id": 7, "identity": number,
                    "addresses": [{ "ip": "10.0.0.1", "node": "10.0.0.2" }],
                },
            ] },
        })
    };
    let objects = [
        identity(&first.to_string(), json!(["reserved:host"])),
        identity("hello", json!(["k8s:app=x"])),
        identity("1", json!(["k8s:app=x"])),
        slice("x-0", 1),
        slice("y-0", 300),
        slice("hello", 300),
    ];
    objects
        .iter()
        .for_each(|one| cluster.server.put(one.clone()));
    let named = until(&mut watch, "all to be named", |now| {
        now.rejected.len() == objects.len()
    });
    let named = named.await?;
    for key in [
        format!("healthidentities/{first}"),
        "healthidentities/hello".to_owned(),
        "healthidentities/1".to_owned(),
        "healthendpointslices/x-0".to_owned(),
        "healthendpointslices/y-0".to_owned(),
        "healthendpointslices/hello".to_owned(),
    ] {
        assert!(named.rejected.iter().any(|one| one.key == key), "{key}");
    }
    assert_eq!(count(&named), 0);
    assert!(agent.addresses().borrow().0.is_empty());
    assert_eq!(agent.acquire(&app(0), OnOutage::Wait).await?, next);
    assert_eq!(
        cluster.stored()[&first.to_string()]["labels"],
        json!(["reserved:host"])
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_address_goes_although_this_agent_can_write_nothing() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", hasty())?;
    let other = cluster.open("b", Timing::default())?;
    announce(&other, "10.244.2.9", Identity::INIT)?;
    let mut addresses = agent.addresses();
    until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
    drop(other);
    cluster.server.refuse("POST", Kind::HealthIdentity, "", 403);
    let refused = agent.acquire(&app(0), OnOutage::Fail).await;
    ensure!(
        matches!(refused, Err(IdentityError::Unavailable { .. })),
        "{refused:?}"
    );
    cluster.server.delete_of(Kind::HealthEndpointSlice, "b-0");
    until(&mut addresses, "its end", |now| now.0.is_empty()).await?;
    Ok(())
}

/// A slice of an endpoint with these labels, and of one with the identity `init`.
async fn slice_by_hand(identity: Identity, labels: &LabelSet) -> anyhow::Result<Value> {
    // The digest as an agent of another cluster writes it.
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", Timing::default())?;
    let own = agent.acquire(labels, OnOutage::Wait).await?;
    announce(&agent, "10.244.1.9", own)?;
    wait("the digest", || !cluster.entries().is_empty()).await?;
    let digest = cluster.entries()[0]["labelsDigest"].clone();
    let address = |ip: &str| json!([{ "ip": ip, "node": "172.30.0.9" }]);
    Ok(json!({
        "apiVersion": "health-agent.io/v1", "kind": "HealthEndpointSlice",
        "metadata": { "name": "hand-0", "uid": "by-hand" },
        "spec": { "node": "hand", "count": 2, "endpoints": [
            {
                "id": 1, "identity": identity, "labelsDigest": digest,
                "addresses": address("10.244.9.1"),
            },
            { "id": 2, "identity": Identity::INIT, "addresses": address("10.244.9.2") },
        ] },
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_kept_back_while_its_number_means_other_labels_here() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", hasty())?;
    let identity = agent.acquire(&app(0), OnOutage::Wait).await?;
    let slice = slice_by_hand(identity, &app(1)).await?;
    let mut identities = agent.identities();
    until(&mut identities, "the identity", |now| count(now) == 1).await?;
    // The agent hears only of slices, while its number is given to other labels.
    cluster.server.refuse("GET", Kind::HealthIdentity, "", 403);
    cluster.server.end_watches();
    until(&mut identities, "the refusal", |now| {
        let reason = now.stale.as_ref().map(|stale| stale.reason.as_str());
        reason.is_some_and(|reason| reason.contains("(403)"))
    })
    .await?;
    cluster
        .server
        .delete_of(Kind::HealthIdentity, &identity.to_string());
    cluster.server.put(json!({
        "apiVersion": "health-agent.io/v1", "kind": "HealthIdentity",
        "metadata": { "name": identity.to_string(), "uid": "of-another" },
        "spec": { "labels": app(1) },
    }));
    cluster.server.put(slice);
    let mut addresses = agent.addresses();
    let known = until(&mut addresses, "the slice", |now| {
        now.0.keys().any(|ip| ip.to_string() == "10.244.9.2/32")
    })
    .await?;
    assert_eq!(known.0.len(), 1, "{known:?}");
    assert_eq!(has(&identities.borrow(), &app(0)), Some(identity));
    cluster.server.refuse_nothing();
    until(&mut addresses, "both", |now| now.0.len() == 2).await?;
    until(&mut identities, "the other labels", |now| {
        has(now, &app(1)) == Some(identity)
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_notice_a_restored_backup_and_write_what_it_lacks_once() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agents = cluster.open_all(["a", "b"])?;
    acquire_all(&agents, 3).await?;
    let backup = cluster.server.backup();
    let numbers = acquire_all(&agents, 10).await?;
    announce(&agents[0], "10.244.1.9", numbers[&9])?;
    let mut addresses = agents[1].addresses();
    until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
    // The agents see revisions that the restored server does not reach meanwhile.
    let mut slice = slice_by_hand(numbers[&0], &app(0)).await?;
    for count in 0..50 {
        slice["spec"]["count"] = count.into();
        cluster.server.put(slice.clone());
        cluster.server.put(json!({
            "apiVersion": "health-agent.io/v1", "kind": "HealthIdentity",
            "metadata": { "name": "300", "uid": "by-hand" }, "spec": { "labels": app(300 + count) },
        }));
    }
    for agent in &agents {
        let mut identities = agent.identities();
        until(&mut identities, "the last one", |now| {
            has(now, &app(349)).is_some()
        })
        .await?;
        let mut addresses = agent.addresses();
        until(&mut addresses, "all addresses", |now| now.0.len() == 3).await?;
    }
    cluster.server.restore(&backup);
    let before = cluster.requests(&format!("PATCH {SLICES}"));
    announce(&agents[0], "10.244.1.8", numbers[&8])?;
    until(&mut addresses, "the next address", |now| now.0.len() == 4).await?;
    wait("all in the store", || {
        let stored = cluster.stored();
        let has_all = cluster.entries().iter().any(|entry| {
            entry["addresses"]
                .as_array()
                .is_some_and(|all| all.len() == 2)
        });
        stored.len() == 10 && has_all
    })
    .await?;
    for (set, identity) in &numbers {
        let labels = &cluster.stored()[&identity.to_string()]["labels"];
        assert_eq!(*labels, json!(app(*set)));
    }
    let patches = cluster.requests(&format!("PATCH {SLICES}")) - before;
    ensure!(patches < 5, "{patches} writes of slices");
    let next = agents[1].acquire(&app(10), OnOutage::Wait).await?;
    assert!(!numbers.values().any(|one| *one == next));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_overloaded_is_asked_seldom_and_still_gets_slices() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", Timing::default())?;
    agent.acquire(&app(100), OnOutage::Wait).await?;
    cluster.server.refuse("POST", Kind::HealthIdentity, "", 429);
    let before = cluster.requests(&format!("POST {IDENTITIES}"));
    let waiting: Vec<_> = (0..100)
        .map(|set| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.acquire(&app(set), OnOutage::Wait).await })
        })
        .collect();
    let posts = || cluster.requests(&format!("POST {IDENTITIES}"));
    wait("a refusal", || posts() > before).await?;
    announce(&agent, "10.244.1.9", Identity::INIT)?;
    wait("the slice", || {
        let has_address = |entry: &Value| entry["addresses"][0]["ip"] == "10.244.1.9";
        cluster.entries().iter().any(has_address)
    })
    .await?;
    // After the first ones, one request at a time, and the pause that the server asks for.
    let (known, began) = (posts(), std::time::Instant::now());
    wait("two more attempts", || posts() >= known + 2).await?;
    ensure!(
        began.elapsed() >= Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    cluster.server.refuse_nothing();
    for one in waiting {
        one.await??;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_label_set_that_the_server_refuses_holds_up_no_other() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", Timing::default())?;
    for set in 10..22 {
        cluster
            .server
            .refuse("POST", Kind::HealthIdentity, &format!("=a{set}\""), 422);
    }
    let bad: Vec<_> = (10..22)
        .map(|set| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.acquire(&app(set), OnOutage::Wait).await })
        })
        .collect();
    let agents = std::slice::from_ref(&agent);
    acquire_all(agents, 10).await?;
    announce(&agent, "10.244.1.9", Identity::INIT)?;
    wait("the slice", || !cluster.entries().is_empty()).await?;
    assert!(bad.iter().all(|one| !one.is_finished()));
    let refused = agent.acquire(&app(10), OnOutage::Fail).await;
    ensure!(
        matches!(refused, Err(IdentityError::Unavailable { .. })),
        "{refused:?}"
    );
    cluster.server.refuse_nothing();
    for one in bad {
        one.await??;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_whose_labels_change_all_the_time_is_slowed_and_no_other() -> anyhow::Result<()>
{
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", Timing::default())?;
    let of = |namespace: &str, set: usize| {
        let labels = [
            format!("k8s:io.kubernetes.pod.namespace={namespace}").parse()?,
            format!("k8s:app=a{set}").parse()?,
        ];
        anyhow::Ok(LabelSet::new(labels)?)
    };
    let mut refusal = None;
    for set in 0..200 {
        let labels = of("shop", set)?;
        match agent.acquire(&labels, OnOutage::Wait).await {
            Ok(_) => agent.release(&labels),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    let refusal = refusal.context("no refusal")?;
    ensure!(
        matches!(&refusal, IdentityError::Limited { reason, .. } if reason.contains("namespace shop")),
        "{refusal:?}"
    );
    agent.acquire(&of("bank", 0)?, OnOutage::Wait).await?;
    // Label sets that the store has cost nothing.
    agent.acquire(&of("shop", 0)?, OnOutage::Wait).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_that_were_written_before_their_node_belong_to_it_once_it_is_there()
-> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.open("a", hasty())?;
    announce(&agent, "10.244.1.9", Identity::INIT)?;
    wait("the slice", || cluster.entries().len() == 1).await?;
    let mut node = tests::apiserver::node("a", &["172.30.0.1"], &[]);
    node["metadata"]["uid"] = "of-a".into();
    cluster.server.put(node);
    wait("the owner", || {
        let slices = cluster.server.list_of(Kind::HealthEndpointSlice);
        slices[0]["metadata"]["ownerReferences"][0]["uid"] == "of-a"
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_starting_endpoints_cost_less_than_a_hundred_writes() -> anyhow::Result<()> {
    const SETS: usize = 1000;
    let cluster = Cluster::start()?;
    let [agent, other] = cluster.open_all(["a", "b"])?;
    let described = |count: usize, settled: usize| {
        let details = |set: usize| EndpointDetails {
            pod: Some(format!("shop/web-{set}")),
            state: if set < settled {
                "ready"
            } else {
                "regenerating"
            }
            .to_owned(),
        };
        let ids = (0..count).filter_map(|set| Some((u16::try_from(set).ok()?, details(set))));
        ids.collect::<BTreeMap<_, _>>()
    };
    for set in 0..SETS {
        let identity = agent.acquire(&app(set % 10), OnOutage::Wait).await?;
        agent.describe(described(set + 1, set));
        announce_as(&agent, set, identity)?;
    }
    agent.describe(described(SETS, SETS));
    let mut addresses = other.addresses();
    until(&mut addresses, "all addresses", |now| {
        now.0.len() == 2 * SETS
    })
    .await?;
    wait("the last states", || {
        let entries = cluster.entries();
        entries.len() == SETS && entries.iter().all(|entry| entry["state"] == "ready")
    })
    .await?;
    let writes = ["POST", "PATCH"].map(|verb| cluster.requests(&format!("{verb} {SLICES}")));
    ensure!(writes.iter().sum::<usize>() <= 100, "{writes:?}");
    let slices = cluster.server.list_of(Kind::HealthEndpointSlice);
    let counts = slices.iter().map(|slice| &slice["spec"]);
    let counts = counts.map(|spec| (spec["count"].as_u64(), spec["ready"].as_u64()));
    let counts: BTreeSet<_> = counts.collect();
    assert_eq!(counts, BTreeSet::from([(Some(100), Some(100))]));

    // States that flap are not written at all: nothing is due for as long as they do not last.
    let written = |verb: &str| cluster.requests(&format!("{verb} {SLICES}"));
    let before = written("PATCH");
    for _ in 0..50 {
        agent.describe(described(SETS, 0));
        agent.describe(described(SETS, SETS));
    }
    announce(&agent, "10.245.0.1", Identity::INIT)?;
    until(&mut addresses, "one more address", |now| {
        now.0.len() == 2 * SETS + 1
    })
    .await?;
    assert_eq!(
        written("PATCH"),
        before + 1,
        "only the new address is written"
    );
    Ok(())
}

/// Announces an IPv4 and an IPv6 address of an endpoint.
fn announce_as(
    agent: &IdentityAllocator,
    endpoint: usize,
    identity: Identity,
) -> anyhow::Result<()> {
    let node = "172.30.0.1".parse()?;
    let id = u16::try_from(endpoint)?;
    let [high, low] = id.to_be_bytes();
    let addresses = [
        format!("10.244.{high}.{low}").parse()?,
        format!("fd00::{id:x}").parse()?,
    ];
    agent.announce(id, identity, &addresses.map(|ip| (ip, node)));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_slices_of_a_node_show_its_endpoints_and_a_cleanup_deletes_them() -> anyhow::Result<()> {
    const FLAGS: &str =
        "--identity-store kubernetes:{kubeconfig} --policies-from-kubernetes={kubeconfig}";
    let mut stand = Stand::start_with(FLAGS)?;
    let slice = |server: &ApiServer| {
        let slices = server.list_of(Kind::HealthEndpointSlice);
        slices.into_iter().next().map(|slice| slice["spec"].clone())
    };
    for app in ["web", "db"] {
        stand.put_pod(app, &format!("u-{app}"), &json!({ "app": app }));
        stand.connect(app, &format!("u-{app}"))?;
    }
    let db = stand.wait_labels("db", &["k8s:app=db"])?;
    let is_shown = |entry: &Value| {
        entry["id"] == db.id
            && entry["identity"] == db.identity
            && entry["pod"] == "shop/db"
            && entry["state"] == "ready"
            && entry["addresses"][0]["ip"] == json!(db.ipv4)
    };
    wait_for("the endpoints in the slice", PATIENCE, || {
        let Some(spec) = slice(&stand.server) else {
            return Ok(None);
        };
        let entries = spec["endpoints"].as_array().cloned().unwrap_or_default();
        let is_complete =
            entries.len() == 2 && (&spec["count"], &spec["ready"]) == (&json!(2), &json!(2));
        let pods = spec["pods"].as_str().unwrap_or_default();
        let is_named = pods.contains("shop/web") && pods.contains("shop/db");
        Ok((is_complete && is_named && entries.iter().any(is_shown)).then_some(()))
    })?;

    stand.server.put(json!({
        "apiVersion": "health-agent.io/v1", "kind": "HealthEndpointSlice",
        "metadata": { "name": "other-0", "uid": "other" },
        "spec": { "node": "other", "count": 0, "endpoints": [] },
    }));
    stand.node().kill_agent(Signal::SIGTERM)?;
    let removed = stand.node().cli("cleanup")?.success()?;
    ensure!(removed.contains("endpoint slices"), "{removed}");
    ensure!(removed.contains("policies-kubernetes.json"), "{removed}");
    let left = stand.server.list_of(Kind::HealthEndpointSlice);
    ensure!(
        left.len() == 1 && left[0]["spec"]["node"] == "other",
        "{left:?}"
    );
    let again = stand.node().cli("cleanup")?.success()?;
    assert_eq!(again.trim_end(), "nothing to remove");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn policy_on_labels_holds_between_nodes_that_share_identities_through_kubernetes()
-> anyhow::Result<()> {
    const RULES: &str = r#"[{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}]}]}]"#;
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .without_agents()
        .start()?;
    let server = ApiServer::start_for(bed.node(1))?;
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig)?;
    for node in bed.nodes() {
        node.start_agent_with(&format!(
            "--identity-store kubernetes:{}",
            kubeconfig.display()
        ))?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    let (here, there) = (bed.node(1), bed.node(2));
    let web = Member::on(here, "web", "--label app=web")?;
    let near = Member::on(here, "near", "--label role=friend")?;
    let far = Member::on(there, "far", "--label role=friend")?;
    let foe = Member::on(there, "foe", "--label role=foe")?;
    assert_eq!(near.endpoint.identity, far.endpoint.identity);
    import(here, folder.path(), RULES)?;
    reaches(&near, &web, 8000)?;
    reaches(&far, &web, 8000)?;
    is_kept_from(&foe, &web, 8000, here)?;
    wait_for("the references", PATIENCE, || {
        let listed = here.cli("identity list")?.success()?;
        let shared = format!("{},{}", here.name(), there.name());
        Ok(listed.contains(&shared).then_some(()))
    })?;
    Ok(())
}
