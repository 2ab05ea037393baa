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
mod tests;
