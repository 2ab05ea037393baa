//! The manager with the identities of a real store.

use std::fs;

use health_registry::identity::{IdentityAllocator, OnOutage, Timing};
use health_settings::RegistrySpec;

use super::*;
use crate::identities::AllocatedIdentities;

/// How long a test waits for an expected event, to allow for busy machines.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until the identities of exactly these labels are held, and returns them.
async fn held(allocator: &IdentityAllocator, labels: &[&LabelSet]) -> Vec<Identity> {
    let mut held = allocator.held();
    let is_so = |held: &Arc<HeldIdentities>| {
        let all = labels.iter().all(|labels| held.contains_key(*labels));
        all && held.len() == labels.len()
    };
    let found = tokio::time::timeout(PATIENCE, held.wait_for(is_so)).await;
    let found = found.expect("they are not held").unwrap().clone();
    labels.iter().map(|labels| found[*labels]).collect()
}

#[tokio::test]
async fn who_gives_back_one_number_gives_back_no_other_labels_hold() {
    let store = tempfile::tempdir().unwrap();
    let path = store.path().join("identities.json");
    let spec = RegistrySpec::File(path.clone());
    let allocator = IdentityAllocator::open(&spec, "default", "n1", Timing::default());
    let allocator = Arc::new(allocator.unwrap());
    // Acquire them first, so that the endpoint does not have to wait for the store.
    let [first, second] = ["app=a", "app=b"].map(|label| new(1, &[label]).labels);
    allocator.acquire(&first, OnOutage::Wait).await.unwrap();
    let bed = Bed::with_identities(
        Arc::new(World::with_namespaces()),
        tempfile::tempdir().unwrap(),
        Arc::new(AllocatedIdentities::by(allocator.clone())),
    );
    let bed = bed.await;
    let one = bed.create(1, &["app=a"]).await.unwrap();
    allocator.release(&first);

    // The store gives the endpoint's number to other labels; the programs keep using the number until they are rebuilt.
    bed.world.may_build.send_replace(false);
    let document = fs::read_to_string(&path).unwrap();
    let other = store.path().join("other");
    fs::write(&other, document.replace("unspec:app=a", "unspec:app=b")).unwrap();
    fs::rename(&other, &path).unwrap();
    let mut changes = allocator.held();
    let has_changed = changes.wait_for(|held| held[&first].0 != one.identity);
    let has_changed = tokio::time::timeout(PATIENCE, has_changed).await;
    let renumbered = has_changed.expect("no other number").unwrap()[&first];
    let manager = bed.manager.clone();
    let creating = tokio::spawn(async move { manager.create(new(2, &["app=b"])).await });
    let has_number = |table: &mut Table| {
        let mut entries = table.entries.values();
        let two = entries.find(|entry| entry.saved.labels == second)?;
        (two.saved.identity.0 == one.identity).then_some(())
    };
    bed.manager.wait_until(has_number).await;
    bed.world.may_build.send_replace(true);
    let two = creating.await.unwrap().unwrap();
    assert_eq!(two.identity, one.identity);
    assert_eq!(bed.ready(one.id).await.identity, renumbered.0);
    held(&allocator, &[&first, &second]).await;

    bed.manager.delete(&Selector::Id(two.id)).await.unwrap();
    assert_eq!(held(&allocator, &[&first]).await, [renumbered]);
    bed.manager.delete(&Selector::Id(one.id)).await.unwrap();
    assert_eq!(held(&allocator, &[]).await, []);
}
