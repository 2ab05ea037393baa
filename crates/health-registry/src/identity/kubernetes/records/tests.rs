use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::super::objects::{identity_kind, new_identity, slice_kind};
use super::*;

const SECOND: Duration = Duration::from_secs(1);
const SETTLE: Settle = Settle {
    seen: Duration::from_secs(10),
    unseen: Duration::from_secs(120),
};

fn records() -> Records {
    Records::new("me", SETTLE, SECOND * 3600)
}

fn set(label: &str) -> LabelSet {
    LabelSet::new([label.parse().unwrap()]).unwrap()
}

fn digest(label: &str) -> u64 {
    sets::short_digest_of(&set(label)).0
}

/// An object of this number, created and written at this revision.
fn object(number: u32, label: &str, revision: u8) -> IdentityObject {
    let mut object = new_identity(Identity(number), &set(label));
    let created = format!("2026-01-01T00:00:{revision:02}Z").parse().unwrap();
    object.metadata.uid = Some(format!("{number}@{revision}"));
    object.metadata.resource_version = Some(revision.to_string());
    object.metadata.creation_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(created),
    );
    object.into()
}

/// An object with these contents.
fn malformed(name: &str, spec: Value) -> IdentityObject {
    let data = json!({ "spec": spec });
    DynamicObject::new(name, &identity_kind()).data(data).into()
}

/// A slice with a reference to each number, and an address of labels `a=1` for it if that is asked for.
fn slice(name: &str, numbers: &[u32], has_addresses: bool) -> SliceObject {
    let entry = |number: &u32| match has_addresses {
        true => json!({
            "id": number, "identity": number, "labelsDigest": format!("{:016x}", digest("a=1")),
            "addresses": [{
                "ip": format!("10.0.{}.{}", number / 256, number % 256), "node": "172.30.0.2",
            }],
        }),
        false => json!({ "identity": number }),
    };
    let endpoints: Vec<_> = numbers.iter().map(entry).collect();
    let (node, _) = slice_key(name).unwrap();
    let spec = json!({ "node": node, "count": numbers.len(), "endpoints": endpoints });
    let data = json!({ "spec": spec });
    DynamicObject::new(name, &slice_kind()).data(data).into()
}

fn step(records: &Records, label: &str, held: Option<u32>) -> Step {
    records.step(&set(label), held.map(Identity), |_| false)
}

#[test]
fn agents_with_the_same_view_try_the_same_number_and_the_next_if_it_is_taken() {
    let mut records = records();
    let Step::Create(first) = step(&records, "a=1", None) else {
        panic!("a number");
    };
    assert_eq!(step(&self::records(), "a=1", None), Step::Create(first));
    records.put_identity(object(first.0, "b=1", 1), SECOND);
    let next = Identity(first.0 + 1);
    assert_eq!(step(&records, "a=1", None), Step::Create(next));
    records.put_identity(object(next.0, "a=1", 2), SECOND);
    assert_eq!(step(&records, "a=1", None), Step::Use(next));
    assert!(records.confirms(&set("a=1"), next));
}

#[test]
fn of_two_numbers_of_a_label_set_the_oldest_stands_everywhere() {
    let mut all = vec![object(300, "a=1", 9), object(301, "a=1", 3)];
    for _ in 0..2 {
        let mut records = records();
        records.replace_identities(all.clone(), SECOND);
        assert_eq!(step(&records, "a=1", Some(300)), Step::Use(Identity(301)));
        assert!(!records.confirms(&set("a=1"), Identity(300)));
        all.reverse();
    }
    // Among objects of the same second, the number that agents try first wins.
    let mut records = records();
    let first = first_try(&set("a=1")).0;
    records.put_identity(object(first + 1, "a=1", 3), SECOND);
    records.put_identity(object(first, "a=1", 3), SECOND);
    records.put_identity(object(256, "a=1", 3), SECOND);
    assert_eq!(step(&records, "a=1", None), Step::Use(Identity(first)));
}

#[test]
fn malformed_objects_are_named_give_nobody_an_identity_and_their_numbers_are_taken() {
    let mut records = records();
    let first = first_try(&set("a=1"));
    records.put_identity(
        malformed(&first.to_string(), json!({ "labels": 7 })),
        SECOND,
    );
    records.put_identity(malformed("hello", json!({ "labels": ["a=1"] })), SECOND);
    records.put_slice(slice("n-0", &[300], false), SECOND);
    let mut foreign = slice("n-1", &[300], false);
    foreign.name = "m-1".to_owned();
    (foreign.entries, foreign.problem) = (None, Some("not ours".to_owned()));
    records.put_slice(foreign, SECOND);
    assert_eq!(records.view.identities().count(), 0);
    let next = Identity(first.0 + 1);
    assert_eq!(step(&records, "a=1", None), Step::Create(next));
    let names: Vec<_> = records.rejected().into_iter().map(|one| one.key).collect();
    let number = format!("healthidentities/{first}");
    assert_eq!(
        names,
        [
            &number,
            "healthidentities/hello",
            "healthendpointslices/m-1"
        ]
    );
    records.delete_identity("hello", None, SECOND);
    records.delete_identity(&first.to_string(), None, SECOND);
    assert_eq!(records.rejected().len(), 1);
    records.expire(SECOND * 3601);
    assert_eq!(step(&records, "a=1", None), Step::Create(first));
}

#[test]
fn a_store_that_comes_back_empty_takes_nothing_away_at_once() {
    let mut records = records();
    records.replace_identities(vec![object(300, "a=1", 1)], SECOND);
    records.replace_slices(vec![slice("n-0", &[300], true)], SECOND);
    records.replace_identities(Vec::new(), SECOND * 2);
    records.replace_slices(Vec::new(), SECOND * 2);
    assert!(!records.expire(SECOND * 121));
    // Another agent that has the labels writes the same number, also if it never held it.
    assert_eq!(step(&records, "a=1", None), Step::Create(Identity(300)));
    assert_eq!(
        step(&records, "a=1", Some(400)),
        Step::Create(Identity(400))
    );
    records.put_identity(object(400, "a=1", 2), SECOND * 3);
    assert_eq!(step(&records, "a=1", Some(300)), Step::Use(Identity(400)));
    assert!(records.expire(SECOND * 122));
    assert!(!records.view.is_known(Identity(300)));
}

#[test]
fn an_event_that_comes_late_undoes_nothing() {
    let mut records = records();
    records.put_identity(object(300, "a=1", 5), SECOND);
    records.put_identity(object(300, "b=1", 3), SECOND);
    records.delete_identity("300", Some("300@3"), SECOND);
    assert_eq!(step(&records, "a=1", None), Step::Use(Identity(300)));
    records.delete_identity("300", Some("300@5"), SECOND);
    assert!(!records.confirms(&set("a=1"), Identity(300)));
}

#[test]
fn an_address_counts_only_while_its_number_means_the_same_here_as_on_its_node() {
    let mut records = records();
    let ip: ipnet::IpNet = "10.0.1.44/32".parse().unwrap();
    let identity = |records: &Records| Some(records.view.addresses().0.get(&ip)?.identity);
    records.put_slice(slice("n-0", &[300], true), SECOND);
    assert_eq!(identity(&records), None, "before the identity is known");
    records.put_identity(object(300, "a=1", 3), SECOND);
    assert_eq!(identity(&records), Some(Identity(300)));
    records.put_identity(object(300, "b=1", 5), SECOND);
    assert_eq!(identity(&records), None, "the number means other labels");
    records.replace_identities(vec![object(300, "a=1", 7)], SECOND);
    assert_eq!(identity(&records), Some(Identity(300)));
    // A lost identity keeps its meaning for as long as it is known.
    records.replace_identities(Vec::new(), SECOND);
    assert_eq!(identity(&records), Some(Identity(300)));
    records.expire(SECOND * 121);
    assert_eq!(identity(&records), None);
}

#[test]
fn a_slice_that_is_none_any_more_keeps_its_references_but_not_its_addresses() {
    let mut records = records();
    records.replace_slices(vec![slice("n-0", &[300], true)], SECOND);
    let mut newer = slice("n-0", &[], false);
    (newer.entries, newer.problem) = (None, Some("of a newer agent".to_owned()));
    records.put_slice(newer.clone(), SECOND * 2);
    records.replace_slices(vec![newer], SECOND * 3);
    assert!(records.view.is_referenced(Identity(300)));
    assert_eq!(records.rejected().len(), 1);
    records.put_slice(slice("n-0", &[], false), SECOND * 4);
    assert!(!records.view.is_referenced(Identity(300)));
    assert!(records.expire(SECOND * 14));
    assert_eq!(records.view.next_expiry(), None);
}

#[test]
fn a_freed_number_rests_before_another_label_set_has_it() {
    let mut records = records();
    let Step::Create(first) = step(&records, "a=1", None) else {
        panic!("a number");
    };
    records.put_identity(object(first.0, "b=1", 1), SECOND);
    records.delete_identity(&first.to_string(), None, SECOND * 2);
    records.expire(SECOND * 100);
    let next = Identity(first.0 + 1);
    assert_eq!(step(&records, "a=1", None), Step::Create(next));
    // A node that holds the number writes it again.
    assert_eq!(step(&records, "b=1", Some(first.0)), Step::Create(first));
    records.expire(SECOND * 3602);
    assert_eq!(step(&records, "a=1", None), Step::Create(first));
}

#[test]
fn an_address_stays_while_any_slice_of_the_node_has_it() {
    let mut records = records();
    records.put_slice(slice("n-0", &[300, 301], true), SECOND);
    records.put_slice(slice("n-1", &[300], true), SECOND);
    records.put_slice(slice("n-0", &[], true), SECOND);
    assert!(records.view.is_referenced(Identity(300)));
    assert!(!records.view.is_referenced(Identity(301)));
    records.delete_slice("n-1", None, SECOND * 2);
    assert!(!records.view.is_referenced(Identity(300)));
    assert!(records.expire(SECOND * 11));
    assert_eq!(records.view.next_expiry(), Some(SECOND * 12));
}

/// The steps of the collection, as `(number, is_deletion)`.
fn due(records: &Records, at: Duration, marked_for: i64) -> Vec<(u32, bool)> {
    let terms = CollectTerms {
        unreferenced: SECOND * 60,
        marked: SECOND * 600,
        turn: SECOND,
        order: &NodeOrder::new("me", &BTreeSet::new()),
        clock: Timestamp::UNIX_EPOCH + Duration::from_secs(marked_for.unsigned_abs()),
    };
    let due = records.unused(&terms, at);
    due.map(|one| (one.identity.0, one.is_deletion)).collect()
}

#[test]
fn only_what_was_long_unused_is_marked_and_only_what_was_long_marked_is_deleted() {
    let mut records = records();
    let all = vec![object(300, "a=1", 1), object(301, "b=1", 1)];
    records.replace_identities(all, Duration::ZERO);
    records.put_slice(slice("n-0", &[301], false), Duration::ZERO);
    records.put_identity(malformed("302", json!({})), Duration::ZERO);
    assert_eq!(due(&records, SECOND * 59, 0), []);
    assert_eq!(due(&records, SECOND * 60, 0), [(300, false)]);
    let mut marked = object(300, "a=1", 2);
    marked.unused_since = Some(Timestamp::UNIX_EPOCH);
    records.put_identity(marked, SECOND * 60);
    // Whatever time the mark names, this agent must have known the mark for half of the delay.
    assert_eq!(due(&records, SECOND * 359, 600), []);
    assert_eq!(due(&records, SECOND * 360, 599), []);
    assert_eq!(due(&records, SECOND * 360, 600), [(300, true)]);
    // A watch that starts again changes nothing.
    records.resume(SECOND, SECOND * 361);
    assert_eq!(due(&records, SECOND * 361, 600), [(300, true)]);
    // No node could use an identity while the store was away.
    records.resume(SECOND * 30, SECOND * 361);
    assert_eq!(due(&records, SECOND * 420, 600), []);
    // An agent that uses the identity removes the mark first.
    assert!(matches!(step(&records, "a=1", None), Step::Unmark(..)));
    assert!(!records.confirms(&set("a=1"), Identity(300)));
    records.put_identity(object(300, "a=1", 3), SECOND * 430);
    assert_eq!(due(&records, SECOND * 480, 600), []);
    assert_eq!(step(&records, "a=1", None), Step::Use(Identity(300)));
}

#[test]
fn a_mark_of_a_clock_that_is_fast_is_renewed() {
    let mut records = records();
    let mut marked = object(300, "a=1", 1);
    marked.unused_since = Some(Timestamp::UNIX_EPOCH + SECOND * 9000);
    records.put_identity(marked, Duration::ZERO);
    assert_eq!(due(&records, SECOND * 60, 8600), [(300, false)]);
    assert_eq!(due(&records, SECOND * 60, 8700), []);
}

#[test]
fn a_namespace_has_a_quarter_of_the_numbers_and_half_of_all_is_a_warning() {
    let of = |namespace: &str, number: u32| {
        let label = |text: String| text.parse().unwrap();
        let labels = [
            label(format!("k8s:{POD_NAMESPACE}={namespace}")),
            label(format!("k8s:app={number}")),
        ];
        let labels = LabelSet::new(labels).unwrap();
        IdentityObject::from(new_identity(Identity(number), &labels))
    };
    let mut records = records();
    let quarter = NUMBERS as u32 / 4;
    let all = (0..quarter).map(|number| of("shop", 256 + number));
    records.replace_identities(all.collect(), Duration::ZERO);
    // Seen a second time, an object counts once.
    records.put_identity(of("shop", 256), SECOND);
    let reason = records.check_share("shop").unwrap_err();
    assert!(reason.contains("namespace shop has 16320"), "{reason}");
    records.check_share("bank").unwrap();
    records.delete_identity("256", None, SECOND);
    records.check_share("shop").unwrap();
    for number in quarter..quarter * 2 {
        records.put_identity(of("bank", 256 + number), SECOND);
    }
    assert_eq!(records.crowding(), None);
    records.put_identity(of("shop", 256), SECOND);
    let warning = records.crowding().unwrap();
    assert!(warning.contains("32640 of 65280"), "{warning}");
}

#[test]
fn when_all_numbers_are_in_use_there_is_none() {
    let mut records = records();
    let all = (256..=65_535).map(|number| object(number, &format!("a={number}"), 1));
    records.replace_identities(all.collect(), Duration::ZERO);
    assert_eq!(step(&records, "b=1", None), Step::Exhausted);
    records.delete_identity("400", None, Duration::ZERO);
    assert!(records.expire(SECOND * 10));
    assert_eq!(step(&records, "b=1", None), Step::Exhausted);
    records.expire(SECOND * 3600);
    assert_eq!(step(&records, "b=1", None), Step::Create(Identity(400)));
}
