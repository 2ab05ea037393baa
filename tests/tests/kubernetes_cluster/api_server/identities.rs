//! Identities, one object for each label set.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{IdentityAllocator, OnOutage, Timing};
use health_settings::RegistrySpec;
use tests::apiserver::node;

use super::{ApiServer, CRDS, until};

fn app(number: usize) -> anyhow::Result<LabelSet> {
    Ok(LabelSet::new([format!("k8s:app=a{number}").parse()?])?)
}

async fn acquire_all(
    agents: &[Arc<IdentityAllocator>],
    sets: usize,
) -> anyhow::Result<BTreeMap<usize, Identity>> {
    let mut tasks = tokio::task::JoinSet::new();
    for agent in agents {
        for set in 0..sets {
            let (agent, labels) = (agent.clone(), app(set)?);
            tasks.spawn(async move { (set, agent.acquire(&labels, OnOutage::Wait).await) });
        }
    }
    let mut numbers = BTreeMap::new();
    while let Some(acquired) = tasks.join_next().await {
        let (set, identity) = acquired?;
        let identity = identity?;
        ensure!(
            *numbers.entry(set).or_insert(identity) == identity,
            "two numbers"
        );
    }
    Ok(numbers)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_identities_of_agents_are_one_object_for_each_label_set() -> anyhow::Result<()> {
    const SETS: usize = 1000;
    let mut server = ApiServer::start()?;
    let kubeconfig = server.agents()?;
    server
        .plane
        .apply(&[node("a", &["172.30.0.1"], &["10.244.1.0/24"])])?;
    let timing = Timing {
        collect_after: Duration::from_secs(1),
        look_period: Duration::from_millis(200),
        reuse_after: Duration::from_secs(1),
        ..Timing::default()
    };
    let open = |name: &str, timing| -> anyhow::Result<Arc<IdentityAllocator>> {
        let store = RegistrySpec::Kubernetes(Some(kubeconfig.clone()));
        let opened = IdentityAllocator::open(&store, "default", name, timing)?;
        Ok(Arc::new(opened))
    };
    let agents = [
        open("a", Timing::default())?,
        open("b", Timing::default())?,
        open("c", Timing::default())?,
    ];
    let mut watch = agents[0].identities();
    until(&mut watch, "the missing kinds to be named", |now| {
        let stale = now.stale.as_ref();
        stale.is_some_and(|stale| stale.reason.contains("crds.yaml"))
    })
    .await?;
    server.apply(CRDS)?;

    let numbers = acquire_all(&agents, SETS).await?;
    let names = server.plane.kubectl("get healthidentities -o name")?;
    assert_eq!(names.lines().count(), SETS);
    let addresses = [("10.244.1.9".parse()?, "172.30.0.1".parse()?)];
    agents[0].announce(9, numbers[&0], &addresses);
    let mut addresses = agents[1].addresses();
    until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
    let shown = server.plane.kubectl(&format!("get hid {}", numbers[&0]))?;
    ensure!(shown.contains(r#"["k8s:app=a0"]"#), "{shown}");
    let slices = server.plane.get("hes")?;
    let of_a = slices["items"].as_array().into_iter().flatten();
    let mut of_a = of_a.filter(|slice| slice["spec"]["node"] == "a").peekable();
    ensure!(of_a.peek().is_some(), "no slice of a: {slices}");
    let owned = of_a.all(|slice| slice["metadata"]["ownerReferences"][0]["kind"] == "Node");
    ensure!(owned, "{slices}");

    server.plane.kill_api_server();
    until(&mut watch, "stale", |now| now.stale.is_some()).await?;
    let waiting = tokio::spawn({
        let (agent, labels) = (agents[0].clone(), app(SETS)?);
        async move { agent.acquire(&labels, OnOutage::Wait).await }
    });
    server.plane.start_api_server()?;
    waiting.await??;
    drop(agents);

    // Nothing of the first agents is in use once their slices are gone.
    server.plane.kubectl("delete hes --all")?;
    let agent = open("a", timing)?;
    assert_eq!(agent.acquire(&app(7)?, OnOutage::Wait).await?, numbers[&7]);
    let mut watch = agent.identities();
    let before = watch.borrow().labels.len();
    let collected = until(&mut watch, "unused ones to be collected", |now| {
        now.stale.is_none() && now.labels.len() + 3 <= before
    })
    .await?;
    ensure!(
        collected.labels.contains_key(&numbers[&7]),
        "collected in use"
    );
    Ok(())
}
