//! Identities in etcd: nodes that race for them agree, and no wrong identity is assigned after an outage of the store,
//! a loss of leases or a loss of all its data.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{Identities, IdentityAllocator, IdentityError, OnOutage, Timing};
use health_settings::RegistrySpec;
use tests::bed::Etcd;
use tests::{Bed, PATIENCE};
use tokio::sync::watch;

const SERVER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
const PREFIX: &str = "/health-agent/identities/v1/default/";

/// Timing short enough for a test to see what takes an agent minutes.
fn hasty() -> Timing {
    Timing {
        lease: Duration::from_secs(3),
        settle_seen: Duration::from_secs(1),
        collect_after: Duration::from_secs(2),
        look_period: Duration::from_millis(200),
        ..Timing::default()
    }
}

pub(crate) fn app(number: usize) -> LabelSet {
    let label = format!("k8s:app=a{number}").parse();
    LabelSet::new([label.expect("a label")]).expect("a set")
}

fn open(node: &str, timing: Timing) -> anyhow::Result<Arc<IdentityAllocator>> {
    let store: RegistrySpec = format!("etcd:http://{SERVER}:2379").parse()?;
    let opened = IdentityAllocator::open(&store, "default", node, timing)?;
    Ok(Arc::new(opened))
}

/// Runs a test on a node that has no agent but can reach etcd.
fn with_etcd<F: Future<Output = anyhow::Result<()>>>(
    test: impl FnOnce(Etcd) -> F + Send,
) -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let etcd = Etcd::start(&bed, SERVER, "")?;
    bed.node(1).run_in(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(test(etcd))
    })?
}

/// Announces an address of the endpoint 9.
pub(crate) fn announce(
    agent: &IdentityAllocator,
    address: &str,
    identity: Identity,
) -> anyhow::Result<()> {
    let addresses = [(address.parse()?, "172.30.0.1".parse()?)];
    agent.announce(9, identity, &addresses);
    Ok(())
}

pub(crate) async fn until<T>(
    watch: &mut watch::Receiver<Arc<T>>,
    what: &str,
    is_it: impl Fn(&T) -> bool,
) -> anyhow::Result<Arc<T>> {
    let found = tokio::time::timeout(PATIENCE, watch.wait_for(|now| is_it(now))).await;
    let found = found.map_err(|_| anyhow::anyhow!("{what} did not come about"))??;
    Ok(found.clone())
}

pub(crate) fn has(identities: &Identities, labels: &LabelSet) -> Option<Identity> {
    let mut known = identities.labels.iter();
    known
        .find(|(_, known)| ***known == *labels)
        .map(|(identity, _)| *identity)
}

/// Number of known cluster identities.
pub(crate) fn count(identities: &Identities) -> usize {
    let of_cluster = identities.labels.keys().filter(|id| id.is_of_cluster());
    of_cluster.count()
}

pub(crate) async fn acquire_all(
    allocators: &[Arc<IdentityAllocator>],
    sets: usize,
) -> anyhow::Result<BTreeMap<usize, Identity>> {
    let mut tasks = tokio::task::JoinSet::new();
    for (i, allocator) in allocators.iter().enumerate() {
        for j in 0..sets {
            // The two tasks meet in the middle.
            let number = if i % 2 == 0 { j } else { sets - 1 - j };
            let allocator = allocator.clone();
            tasks.spawn(async move {
                let acquired = allocator.acquire(&app(number), OnOutage::Wait).await;
                acquired.map(|identity| (number, identity))
            });
        }
    }
    let mut numbers = BTreeMap::new();
    while let Some(acquired) = tasks.join_next().await {
        let (number, identity) = acquired??;
        assert_eq!(*numbers.entry(number).or_insert(identity), identity);
    }
    let distinct: BTreeSet<_> = numbers.values().collect();
    assert_eq!((numbers.len(), distinct.len()), (sets, sets));
    Ok(numbers)
}

#[test]
#[ignore = "needs root"]
fn two_nodes_that_race_agree_and_an_outage_takes_nothing_from_them() -> anyhow::Result<()> {
    const SETS: usize = 200;
    with_etcd(async |mut etcd| {
        let nodes = [open("a", Timing::default())?, open("b", Timing::default())?];
        let began = std::time::Instant::now();
        acquire_all(&nodes, SETS).await?;
        println!("{SETS} sets on two nodes took {:?}", began.elapsed());
        let mut watch = nodes[0].identities();
        let before = until(&mut watch, "all of them", |now| {
            let both = |nodes: &&Vec<String>| nodes.len() == 2;
            now.references.values().filter(both).count() == SETS
        });
        let before = before.await?;

        etcd.kill()?;
        until(&mut watch, "the outage", |now| now.stale.is_some()).await?;
        assert_eq!(watch.borrow().labels, before.labels);
        let refused = nodes[0].acquire(&app(SETS), OnOutage::Fail).await;
        assert!(
            matches!(refused, Err(IdentityError::Unavailable { .. })),
            "{refused:?}"
        );
        announce(&nodes[1], "10.244.2.9", Identity::INIT)?;
        let waiting = tokio::spawn({
            let node = nodes[0].clone();
            async move { node.acquire(&app(SETS), OnOutage::Wait).await }
        });
        etcd.restart()?;
        waiting.await??;
        until(&mut watch, "the return", |now| {
            now.stale.is_none() && count(now) == SETS + 1
        })
        .await?;
        let mut addresses = nodes[0].addresses();
        until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
        for (identity, labels) in before.labels.iter() {
            assert_eq!(watch.borrow().labels.get(identity), Some(labels));
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_a_wiped_store_lost_is_written_again_with_the_same_numbers() -> anyhow::Result<()> {
    with_etcd(async |etcd| {
        let nodes = [open("a", Timing::default())?, open("b", Timing::default())?];
        let numbers = acquire_all(&nodes, 20).await?;
        announce(&nodes[0], "10.244.1.9", numbers[&0])?;
        let mut addresses = nodes[1].addresses();
        until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
        for loss in ["references/", "numbers/", "labels/", "addresses/", ""] {
            if loss == "references/" {
                assert_eq!(etcd.revoke_leases()?, nodes.len());
            }
            etcd.ctl(&format!("del --prefix {PREFIX}{loss}"))?
                .success()?;
            // References of both nodes to all identities, two keys for each set, and one address.
            let whole = 20 * 2 + 20 * 2 + 1;
            let began = std::time::Instant::now();
            while etcd.keys(PREFIX)?.len() < whole {
                anyhow::ensure!(began.elapsed() < PATIENCE, "{loss} is not back");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let fresh = open("fresh", Timing::default())?;
            let mut watch = fresh.identities();
            let again = until(&mut watch, "all again", |now| count(now) == 20).await?;
            for (number, identity) in &numbers {
                assert_eq!(has(&again, &app(*number)), Some(*identity), "{loss}");
            }
            assert!(again.rejected.is_empty(), "{:?}", again.rejected);
            assert_eq!(addresses.borrow_and_update().0.len(), 1);
            assert_eq!(nodes[0].held().borrow().len(), 20);
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_only_a_dead_node_used_is_collected_and_its_addresses_go() -> anyhow::Result<()> {
    with_etcd(async |etcd| {
        let [dead, alive] = [open("dead", hasty())?, open("alive", hasty())?];
        let numbers = acquire_all(std::slice::from_ref(&dead), 3).await?;
        assert_eq!(alive.acquire(&app(0), OnOutage::Wait).await?, numbers[&0]);
        announce(&dead, "10.244.1.9", numbers[&0])?;
        let mut addresses = alive.addresses();
        until(&mut addresses, "the address", |now| now.0.len() == 1).await?;
        drop(dead);
        until(&mut addresses, "its end", |now| now.0.is_empty()).await?;
        let mut watch = alive.identities();
        let left = until(&mut watch, "the collection", |now| count(now) == 1).await?;
        assert_eq!(has(&left, &app(0)), Some(numbers[&0]));
        let freed = etcd.keys(&format!("{PREFIX}freed/"))?;
        assert_eq!(freed.len(), 2, "{freed:?}");
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_collected_costs_nothing_and_keeps_no_other_from_it() -> anyhow::Result<()> {
    // More identities than one pass collects, with numbers below the others.
    const HALVES: u32 = 70;
    with_etcd(async |etcd| {
        for n in 0..HALVES {
            let key = format!("{PREFIX}numbers/{}", 256 + n);
            etcd.put(&key, &format!(r#"["k8s:half=h{n}"]"#))?;
        }
        let dead = open("dead", hasty())?;
        let numbers = acquire_all(std::slice::from_ref(&dead), 5).await?;
        for key in etcd.keys(&format!("{PREFIX}labels/"))?.iter().take(2) {
            etcd.put(key, "rubbish")?;
        }
        drop(dead);
        let alive = open("alive", hasty())?;
        let mut watch = alive.identities();
        until(&mut watch, "the collection", |now| {
            let left = now.labels.keys().filter(|id| id.is_of_cluster());
            let left: Vec<_> = left.collect();
            left.len() == 2 && left.iter().all(|id| numbers.values().any(|one| one == *id))
        })
        .await?;
        // What remains stays unchanged, and no lease is requested for it.
        let leases = || -> anyhow::Result<usize> {
            let listed = etcd.ctl("lease list")?.success()?;
            Ok(listed.lines().count())
        };
        let before = leases()?;
        tokio::time::sleep(hasty().look_period * 10).await;
        assert_eq!(leases()?, before);
        assert_eq!(count(&watch.borrow()), 2);
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_was_just_taken_up_is_never_collected() -> anyhow::Result<()> {
    with_etcd(async |etcd| {
        // Both collect everything unused at once.
        let timing = Timing {
            settle_seen: Duration::ZERO,
            collect_after: Duration::ZERO,
            look_period: Duration::from_millis(5),
            ..Timing::default()
        };
        let nodes = [open("a", timing)?, open("b", timing)?];
        for round in 0..60 {
            let node = &nodes[round % 2];
            let labels = app(round % 3);
            let identity = node.acquire(&labels, OnOutage::Wait).await?;
            let standing = etcd.keys(&format!("{PREFIX}numbers/{identity}"))?;
            assert_eq!(standing.len(), 1, "{identity} was collected in use");
            node.release(&labels);
        }
        let collected = async {
            while !etcd.keys(&format!("{PREFIX}labels/"))?.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(PATIENCE, collected)
            .await
            .context("something is never collected")??;
        let mut watch = nodes[0].identities();
        until(&mut watch, "the collection of all", |now| count(now) == 0).await?;
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn foreign_keys_are_named_and_give_nobody_an_identity() -> anyhow::Result<()> {
    with_etcd(async |etcd| {
        let node = open("a", Timing::default())?;
        let mine = node.acquire(&app(0), OnOutage::Wait).await?;
        let digest = etcd.keys(&format!("{PREFIX}labels/"))?.remove(0);
        let other = open("b", Timing::default())?;
        let foreign = [
            ("numbers/300", r#"["reserved:host"]"#),
            ("numbers/1", r#"["k8s:app=x"]"#),
            ("numbers/301", "\u{0}\u{1}"),
            ("labels/00", "rubbish"),
            (
                "addresses/x/10.0.0.1",
                r#"{"identity":1,"node":"10.0.0.1","session":"1"}"#,
            ),
            ("something", "else"),
        ];
        for (key, value) in foreign {
            etcd.put(&format!("{PREFIX}{key}"), value)?;
        }
        let mut watch = node.identities();
        let reported = until(&mut watch, "all to be named", |now| {
            now.rejected.len() == foreign.len()
        });
        let reported = reported.await?;
        for (key, _) in foreign {
            let key = format!("{PREFIX}{key}");
            assert!(reported.rejected.iter().any(|one| one.key == key), "{key}");
        }
        assert_eq!(count(&reported), 1);
        assert!(node.addresses().borrow().0.is_empty());

        // A set that claims the number of another set.
        let taken = other.acquire(&app(1), OnOutage::Wait).await?;
        assert_ne!(taken, mine);
        let third = open("c", Timing::default())?;
        etcd.put(&digest, &taken.to_string())?;
        let refused = third.acquire(&app(0), OnOutage::Wait).await;
        let Err(IdentityError::Corrupt { key, .. }) = &refused else {
            anyhow::bail!("{refused:?}");
        };
        assert_eq!(*key, digest);
        assert_eq!(node.held().borrow().values().copied().next(), Some(mine));
        Ok(())
    })
}
