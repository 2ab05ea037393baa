//! The contents of the identities and slices of a cluster. No connection and no clock: receives objects and times;
//! returns a view, and the next step towards a number for a label set.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::identity::{CLUSTER_FIRST, CLUSTER_LAST};
use health_model::identity::Identity;
use health_model::labels::pod::{K8S, POD_NAMESPACE};
use health_model::labels::{Label, LabelSet};
use jiff::Timestamp;

use super::super::AddressAnnouncement;
use super::super::sets::{self, NUMBERS};
use super::super::view::{LabelsDigest, MOST_REJECTED, Settle, View};
use super::collector::{CollectTerms, Collection, NodeOrder};
use super::objects::{
    Entries, Entry, IdentityObject, ObjectVersion, SliceKey, SliceObject, number, slice_key,
};
use crate::nodes::UnusableEntry;

/// Maximum number of identities of one namespace. More are refused.
const SHARE_OF_NAMESPACE: usize = NUMBERS / 4;
/// Number of identities from which on there is a warning.
const CROWDED: usize = NUMBERS / 2;
/// A mark further in the future than this comes from a wrong clock.
const CLOCK_SKEW: Duration = Duration::from_secs(300);
/// After an interruption of at least this length, it is unknown which identities were used meanwhile.
const LONG_INTERRUPTION: Duration = Duration::from_secs(30);

/// The contents of the store. Times count from any fixed moment.
#[derive(Debug)]
pub(super) struct Records {
    /// This node's name.
    node: String,
    pub(super) view: View,
    /// The numbers in the store, readable or not.
    numbers: BTreeMap<Identity, Number>,
    /// The numbers of label sets: usually one, more after a race.
    by_labels: BTreeMap<Arc<LabelSet>, BTreeSet<Identity>>,
    /// How many numbers the label sets of each namespace have.
    by_namespace: BTreeMap<String, usize>,
    /// The last numbers of label sets that no longer have them, while the view still knows these numbers.
    former: BTreeMap<Arc<LabelSet>, Identity>,
    /// When numbers were last seen to disappear. They rest for a while before another label set may have them.
    freed: BTreeMap<Identity, Duration>,
    rest: Duration,
    slices: BTreeMap<SliceKey, Slice>,
    /// Number of announcements so far, which orders them.
    announcements: u64,
    /// Unusable objects: why, by name.
    rejected_identities: BTreeMap<String, String>,
    rejected_slices: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Number {
    version: ObjectVersion,
    created: Option<Timestamp>,
    /// `None` if the label set cannot be read.
    labels: Option<Arc<LabelSet>>,
    /// The mark.
    unused_since: Option<Timestamp>,
    /// Since when this agent knows of the mark.
    marked_since: Option<Duration>,
    /// Since when no reference to the number has been seen.
    unreferenced_since: Option<Duration>,
}

#[derive(Debug, Default)]
struct Slice {
    version: ObjectVersion,
    entries: Entries,
    /// The identities of entries that cannot be read.
    unread: BTreeSet<Identity>,
    /// Whether all of it can be read.
    is_whole: bool,
    has_owner: bool,
}

impl Slice {
    /// Reads an object. One that is no slice still refers to what it referred to before.
    fn new(object: SliceObject, before: Option<&Self>) -> Self {
        let mut unread = object.unread;
        if object.entries.is_none() {
            unread.extend(before.into_iter().flat_map(Self::references));
        }
        Self {
            version: object.version,
            entries: object.entries.unwrap_or_default(),
            unread,
            is_whole: object.problem.is_none(),
            has_owner: object.has_owner,
        }
    }

    /// The identities that the slice refers to.
    fn references(&self) -> impl Iterator<Item = Identity> {
        let entries = self.entries.values().map(|entry| entry.identity);
        entries.chain(self.unread.iter().copied())
    }
}

/// The next step towards a number for a label set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The label set has this number.
    Use(Identity),
    /// The label set has this number, which is marked as unused. Remove the mark first.
    Unmark(Identity, ObjectVersion),
    /// Give this number to the label set.
    Create(Identity),
    /// All numbers are taken.
    Exhausted,
}

impl Records {
    /// `rest` is how long a number is not given to another label set after it was freed.
    pub(super) fn new(node: &str, settle: Settle, rest: Duration) -> Self {
        Self {
            node: node.to_owned(),
            view: View::new(settle),
            numbers: BTreeMap::new(),
            by_labels: BTreeMap::new(),
            by_namespace: BTreeMap::new(),
            former: BTreeMap::new(),
            freed: BTreeMap::new(),
            rest,
            slices: BTreeMap::new(),
            announcements: 0,
            rejected_identities: BTreeMap::new(),
            rejected_slices: BTreeMap::new(),
        }
    }

    /// Replaces all identities after a listing.
    pub(super) fn replace_identities(&mut self, objects: Vec<IdentityObject>, now: Duration) {
        let numbers = objects.iter().filter_map(|object| object.identity.ok());
        let numbers: BTreeSet<Identity> = numbers.collect();
        let gone = self.numbers.keys().filter(|one| !numbers.contains(one));
        self.freed.extend(gone.map(|one| (*one, now)));
        self.view.retain_identities(&numbers, now);
        for (labels, numbers) in std::mem::take(&mut self.by_labels) {
            self.former
                .extend(numbers.first().map(|first| (labels, *first)));
        }
        self.numbers.clear();
        self.by_namespace.clear();
        self.rejected_identities.clear();
        for object in objects {
            self.put_identity(object, now);
        }
        self.view.resume(now);
    }

    /// Replaces all slices after a listing.
    pub(super) fn replace_slices(&mut self, mut objects: Vec<SliceObject>, now: Duration) {
        let mut addresses = BTreeSet::new();
        for object in &objects {
            if let (Some((node, _)), Some(entries)) = (slice_key(&object.name), &object.entries) {
                let of_slice = entries.values().flat_map(|entry| entry.addresses.keys());
                addresses.extend(of_slice.map(|ip| (*ip, node.clone())));
            }
        }
        self.view.retain_addresses(&addresses, now);
        let before = std::mem::take(&mut self.slices);
        self.rejected_slices.clear();
        for number in self.numbers.values_mut() {
            number.unreferenced_since.get_or_insert(now);
        }
        // Announcements in the order in which the objects were last written.
        objects.sort_by_key(|object| object.version.order());
        for object in objects {
            let before = slice_key(&object.name).and_then(|key| before.get(&key));
            self.put_slice_after(object, before, now);
        }
        self.view.resume(now);
    }

    /// Records a new or changed identity, unless a later version is known, whose revision is then returned.
    pub(super) fn put_identity(&mut self, object: IdentityObject, now: Duration) -> Option<u64> {
        let identity = match object.identity {
            Ok(identity) => identity,
            Err(reason) => {
                self.rejected_identities
                    .insert(object.name, reason.to_owned());
                return None;
            }
        };
        let known = self.numbers.get(&identity);
        let is_later = |known: &&Number| object.version.precedes(&known.version);
        if let Some(later) = known.filter(is_later) {
            return Some(later.version.order());
        }
        let (labels, refusal) = match object.labels {
            Ok(labels) => (Some(labels), None),
            Err(reason) => (None, Some(reason)),
        };
        if known.is_some_and(|known| known.labels != labels) {
            self.lose_number(identity);
        }
        match refusal {
            Some(reason) => self.rejected_identities.insert(object.name, reason),
            None => self.rejected_identities.remove(&object.name),
        };
        if let Some(labels) = &labels {
            let numbers = self.by_labels.entry(labels.clone()).or_default();
            if numbers.insert(identity)
                && let Some(namespace) = namespace_of(labels)
            {
                *self.by_namespace.entry(namespace.to_owned()).or_default() += 1;
            }
            self.former.remove(labels);
            let digest = sets::short_digest_of(labels);
            self.view
                .put_identity(identity, labels.clone(), Some(digest));
        }
        self.freed.remove(&identity);
        // A removed mark says that an agent uses the identity, even if no slice refers to it yet.
        let before = self.numbers.get(&identity);
        let before =
            before.filter(|before| before.unused_since.is_none() || object.unused_since.is_some());
        let unreferenced_since = match self.view.is_referenced(identity) {
            true => None,
            false => before
                .and_then(|before| before.unreferenced_since)
                .or(Some(now)),
        };
        let marked_since = object.unused_since.map(|_| {
            let known = before.and_then(|before| before.marked_since);
            known.unwrap_or(now)
        });
        let number = Number {
            version: object.version,
            created: object.created,
            labels,
            unused_since: object.unused_since,
            marked_since,
            unreferenced_since,
        };
        self.numbers.insert(identity, number);
        None
    }

    /// Records that an identity was deleted, unless a later one has its number. `uid` names the deleted one; without
    /// it, the number is certainly free.
    pub(super) fn delete_identity(&mut self, name: &str, uid: Option<&str>, now: Duration) {
        let Ok(identity) = number(name) else {
            self.rejected_identities.remove(name);
            return;
        };
        let is_other = |known: &Number| uid.is_some_and(|uid| uid != known.version.uid);
        if self.numbers.get(&identity).is_some_and(is_other) {
            return;
        }
        self.rejected_identities.remove(name);
        self.lose_number(identity);
        if self.numbers.remove(&identity).is_some() {
            self.freed.insert(identity, now);
        }
        self.view.remove_identity(identity, now);
    }

    /// Checks whether a namespace may have one more number. Fails with the reason if not.
    pub(super) fn check_share(&self, namespace: &str) -> Result<(), String> {
        let count = self.by_namespace.get(namespace).copied().unwrap_or(0);
        match count < SHARE_OF_NAMESPACE {
            true => Ok(()),
            false => Err(format!(
                "namespace {namespace} has {count} of {NUMBERS} identities, used or not collected yet"
            )),
        }
    }

    /// Returns a warning if many numbers are taken.
    pub(super) fn crowding(&self) -> Option<String> {
        let count = self.numbers.len();
        (count >= CROWDED).then(|| {
            let most = self.by_namespace.iter().max_by_key(|(_, count)| **count);
            let most = most.map(|(name, count)| format!(", {count} by namespace {name}"));
            let most = most.unwrap_or_default();
            format!("{count} of {NUMBERS} identities are taken{most}")
        })
    }

    /// The known version of a number's object.
    pub(super) fn version(&self, identity: Identity) -> Option<&ObjectVersion> {
        Some(&self.numbers.get(&identity)?.version)
    }

    /// Whether a number was seen to disappear at `since` or later, and nothing has it now.
    pub(super) fn was_freed_since(&self, identity: Identity, since: Duration) -> bool {
        self.freed
            .get(&identity)
            .is_some_and(|freed| *freed >= since)
    }

    /// Takes the number from the label set that has it.
    fn lose_number(&mut self, identity: Identity) {
        let number = self.numbers.get_mut(&identity);
        let Some(labels) = number.and_then(|number| number.labels.take()) else {
            return;
        };
        if let Some(numbers) = self.by_labels.get_mut(&labels) {
            if numbers.remove(&identity)
                && let Some(count) =
                    namespace_of(&labels).and_then(|name| self.by_namespace.get_mut(name))
            {
                *count -= 1;
            }
            if numbers.is_empty() {
                self.by_labels.remove(&labels);
                self.former.insert(labels, identity);
            }
        }
    }

    /// Records a new or changed slice, unless a later version is known, whose revision is then returned.
    pub(super) fn put_slice(&mut self, object: SliceObject, now: Duration) -> Option<u64> {
        self.put_slice_after(object, None, now)
    }

    /// Like [`Self::put_slice`]. `listed_before` is the slice's last contents if a listing replaces them.
    fn put_slice_after(
        &mut self,
        mut object: SliceObject,
        listed_before: Option<&Slice>,
        now: Duration,
    ) -> Option<u64> {
        let name = std::mem::take(&mut object.name);
        let Some(key) = slice_key(&name) else {
            let reason = object.problem.unwrap_or_default();
            self.rejected_slices.insert(name, reason);
            return None;
        };
        let known = self.slices.get(&key);
        let is_later = |known: &&Slice| object.version.precedes(&known.version);
        if let Some(later) = known.filter(is_later) {
            return Some(later.version.order());
        }
        match &object.problem {
            Some(reason) => self.rejected_slices.insert(name, reason.clone()),
            None => self.rejected_slices.remove(&name),
        };
        let slice = Slice::new(object, known.or(listed_before));
        let before = self.slices.insert(key.clone(), slice).unwrap_or_default();
        self.follow_slice(&key, &before, now);
        None
    }

    /// Records that a slice was deleted, unless a later one has its name. `uid` names the deleted one.
    pub(super) fn delete_slice(&mut self, name: &str, uid: Option<&str>, now: Duration) {
        self.rejected_slices.remove(name);
        let Some(key) = slice_key(name) else { return };
        let is_other = |known: &Slice| uid.is_some_and(|uid| uid != known.version.uid);
        if self.slices.get(&key).is_none_or(is_other) {
            return;
        }
        if let Some(before) = self.slices.remove(&key) {
            self.follow_slice(&key, &before, now);
        }
    }

    /// Brings the view up to date after a slice changed.
    fn follow_slice(&mut self, key: &SliceKey, before: &Slice, now: Duration) {
        let node = &key.0;
        let slice = self.slices.get(key);
        let referenced: BTreeSet<Identity> =
            slice.into_iter().flat_map(Slice::references).collect();
        let announced = slice.map(|slice| announcements(&slice.entries));
        let former = announcements(&before.entries);
        for identity in referenced {
            self.view.put_reference(identity, node);
            if let Some(number) = self.numbers.get_mut(&identity) {
                number.unreferenced_since = None;
            }
        }
        for (ip, announced) in announced.unwrap_or_default() {
            if former.get(&ip) == Some(&announced) {
                continue;
            }
            let (identity, digest, address) = announced;
            self.announcements += 1;
            let announcement = AddressAnnouncement {
                identity,
                node: address,
                owner: node.clone(),
            };
            self.view
                .put_address(ip, self.announcements, announcement, digest);
        }
        let of_node = || self.slices_of(node).map(|(_, slice)| slice);
        let identities: BTreeSet<Identity> = of_node().flat_map(Slice::references).collect();
        let addresses = of_node().flat_map(|slice| slice.entries.values());
        let addresses = addresses.flat_map(|entry| entry.addresses.keys());
        let addresses: BTreeSet<IpAddr> = addresses.copied().collect();
        for ip in former.keys().filter(|ip| !addresses.contains(ip)) {
            self.view.remove_address(*ip, node, now);
        }
        for identity in before.references().filter(|one| !identities.contains(one)) {
            self.view.remove_reference(identity, node);
            if !self.view.is_referenced(identity)
                && let Some(number) = self.numbers.get_mut(&identity)
            {
                number.unreferenced_since.get_or_insert(now);
            }
        }
    }

    /// Notes that the store is back after an interruption. After a long one, unused identities count as
    /// unused only from now on: other nodes may have been unable to write, too.
    pub(super) fn resume(&mut self, interruption: Duration, now: Duration) {
        self.view.resume(now);
        if interruption < LONG_INTERRUPTION {
            return;
        }
        for number in self.numbers.values_mut() {
            number.unreferenced_since = number.unreferenced_since.map(|_| now);
        }
    }

    /// Drops expired entries. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        let rest = self.rest;
        self.freed.retain(|_, freed| now < *freed + rest);
        let has_expired = self.view.expire(now);
        if has_expired {
            let view = &self.view;
            self.former
                .retain(|labels, identity| view.labels(*identity) == Some(labels));
        }
        has_expired
    }

    /// Returns the unusable objects.
    pub(super) fn rejected(&self) -> Vec<UnusableEntry> {
        let entry = |kind: &str, name: &str, reason: &String| UnusableEntry {
            key: format!("{kind}/{name}"),
            reason: reason.clone(),
        };
        let identities = self.rejected_identities.iter();
        let slices = self.rejected_slices.iter();
        identities
            .map(|(name, reason)| entry("healthidentities", name, reason))
            .chain(slices.map(|(name, reason)| entry("healthendpointslices", name, reason)))
            .take(MOST_REJECTED)
            .collect()
    }

    /// Returns the number of a label set. If a race left several, all agents choose the oldest object and, among
    /// objects of the same second, the first in the order in which agents try numbers.
    fn number_of(&self, labels: &LabelSet) -> Option<(Identity, &Number)> {
        let numbers = self.by_labels.get(labels)?;
        let mut known = numbers
            .iter()
            .filter_map(|identity| Some((*identity, self.numbers.get(identity)?)));
        if numbers.len() == 1 {
            return known.next();
        }
        let first = first_try(labels);
        let rank = |identity: Identity| (identity.0 + NUMBERS as u32 - first.0) % NUMBERS as u32;
        known.min_by_key(|(identity, number)| {
            let created = number.created.unwrap_or(Timestamp::MAX);
            (created, rank(*identity))
        })
    }

    /// Whether the store has this number for a label set, unmarked.
    pub(super) fn confirms(&self, labels: &LabelSet, identity: Identity) -> bool {
        self.number_of(labels)
            .is_some_and(|(known, number)| known == identity && number.unused_since.is_none())
    }

    /// Returns the next step towards a number for a label set. `held` is the set's number on this node, if any. Numbers
    /// for which `is_taken` is true are not tried.
    pub(super) fn step(
        &self,
        labels: &LabelSet,
        held: Option<Identity>,
        is_taken: impl Fn(Identity) -> bool,
    ) -> Step {
        if let Some((identity, number)) = self.number_of(labels) {
            return match number.unused_since {
                None => Step::Use(identity),
                Some(_) => Step::Unmark(identity, number.version.clone()),
            };
        }
        let is_in_store = |identity: &Identity| self.numbers.contains_key(identity);
        // If the store lost the number, its holders may be about to write it again.
        let former = self.former.get(labels).copied();
        let preferred = held.or(former);
        let preferred = preferred.filter(|one| !is_in_store(one) && !is_taken(*one));
        let first = first_try(labels).0;
        let mut tries = (first..=CLUSTER_LAST).chain(CLUSTER_FIRST..first);
        let free = || {
            let is_known = |one: &Identity| is_in_store(one) || self.view.is_known(*one);
            let is_free =
                |one: &Identity| !is_known(one) && !self.freed.contains_key(one) && !is_taken(*one);
            tries.by_ref().map(Identity).find(is_free)
        };
        match preferred.or_else(free) {
            Some(identity) => Step::Create(identity),
            None => Step::Exhausted,
        }
    }

    /// The number of nodes with endpoints.
    pub(super) fn count_nodes(&self) -> usize {
        let nodes: BTreeSet<&str> = self.slices.keys().map(|(node, _)| node.as_str()).collect();
        nodes.len()
    }

    /// Returns the order of this node among the nodes with endpoints.
    pub(super) fn node_order(&self) -> NodeOrder {
        let nodes = self.slices.keys().map(|(node, _)| node.as_str()).collect();
        NodeOrder::new(&self.node, &nodes)
    }

    /// Returns the steps of the collection of unused identities that are due on this node. Objects that cannot be read
    /// stay.
    pub(super) fn unused(
        &self,
        terms: &CollectTerms<'_>,
        now: Duration,
    ) -> impl Iterator<Item = Collection> {
        self.numbers.iter().filter_map(move |(identity, number)| {
            number.labels.as_ref()?;
            let age = now.saturating_sub(number.unreferenced_since?);
            if age < terms.unreferenced {
                return None;
            }
            let is_deletion = match number.unused_since {
                Some(since) if since <= terms.clock + CLOCK_SKEW => {
                    let marked = Duration::try_from(terms.clock.duration_since(since)).ok()?;
                    // No clock but this agent's own shows that others had time to object.
                    let known = now.saturating_sub(number.marked_since?);
                    if marked < terms.marked || known < terms.marked / 2 {
                        return None;
                    }
                    true
                }
                // A mark in the future would last until then, so it is renewed.
                _ => false,
            };
            let patience = terms.turn.saturating_mul(terms.order.place(*identity));
            (age >= terms.unreferenced + patience).then(|| Collection {
                identity: *identity,
                version: number.version.clone(),
                is_deletion,
            })
        })
    }

    /// The indices and entries of this node's slices.
    pub(super) fn own_slices(&self) -> impl Iterator<Item = (u32, &Entries)> {
        let own = self.slices_of(&self.node);
        own.map(|(index, slice)| (index, &slice.entries))
    }

    /// The indices of this node's slices of which a part cannot be read.
    pub(super) fn own_faulty_slices(&self) -> impl Iterator<Item = u32> {
        let own = self.slices_of(&self.node);
        own.filter_map(|(index, slice)| (!slice.is_whole).then_some(index))
    }

    /// The indices of this node's slices that Kubernetes does not delete with the node.
    pub(super) fn own_unowned_slices(&self) -> impl Iterator<Item = u32> {
        let own = self.slices_of(&self.node);
        own.filter_map(|(index, slice)| (!slice.has_owner).then_some(index))
    }

    fn slices_of(&self, node: &str) -> impl Iterator<Item = (u32, &Slice)> {
        let keys = (node.to_owned(), 0)..=(node.to_owned(), u32::MAX);
        let slices = self.slices.range(keys);
        slices.map(|((_, index), slice)| (*index, slice))
    }
}

/// The namespace of pods with these labels.
pub(super) fn namespace_of(labels: &LabelSet) -> Option<&str> {
    labels.get(K8S, POD_NAMESPACE).map(Label::value)
}

/// Returns the number that each agent tries first for a label set. The next ones follow in ascending order, and 256
/// comes after 65535.
fn first_try(labels: &LabelSet) -> Identity {
    let digest = sets::digest_of(labels);
    let head = digest.as_ref().first_chunk().copied().unwrap_or_default();
    Identity(CLUSTER_FIRST + u32::from_be_bytes(head) % NUMBERS as u32)
}

/// What a slice says of an address: the identity, the digest of its labels, and the address of the node.
type Announcement = (Identity, Option<LabelsDigest>, IpAddr);

/// The announcement of each address in a slice.
fn announcements(entries: &Entries) -> BTreeMap<IpAddr, Announcement> {
    let of_entry = |entry: &Entry| {
        let (identity, digest) = (entry.identity, entry.digest);
        let addresses = entry.addresses.clone().into_iter();
        addresses.map(move |(ip, node)| (ip, (identity, digest, node)))
    };
    entries.values().flat_map(of_entry).collect()
}

#[cfg(test)]
mod tests {
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
}
