//! Identities in a file that the agents of one machine share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::Problem;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{Identities, IdentityAllocator, IdentityError, OnOutage, Timing};
use health_settings::RegistrySpec;
use tokio::sync::watch;

/// Longest wait for something that takes a tenth of a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn set(labels: &[&str]) -> LabelSet {
    LabelSet::new(labels.iter().map(|label| label.parse().expect("a label"))).expect("a set")
}

fn app(number: usize) -> LabelSet {
    set(&[&format!("k8s:app=a{number}")])
}

fn open(path: &Path, node: &str, timing: Timing) -> IdentityAllocator {
    let store = RegistrySpec::File(path.to_owned());
    IdentityAllocator::open(&store, "default", node, timing).expect("a store")
}

async fn until<T>(
    watch: &mut watch::Receiver<Arc<T>>,
    what: &str,
    is_it: impl Fn(&T) -> bool,
) -> Arc<T> {
    let found = tokio::time::timeout(PATIENCE, watch.wait_for(|now| is_it(now))).await;
    found.expect(what).expect("the allocator lives").clone()
}

fn has(identities: &Identities, labels: &LabelSet) -> Option<Identity> {
    let found = identities
        .labels
        .iter()
        .find(|(_, known)| ***known == *labels);
    found.map(|(identity, _)| *identity)
}

#[tokio::test(flavor = "multi_thread")]
async fn many_agents_at_once_agree_on_every_number() {
    const AGENTS: usize = 6;
    const SETS: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identities.json");
    let agents: Vec<_> = (0..AGENTS)
        .map(|i| Arc::new(open(&path, &format!("n{i}"), Timing::default())))
        .collect();
    let mut tasks = tokio::task::JoinSet::new();
    for (i, agent) in agents.iter().enumerate() {
        for j in 0..SETS {
            let (agent, number) = (agent.clone(), (i * 7 + j) % SETS);
            tasks.spawn(async move {
                let identity = agent.acquire(&app(number), OnOutage::Wait).await;
                (number, identity.unwrap())
            });
        }
    }
    let mut numbers: BTreeMap<usize, Identity> = BTreeMap::new();
    while let Some(acquired) = tasks.join_next().await {
        let (number, identity) = acquired.unwrap();
        assert!(identity.is_of_cluster());
        assert_eq!(*numbers.entry(number).or_insert(identity), identity);
    }
    let distinct: BTreeSet<_> = numbers.values().collect();
    assert_eq!((numbers.len(), distinct.len()), (SETS, SETS));
    for agent in &agents {
        let mut watch = agent.identities();
        let all = until(&mut watch, "all references", |now| {
            numbers
                .values()
                .all(|id| now.references.get(id).is_some_and(|r| r.len() == AGENTS))
        });
        let all = all.await;
        assert_eq!((all.labels.len(), &all.stale), (SETS + 9, &None));
        assert_eq!(agent.held().borrow().len(), SETS);
    }
}

#[tokio::test]
async fn reserved_sets_need_no_store_and_others_are_refused_by_label() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("no-folder\0/identities.json");
    let agent = open(&path, "n1", Timing::default());
    let health = set(&["reserved:health"]);
    assert_eq!(
        agent.acquire(&health, OnOutage::Fail).await,
        Ok(Identity::HEALTH)
    );
    assert_eq!(
        agent.acquire(&set(&[]), OnOutage::Wait).await,
        Err(IdentityError::NoLabels)
    );
    for bad in [
        &["reserved:nobody"][..],
        &["reserved:host", "k8s:app=a"],
        &["cidr:10.0.0.0/8"],
    ] {
        let refused = agent.acquire(&set(bad), OnOutage::Wait).await;
        assert!(
            matches!(refused, Err(IdentityError::NotForEndpoints(_))),
            "{bad:?}"
        );
    }
    assert_eq!(agent.identities().borrow().labels.len(), 9);
}

#[tokio::test]
async fn a_damaged_file_is_named_left_alone_and_taken_up_again_when_it_is_mended() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identities.json");
    let agent = open(&path, "n1", Timing::default());
    let first = agent.acquire(&app(1), OnOutage::Wait).await.unwrap();
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, "{ rubbish").unwrap();
    let mut watch = agent.identities();
    let stale = until(&mut watch, "the damage", |now| now.stale.is_some()).await;
    let reason = &stale.stale.as_ref().unwrap().reason;
    assert!(
        reason.contains("identities.json is not an identity file"),
        "{reason}"
    );
    assert_eq!(has(&stale, &app(1)), Some(first));
    let activities = agent.activities();
    let reported = activities.store.last();
    let problem = reported.problem.as_ref().expect("a problem");
    assert_eq!(problem, &Problem::warning(reason));
    assert!(reported.succeeded.is_some(), "it could be used before");
    // What is held stays held; a new request is refused or waits.
    assert_eq!(agent.acquire(&app(1), OnOutage::Fail).await, Ok(first));
    let refused = agent.acquire(&app(2), OnOutage::Fail).await;
    assert!(
        matches!(refused, Err(IdentityError::Unavailable { .. })),
        "{refused:?}"
    );
    let labels = app(3);
    let waiting = agent.acquire(&labels, OnOutage::Wait);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "{ rubbish");
    std::fs::write(&path, good).unwrap();
    let third = tokio::time::timeout(PATIENCE, waiting)
        .await
        .unwrap()
        .unwrap();
    assert_ne!(third, first);
    until(&mut watch, "the mending", |now| now.stale.is_none()).await;
    for activity in [activities.store, activities.collector] {
        assert_eq!(activity.last().problem, None);
    }
}

#[tokio::test]
async fn a_lost_file_is_written_again_with_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identities.json");
    let [a, b] = ["a", "b"].map(|node| open(&path, node, Timing::default()));
    for number in 0..10 {
        a.acquire(&app(number), OnOutage::Wait).await.unwrap();
        b.acquire(&app(number + 5), OnOutage::Wait).await.unwrap();
    }
    let mut watch = a.identities();
    let before = until(&mut watch, "all", |now| now.labels.len() == 15 + 9).await;
    std::fs::remove_file(&path).unwrap();
    let fresh = open(&path, "fresh", Timing::default());
    let mut fresh = fresh.identities();
    let after = until(&mut fresh, "all again", |now| now.labels.len() == 15 + 9).await;
    assert_eq!(before.labels, after.labels);
    assert_eq!(watch.borrow().labels, before.labels);
}

#[tokio::test]
async fn what_is_released_is_collected_and_what_is_announced_is_known_until_it_is_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identities.json");
    let timing = Timing {
        settle_seen: Duration::ZERO,
        settle_unseen: Duration::ZERO,
        collect_after: Duration::from_millis(300),
        look_period: Duration::from_millis(50),
        ..Timing::default()
    };
    let [a, b] = ["a", "b"].map(|node| open(&path, node, timing));
    let identity = a.acquire(&app(1), OnOutage::Wait).await.unwrap();
    assert_eq!(a.acquire(&app(1), OnOutage::Wait).await, Ok(identity));
    let (ip, node) = ("10.244.1.9".parse().unwrap(), "172.30.0.1".parse().unwrap());
    a.announce(7, identity, &[(ip, node)]);
    let mut addresses = b.addresses();
    let known = until(&mut addresses, "the address", |now| !now.0.is_empty()).await;
    let announced = &known.0[&"10.244.1.9/32".parse().unwrap()];
    assert_eq!((announced.identity, announced.node), (identity, node));
    assert_eq!(announced.owner, "a");
    a.withdraw(ip);
    until(&mut addresses, "no address", |now| now.0.is_empty()).await;

    let mut identities = b.identities();
    a.acquire(&app(9), OnOutage::Wait).await.unwrap();
    until(&mut identities, "another identity", |now| {
        has(now, &app(9)).is_some()
    })
    .await;
    a.release(&app(1));
    a.release(&app(9));
    until(&mut identities, "the collection of the other one", |now| {
        has(now, &app(9)).is_none()
    })
    .await;
    // It is in use again.
    assert_eq!(
        has(&identities.borrow_and_update(), &app(1)),
        Some(identity)
    );
    a.release(&app(1));
    until(&mut identities, "the collection", |now| {
        has(now, &app(1)).is_none()
    })
    .await;
    assert_ne!(b.acquire(&app(2), OnOutage::Wait).await, Ok(identity));
}

#[tokio::test]
async fn who_waits_no_more_holds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("identities.json");
    std::fs::write(&path, "rubbish").unwrap();
    let agent = open(&path, "n1", Timing::default());
    let labels = app(1);
    let given_up = agent.acquire(&labels, OnOutage::Wait);
    assert!(
        tokio::time::timeout(Duration::from_millis(1), given_up)
            .await
            .is_err()
    );
    std::fs::remove_file(&path).unwrap();
    agent.acquire(&app(2), OnOutage::Wait).await.unwrap();
    let held: Vec<_> = agent.held().borrow().keys().cloned().collect();
    assert_eq!(held, [Arc::new(app(2))]);
}
