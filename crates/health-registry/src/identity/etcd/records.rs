//! The contents of the keys of a cluster's identities. No connection and no clock: receives keys and times; returns a
//! view, and whatever this node's own keys lack.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::identity::{CLUSTER_FIRST, CLUSTER_LAST};
use health_model::identity::Identity;
use health_model::labels::LabelSet;

use super::super::view::{MOST_REJECTED, Settle, View};
use super::super::wants::Announce;
use super::keys::{AddressRecord, Key, Keys, digest_of, read_labels, read_number, read_text};
use crate::etcd::{Change, Mirror, Pair};
use crate::nodes::UnusableEntry;

/// The contents of the store. Times count from any fixed moment.
#[derive(Debug)]
pub(super) struct Records {
    keys: Keys,
    /// This node's name.
    node: String,
    pub(super) view: View,
    /// The numbers in the store, readable or not.
    numbers: BTreeMap<Identity, Number>,
    /// The numbers of label sets, by digest.
    digests: BTreeMap<String, Identity>,
    /// The last numbers of label sets that no longer have them, while the view still knows these numbers.
    former: BTreeMap<String, Identity>,
    freed: BTreeSet<Identity>,
    /// The sessions of this node's references.
    own_references: BTreeMap<Identity, String>,
    /// This node's addresses.
    own_addresses: BTreeMap<IpAddr, AddressRecord>,
    rejected: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Number {
    mod_revision: i64,
    /// The digest of the label set; `None` if the label set cannot be read.
    digest: Option<String>,
    /// Since when no reference to the number has been seen.
    unused_since: Option<Duration>,
}

/// An identity that no node uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnusedIdentity {
    pub(super) identity: Identity,
    pub(super) digest: String,
    pub(super) mod_revision: i64,
    pub(super) labels_key: LabelsKey,
}

/// The value of an identity's `labels/DIGEST` key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LabelsKey {
    /// The identity's number.
    Own,
    /// Another number: the label set got it while this number was lost.
    Other(Identity),
    /// No value: this half of the identity was lost.
    Absent,
}

impl Records {
    pub(super) fn new(keys: Keys, node: &str, settle: Settle) -> Self {
        Self {
            keys,
            node: node.to_owned(),
            view: View::new(settle),
            numbers: BTreeMap::new(),
            digests: BTreeMap::new(),
            former: BTreeMap::new(),
            freed: BTreeSet::new(),
            own_references: BTreeMap::new(),
            own_addresses: BTreeMap::new(),
            rejected: BTreeMap::new(),
        }
    }

    /// Applies a change.
    pub(super) fn apply(&mut self, change: &Change, now: Duration) {
        match change {
            Change::Put(pair) => self.put(pair, now),
            Change::Delete(key) => self.delete(key, now),
        }
    }

    fn put(&mut self, pair: &Pair, now: Duration) {
        let put = match self.keys.read(&pair.key) {
            Ok(key) => self.put_read(key, pair, now),
            Err(reason) => Err(reason.to_owned()),
        };
        match put {
            Ok(()) => self.rejected.remove(&pair.key),
            Err(reason) => self.rejected.insert(pair.key.clone(), reason),
        };
    }

    fn put_read(&mut self, key: Key, pair: &Pair, now: Duration) -> Result<(), String> {
        match key {
            Key::Number(identity) => {
                let labels = read_labels(&pair.value);
                let number = Number {
                    mod_revision: pair.mod_revision,
                    digest: labels.as_ref().ok().map(digest_of),
                    unused_since: (!self.view.is_referenced(identity)).then_some(now),
                };
                self.numbers.insert(identity, number);
                self.view.put_identity(identity, Arc::new(labels?), None);
            }
            Key::Labels(digest) => {
                self.lose_number(&digest);
                self.digests.insert(digest, read_number(&pair.value)?);
            }
            Key::Reference(identity, node) => {
                self.view.put_reference(identity, &node);
                if let Some(number) = self.numbers.get_mut(&identity) {
                    number.unused_since = None;
                }
                if node == self.node {
                    let session = read_text(&pair.value).unwrap_or_default();
                    self.own_references.insert(identity, session);
                }
            }
            Key::Freed(identity) => {
                self.freed.insert(identity);
            }
            Key::Address(node, ip) => {
                if node == self.node {
                    self.own_addresses.remove(&ip);
                }
                let (announced, record) = AddressRecord::read(&pair.value, &node)?;
                if node == self.node {
                    self.own_addresses.insert(ip, record);
                }
                let order = pair.create_revision.unsigned_abs();
                self.view.put_address(ip, order, announced, None);
            }
        }
        Ok(())
    }

    fn delete(&mut self, key: &str, now: Duration) {
        self.rejected.remove(key);
        match self.keys.read(key) {
            Ok(Key::Number(identity)) => {
                self.numbers.remove(&identity);
                self.view.remove_identity(identity, now);
            }
            Ok(Key::Labels(digest)) => self.lose_number(&digest),
            Ok(Key::Reference(identity, node)) => {
                self.view.remove_reference(identity, &node);
                if !self.view.is_referenced(identity)
                    && let Some(number) = self.numbers.get_mut(&identity)
                {
                    number.unused_since = Some(now);
                }
                if node == self.node {
                    self.own_references.remove(&identity);
                }
            }
            Ok(Key::Freed(identity)) => {
                self.freed.remove(&identity);
            }
            Ok(Key::Address(node, ip)) => {
                self.view.remove_address(ip, &node, now);
                if node == self.node {
                    self.own_addresses.remove(&ip);
                }
            }
            Err(_) => {}
        }
    }

    fn lose_number(&mut self, digest: &str) {
        if let Some((digest, identity)) = self.digests.remove_entry(digest)
            && is_of(&self.view, identity, &digest)
        {
            self.former.insert(digest, identity);
        }
    }

    /// Returns the last number of a label set, if it was in the store until recently.
    pub(super) fn former_number(&self, labels: &LabelSet) -> Option<Identity> {
        let identity = *self.former.get(&digest_of(labels))?;
        let known = self.view.labels(identity)?;
        (**known == *labels).then_some(identity)
    }

    /// Drops expired entries. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        let has_expired = self.view.expire(now);
        if has_expired {
            let view = &self.view;
            self.former
                .retain(|digest, identity| is_of(view, *identity, digest));
        }
        has_expired
    }

    /// Returns the unusable entries, and the label sets whose number belongs to another set.
    pub(super) fn rejected(&self) -> Vec<UnusableEntry> {
        let unread = self
            .rejected
            .iter()
            .map(|(key, reason)| (key.clone(), reason.clone()));
        let crossed = self.digests.iter().filter_map(|(digest, identity)| {
            let of_number = self.numbers.get(identity)?.digest.as_ref()?;
            (of_number != digest).then(|| {
                let reason = format!("identity {identity} has different labels");
                (self.keys.labels(digest), reason)
            })
        });
        unread
            .chain(crossed)
            .take(MOST_REJECTED)
            .map(|(key, reason)| UnusableEntry { key, reason })
            .collect()
    }

    /// Whether the store has this number for a label set, and a reference of this node with this session.
    pub(super) fn confirms(&self, labels: &LabelSet, identity: Identity, session: &str) -> bool {
        self.view
            .present(identity)
            .is_some_and(|known| **known == *labels)
            && self.digests.get(&digest_of(labels)) == Some(&identity)
            && self.own_references.get(&identity).map(String::as_str) == Some(session)
    }

    /// Whether the store has an address as it is announced.
    pub(super) fn confirms_address(&self, ip: IpAddr, announce: &Announce, session: &str) -> bool {
        self.own_addresses.get(&ip).is_some_and(|record| {
            (record.identity, record.node) == (announce.identity, announce.node)
                && record.session == session
        })
    }

    /// Records that this node's reference was deleted, before the deletion is read back.
    pub(super) fn dropped_reference(&mut self, identity: Identity) {
        self.own_references.remove(&identity);
    }

    /// Records that this node's address was deleted, before the deletion is read back.
    pub(super) fn dropped_address(&mut self, ip: IpAddr) {
        self.own_addresses.remove(&ip);
    }

    /// This node's references and their sessions.
    pub(super) fn own_references(&self) -> impl Iterator<Item = (Identity, &str)> {
        let own = self.own_references.iter();
        own.map(|(identity, session)| (*identity, session.as_str()))
    }

    /// This node's addresses and their sessions.
    pub(super) fn own_addresses(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let own = self.own_addresses.iter();
        own.map(|(ip, record)| (*ip, record.session.as_str()))
    }

    /// Returns identities that have been unused for `grace` and can be collected. Entries that cannot be read stay.
    pub(super) fn unused(&self, grace: Duration, now: Duration) -> Vec<UnusedIdentity> {
        let long = |number: &&Number| number.unused_since.is_some_and(|at| at + grace <= now);
        self.numbers
            .iter()
            .filter(|(_, number)| long(number))
            .filter_map(|(identity, number)| {
                let digest = number.digest.clone()?;
                Some(UnusedIdentity {
                    identity: *identity,
                    labels_key: self.labels_key(*identity, &digest)?,
                    digest,
                    mod_revision: number.mod_revision,
                })
            })
            .collect()
    }

    /// Returns the value of an identity's `labels/` key; `None` if the key cannot be read.
    fn labels_key(&self, identity: Identity, digest: &str) -> Option<LabelsKey> {
        match self.digests.get(digest) {
            Some(known) if *known == identity => Some(LabelsKey::Own),
            Some(other) => Some(LabelsKey::Other(*other)),
            None => {
                let is_unreadable = self.rejected.contains_key(&self.keys.labels(digest));
                (!is_unreadable).then_some(LabelsKey::Absent)
            }
        }
    }

    /// Records that an identity could not be collected because it differs from the state known here. Its timer
    /// restarts, so that other identities get their turn.
    pub(super) fn not_collected(&mut self, identity: Identity, now: Duration) {
        if let Some(number) = self.numbers.get_mut(&identity) {
            number.unused_since = number.unused_since.map(|_| now);
        }
    }

    /// Returns the first free number, starting at a random number; `None` if none is left.
    pub(super) fn free(&self, random: u32, taken: &BTreeSet<Identity>) -> Option<Identity> {
        let from = CLUSTER_FIRST + random % (CLUSTER_LAST - CLUSTER_FIRST + 1);
        (from..=CLUSTER_LAST)
            .chain(CLUSTER_FIRST..from)
            .map(Identity)
            .find(|identity| {
                !self.numbers.contains_key(identity)
                    && !self.view.is_known(*identity)
                    && !self.freed.contains(identity)
                    && !taken.contains(identity)
            })
    }
}

impl Mirror for Records {
    fn replace(&mut self, pairs: Vec<Pair>, now: Duration) {
        self.numbers.clear();
        self.former.append(&mut self.digests);
        self.freed.clear();
        self.own_references.clear();
        self.own_addresses.clear();
        self.rejected.clear();
        let (mut identities, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        for pair in &pairs {
            match self.keys.read(&pair.key) {
                Ok(Key::Number(identity)) => {
                    identities.insert(identity);
                }
                Ok(Key::Address(node, ip)) => {
                    addresses.insert((ip, node));
                }
                _ => {}
            }
        }
        self.view.retain(&identities, &addresses, now);
        for pair in pairs {
            self.put(&pair, now);
        }
        let digests = &self.digests;
        self.former
            .retain(|digest, _| !digests.contains_key(digest));
    }

    /// Notes that the store is back after an interruption, during which other nodes could not write either.
    fn resume(&mut self, now: Duration) {
        self.view.resume(now);
        for number in self.numbers.values_mut() {
            number.unused_since = number.unused_since.map(|_| now);
        }
    }
}

/// Whether a number is known to belong to the label set with this digest.
fn is_of(view: &View, identity: Identity, digest: &str) -> bool {
    let labels = view.labels(identity);
    labels.is_some_and(|labels| digest_of(labels) == digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const SETTLE: Settle = Settle {
        seen: Duration::from_secs(10),
        unseen: Duration::from_secs(120),
    };

    fn records() -> Records {
        Records::new(Keys::of("default"), "me", SETTLE)
    }

    fn set(label: &str) -> LabelSet {
        LabelSet::new([label.parse().unwrap()]).unwrap()
    }

    fn pair(key: &str, value: &str, revision: i64) -> Pair {
        Pair {
            key: format!("{}{key}", Keys::of("default").prefix()),
            value: value.as_bytes().to_vec().into(),
            create_revision: revision,
            mod_revision: revision,
        }
    }

    fn identity(number: u32, label: &str) -> [Pair; 2] {
        let digest = digest_of(&set(label));
        [
            pair(&format!("numbers/{number}"), &format!("[{label:?}]"), 1),
            pair(&format!("labels/{digest}"), &number.to_string(), 1),
        ]
    }

    #[test]
    fn a_reference_is_confirmed_for_its_labels_number_and_session_only() {
        let mut records = records();
        let mut pairs = identity(300, "unspec:a=1").to_vec();
        pairs.push(pair("references/300/me", "7", 2));
        records.replace(pairs, Duration::ZERO);
        assert!(records.confirms(&set("a=1"), Identity(300), "7"));
        assert!(!records.confirms(&set("a=2"), Identity(300), "7"));
        assert!(!records.confirms(&set("a=1"), Identity(301), "7"));
        assert!(!records.confirms(&set("a=1"), Identity(300), "8"));
        let digest = digest_of(&set("a=1"));
        let key = format!("{}labels/{digest}", Keys::of("default").prefix());
        records.apply(&Change::Delete(key), SECOND);
        assert!(!records.confirms(&set("a=1"), Identity(300), "7"));
    }

    #[test]
    fn foreign_values_are_named_and_give_nobody_an_identity() {
        let mut records = records();
        let mut pairs = identity(300, "unspec:a=1").to_vec();
        pairs.push(pair("numbers/301", r#"["reserved:host"]"#, 1));
        pairs.push(pair("numbers/1", r#"["unspec:x"]"#, 1));
        pairs.push(pair("labels/00", "300", 1));
        pairs.push(pair("hello", "world", 1));
        records.replace(pairs, Duration::ZERO);
        let rejected: Vec<_> = records.rejected().into_iter().map(|r| r.key).collect();
        let short: Vec<_> = rejected.iter().map(|key| &key[36..]).collect();
        assert_eq!(short, ["hello", "numbers/1", "numbers/301", "labels/00"]);
        assert_eq!(records.view.identities().count(), 1);
        // Any number in the store is in use, whatever its value.
        assert_ne!(
            records.free(301 - 256, &BTreeSet::new()),
            Some(Identity(301))
        );
        records.apply(&Change::Put(pair("numbers/300", "rubbish", 2)), SECOND);
        assert_eq!(**records.view.present(Identity(300)).unwrap(), set("a=1"));
        let name = |records: &Records| records.rejected().len();
        assert_eq!(name(&records), 4);
    }

    #[test]
    fn only_what_was_long_unused_is_collected() {
        let mut records = records();
        let mut pairs = identity(300, "unspec:a=1").to_vec();
        pairs.extend(identity(301, "unspec:b=1"));
        pairs.push(pair("references/301/other", "7", 2));
        records.replace(pairs, Duration::ZERO);
        assert_eq!(records.unused(SECOND * 60, SECOND * 59), []);
        let unused = records.unused(SECOND * 60, SECOND * 60);
        assert_eq!(unused.len(), 1);
        assert_eq!(unused[0].identity, Identity(300));
        let key = format!("{}references/301/other", Keys::of("default").prefix());
        records.apply(&Change::Delete(key), SECOND * 60);
        assert_eq!(records.unused(SECOND * 60, SECOND * 119).len(), 1);
        assert_eq!(records.unused(SECOND * 60, SECOND * 120).len(), 2);
        // No node could take an identity while the store was away.
        records.resume(SECOND * 120);
        assert_eq!(records.unused(SECOND * 60, SECOND * 121), []);
    }

    #[test]
    fn what_cannot_be_collected_takes_no_turn_from_the_rest() {
        let mut records = records();
        let mut pairs = identity(300, "unspec:a=1").to_vec();
        // Half of the identity was lost, or its labels have another number by now.
        pairs.push(pair("numbers/301", r#"["unspec:b=1"]"#, 1));
        pairs.push(pair("numbers/302", r#"["unspec:a=1"]"#, 1));
        // The value of the identity's `labels/` key is unreadable.
        let [number, mut labels] = identity(303, "unspec:c=1");
        labels.value = b"rubbish".to_vec().into();
        pairs.extend([number, labels]);
        records.replace(pairs, Duration::ZERO);
        let unused = |records: &Records, now| -> Vec<_> {
            let unused = records.unused(SECOND * 60, now).into_iter();
            unused.map(|one| (one.identity.0, one.labels_key)).collect()
        };
        let all = [
            (300, LabelsKey::Own),
            (301, LabelsKey::Absent),
            (302, LabelsKey::Other(Identity(300))),
        ];
        assert_eq!(unused(&records, SECOND * 60), all);
        records.not_collected(Identity(300), SECOND * 60);
        assert_eq!(unused(&records, SECOND * 119), all[1..]);
        assert_eq!(unused(&records, SECOND * 120), all);
    }

    #[test]
    fn a_store_that_comes_back_empty_takes_nothing_away_at_once() {
        let mut records = records();
        let mut pairs = identity(300, "unspec:a=1").to_vec();
        let record = r#"{"identity":300,"node":"172.30.0.2","session":"7"}"#;
        pairs.push(pair("addresses/other/10.0.0.9", record, 2));
        records.replace(pairs, Duration::ZERO);
        records.replace(Vec::new(), SECOND);
        assert!(!records.expire(SECOND * 120));
        assert!(records.view.is_known(Identity(300)));
        assert_ne!(
            records.free(300 - 256, &BTreeSet::new()),
            Some(Identity(300))
        );
        assert!(records.expire(SECOND * 121));
        assert!(!records.view.is_known(Identity(300)));
    }

    #[test]
    fn when_all_numbers_are_in_use_there_is_none() {
        let mut records = records();
        let pairs = (256..=65_535).flat_map(|n| identity(n, &format!("unspec:a={n}")));
        records.replace(pairs.collect(), Duration::ZERO);
        assert_eq!(records.free(12_345, &BTreeSet::new()), None);
        let key = format!("{}numbers/77777", Keys::of("default").prefix());
        records.apply(&Change::Delete(key.replace("77777", "400")), Duration::ZERO);
        assert!(records.expire(SECOND * 10));
        assert_eq!(records.free(12_345, &BTreeSet::new()), Some(Identity(400)));
    }
}
