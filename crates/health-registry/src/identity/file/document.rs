//! The contents of an identity file. No file access and no clock: times are passed in, and each change is applied to
//! the whole document at once.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::identity::{CLUSTER_FIRST, CLUSTER_LAST};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::super::IdentityError;
use super::super::allocator::{Timing, not_for_endpoints, shown};

/// The version of the format that this agent writes.
const VERSION: u32 = 1;
/// The total number of identities.
const NUMBERS: usize = (CLUSTER_LAST - CLUSTER_FIRST + 1) as usize;

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Document {
    version: u32,
    /// The number to try next.
    next: Identity,
    pub(super) identities: BTreeMap<Identity, Entry>,
    /// The numbers of collected identities, and until when they are reserved.
    freed: BTreeMap<Identity, Timestamp>,
    /// The sessions, one per agent, by a random number.
    sessions: BTreeMap<String, Session>,
    pub(super) addresses: BTreeMap<IpAddr, Address>,
}

/// An identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Entry {
    #[serde(with = "shared")]
    pub(super) labels: Arc<LabelSet>,
    /// The sessions that use the identity.
    references: BTreeSet<String>,
    /// Since when no session has used the identity.
    #[serde(skip_serializing_if = "Option::is_none")]
    unused_since: Option<Timestamp>,
}

/// The session of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Session {
    node: String,
    /// When the agent is considered dead.
    until: Timestamp,
}

/// The announcement of an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Address {
    pub(super) identity: Identity,
    /// The address of the node that has the endpoint.
    pub(super) node: IpAddr,
    session: String,
}

/// All that one agent wants to be in the file.
#[derive(Clone, Debug, Default)]
pub(super) struct Wish {
    /// Label sets, each with its last number.
    pub(super) sets: Vec<(Arc<LabelSet>, Option<Identity>)>,
    /// Identity and node of each address.
    pub(super) addresses: BTreeMap<IpAddr, (Identity, IpAddr)>,
    /// Whether to delete the entries of earlier sessions of the node.
    pub(super) forgets_earlier: bool,
}

/// An agent that changes a document.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) session: String,
    pub(super) node: String,
    pub(super) timing: Timing,
}

impl Default for Document {
    fn default() -> Self {
        Self {
            version: VERSION,
            next: Identity(CLUSTER_FIRST),
            identities: BTreeMap::new(),
            freed: BTreeMap::new(),
            sessions: BTreeMap::new(),
            addresses: BTreeMap::new(),
        }
    }
}

impl Document {
    /// Parses a document, and checks that it cannot lead to a wrong identity.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let document: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if document.version != VERSION {
            return Err(format!(
                "unsupported version {}; expected {VERSION}",
                document.version
            ));
        }
        let mut sets = BTreeMap::new();
        for (identity, entry) in &document.identities {
            if !identity.is_of_cluster() {
                return Err(format!(
                    "invalid identity {identity}; expected {CLUSTER_FIRST} to {CLUSTER_LAST}"
                ));
            }
            if entry.labels.is_empty() {
                return Err(format!("identity {identity} has no labels"));
            }
            if let Some(label) = not_for_endpoints(&entry.labels) {
                return Err(format!(
                    "identity {identity} has label {label}, which is not allowed on endpoints"
                ));
            }
            if let Some(other) = sets.insert(&entry.labels, identity) {
                return Err(format!(
                    "identities {other} and {identity} have the same labels"
                ));
            }
        }
        let strange = |address: &&Address| !address.identity.is_of_endpoints();
        match document.addresses.values().find(strange) {
            Some(address) => Err(format!(
                "identity {} is not valid for endpoints",
                address.identity
            )),
            None => Ok(document),
        }
    }

    /// Returns the name of a session's node.
    pub(super) fn node(&self, session: &str) -> Option<&str> {
        self.sessions.get(session).map(|known| known.node.as_str())
    }

    /// The nodes that use an identity.
    pub(super) fn references(&self, entry: &Entry) -> impl Iterator<Item = &str> {
        entry.references.iter().filter_map(|one| self.node(one))
    }

    /// The name of the node that announced an address.
    pub(super) fn owner(&self, address: &Address) -> Option<&str> {
        self.node(&address.session)
    }

    /// Updates the document to an agent's wishes, and drops expired entries. Returns an identity for each requested
    /// label set.
    pub(super) fn grant(
        &mut self,
        writer: &Writer,
        wish: &Wish,
        now: Timestamp,
    ) -> Vec<Result<Identity, IdentityError>> {
        self.renew(writer, wish.forgets_earlier, now);
        let mut by_labels: BTreeMap<_, _> = self
            .identities
            .iter()
            .map(|(identity, entry)| (entry.labels.clone(), *identity))
            .collect();
        // Held sets get their numbers back before new sets get any.
        for (labels, preferred) in &wish.sets {
            if let Some(preferred) = *preferred
                && self.is_free(preferred)
                && !by_labels.contains_key(labels)
            {
                self.give(preferred, labels);
                by_labels.insert(labels.clone(), preferred);
            }
        }
        let mut used = BTreeSet::new();
        let mut granted = Vec::with_capacity(wish.sets.len());
        for (labels, _) in &wish.sets {
            let known = by_labels.get(labels).copied();
            let identity = known.or_else(|| self.allocate(labels));
            used.extend(identity);
            by_labels.extend(identity.map(|identity| (labels.clone(), identity)));
            granted.push(identity.ok_or_else(|| IdentityError::Exhausted {
                labels: shown(labels),
                count: NUMBERS,
            }));
        }
        for (identity, entry) in &mut self.identities {
            if used.contains(identity) {
                entry.references.insert(writer.session.clone());
            } else {
                entry.references.remove(&writer.session);
            }
        }
        self.announce(writer, wish);
        self.collect(&writer.timing, now);
        granted
    }

    /// Renews the agent's session after a third of its duration, and drops expired sessions.
    fn renew(&mut self, writer: &Writer, forgets_earlier: bool, now: Timestamp) {
        self.sessions.retain(|session, known| {
            let is_earlier = known.node == writer.node && *session != writer.session;
            known.until > now && !(is_earlier && forgets_earlier)
        });
        let until = after(now, writer.timing.lease);
        let worn = after(now, writer.timing.lease * 2 / 3);
        let session = Session {
            node: writer.node.clone(),
            until,
        };
        let known = self.sessions.entry(writer.session.clone());
        let known = known.or_insert_with(|| session.clone());
        // A clock that is set back must not make the session last forever.
        if known.until < worn || known.until > until {
            *known = session;
        }
    }

    fn is_free(&self, identity: Identity) -> bool {
        !self.identities.contains_key(&identity) && !self.freed.contains_key(&identity)
    }

    /// Gives a label set the next free number.
    fn allocate(&mut self, labels: &Arc<LabelSet>) -> Option<Identity> {
        let next = self.next.0.clamp(CLUSTER_FIRST, CLUSTER_LAST);
        let identity = (next..=CLUSTER_LAST)
            .chain(CLUSTER_FIRST..next)
            .map(Identity)
            .find(|identity| self.is_free(*identity))?;
        self.next = Identity(match identity.0 {
            CLUSTER_LAST => CLUSTER_FIRST,
            number => number + 1,
        });
        self.give(identity, labels);
        Some(identity)
    }

    fn give(&mut self, identity: Identity, labels: &Arc<LabelSet>) {
        let entry = Entry {
            labels: labels.clone(),
            references: BTreeSet::new(),
            unused_since: None,
        };
        self.identities.insert(identity, entry);
    }

    fn announce(&mut self, writer: &Writer, wish: &Wish) {
        let sessions = &self.sessions;
        self.addresses.retain(|ip, address| {
            let is_own = address.session == writer.session;
            sessions.contains_key(&address.session) && (!is_own || wish.addresses.contains_key(ip))
        });
        for (ip, (identity, node)) in &wish.addresses {
            let address = Address {
                identity: *identity,
                node: *node,
                session: writer.session.clone(),
            };
            self.addresses.insert(*ip, address);
        }
    }

    fn collect(&mut self, timing: &Timing, now: Timestamp) {
        self.freed.retain(|_, until| *until > now);
        let sessions = &self.sessions;
        let mut collected = Vec::new();
        for (identity, entry) in &mut self.identities {
            entry
                .references
                .retain(|session| sessions.contains_key(session));
            if !entry.references.is_empty() {
                entry.unused_since = None;
                continue;
            }
            let since = *entry.unused_since.get_or_insert(now);
            if after(since, timing.collect_after) <= now {
                collected.push(*identity);
            }
        }
        for identity in collected {
            self.identities.remove(&identity);
            let until = after(now, timing.reuse_after);
            self.freed.insert(identity, until);
        }
    }
}

/// JSON form of label sets that are shared in memory.
mod shared {
    use std::sync::Arc;

    use health_model::labels::LabelSet;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(
        labels: &Arc<LabelSet>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        LabelSet::serialize(labels, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<LabelSet>, D::Error> {
        LabelSet::deserialize(deserializer).map(Arc::new)
    }
}

fn after(time: Timestamp, duration: Duration) -> Timestamp {
    let duration = SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX);
    time.saturating_add(duration).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn timing() -> Timing {
        Timing {
            lease: Duration::from_secs(30),
            collect_after: Duration::from_secs(60),
            reuse_after: Duration::from_secs(100),
            ..Timing::default()
        }
    }

    pub(super) fn writer(name: &str) -> Writer {
        Writer {
            session: format!("session-of-{name}"),
            node: name.to_owned(),
            timing: timing(),
        }
    }

    pub(super) fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).expect("a time")
    }

    pub(super) fn set(number: u8) -> Arc<LabelSet> {
        let label = format!("k8s:app=a{number}").parse().expect("a label");
        Arc::new(LabelSet::new([label]).expect("a set"))
    }

    fn wish(sets: &[u8]) -> Wish {
        Wish {
            sets: sets.iter().map(|one| (set(*one), None)).collect(),
            ..Wish::default()
        }
    }

    fn granted(document: &mut Document, node: &str, sets: &[u8], seconds: i64) -> Vec<Identity> {
        let granted = document.grant(&writer(node), &wish(sets), at(seconds));
        granted.into_iter().map(|one| one.expect("one")).collect()
    }

    #[test]
    fn the_same_labels_have_the_same_number_for_everybody() {
        let mut document = Document::default();
        let of_a = granted(&mut document, "a", &[1, 2], 0);
        let of_b = granted(&mut document, "b", &[2, 3], 0);
        assert_eq!(of_a[1], of_b[0]);
        assert_eq!(document.identities.len(), 3);
        let entry = &document.identities[&of_a[1]];
        let nodes: Vec<_> = document.references(entry).collect();
        assert_eq!(nodes, ["a", "b"]);
    }

    #[test]
    fn sets_that_are_held_keep_their_numbers_before_new_ones_get_any() {
        let mut document = Document::default();
        let held = granted(&mut document, "a", &[3, 4, 5], 0);
        // The file is lost. Another agent is faster to take the first number, and lists new sets before held ones.
        let mut document = Document::default();
        assert_eq!(granted(&mut document, "b", &[9], 1), held[..1]);
        let wish = Wish {
            sets: vec![
                (set(1), None),
                (set(2), None),
                (set(3), Some(held[0])),
                (set(4), Some(held[1])),
                (set(5), Some(held[2])),
            ],
            ..Wish::default()
        };
        let granted = document.grant(&writer("a"), &wish, at(2));
        let granted: Vec<_> = granted.into_iter().map(|one| one.expect("one")).collect();
        assert_eq!(granted[3..], held[1..]);
        let distinct: BTreeSet<_> = granted.iter().chain(&held[..1]).collect();
        assert_eq!(distinct.len(), 6);
    }

    #[test]
    fn what_nobody_uses_is_collected_in_time_and_its_number_rests() {
        let mut document = Document::default();
        let first = granted(&mut document, "a", &[1], 0)[0];
        granted(&mut document, "a", &[], 10);
        granted(&mut document, "a", &[], 30);
        granted(&mut document, "a", &[], 55);
        // A set that is used again in time keeps its identity.
        assert_eq!(granted(&mut document, "b", &[1], 69), [first]);
        granted(&mut document, "b", &[], 70);
        for seconds in [90, 110, 129] {
            granted(&mut document, "b", &[], seconds);
        }
        assert_eq!(document.identities.len(), 1);
        granted(&mut document, "b", &[], 130);
        assert!(document.identities.is_empty());
        document.next = first;
        assert_ne!(granted(&mut document, "b", &[2], 131), [first]);
        let again = Wish {
            sets: vec![(set(1), Some(first))],
            ..Wish::default()
        };
        let granted = document.grant(&writer("b"), &again, at(132));
        assert_ne!(granted, [Ok(first)]);
        let granted = document.grant(&writer("b"), &wish(&[1]), at(500));
        assert!(granted[0].is_ok());
        assert!(!document.freed.contains_key(&first));
    }

    #[test]
    fn a_dead_agents_references_and_addresses_go() {
        let mut document = Document::default();
        let mut of_a = wish(&[1]);
        let ip: IpAddr = "10.0.0.9".parse().unwrap();
        let node: IpAddr = "172.30.0.1".parse().unwrap();
        of_a.addresses.insert(ip, (Identity::INIT, node));
        document
            .grant(&writer("a"), &of_a, at(0))
            .remove(0)
            .unwrap();
        granted(&mut document, "b", &[1], 29);
        assert_eq!(document.owner(&document.addresses[&ip]), Some("a"));
        let identity = granted(&mut document, "b", &[1], 30)[0];
        assert!(document.addresses.is_empty());
        let nodes: Vec<_> = document
            .references(&document.identities[&identity])
            .collect();
        assert_eq!(nodes, ["b"]);
    }

    #[test]
    fn a_restarted_agent_takes_over_and_then_forgets() {
        let mut document = Document::default();
        let identity = granted(&mut document, "a", &[1], 0)[0];
        let again = Writer {
            session: "another".to_owned(),
            ..writer("a")
        };
        document.grant(&again, &Wish::default(), at(1));
        assert_eq!(document.identities[&identity].references.len(), 1);
        let forgetting = Wish {
            forgets_earlier: true,
            ..Wish::default()
        };
        document.grant(&again, &forgetting, at(2));
        assert!(document.identities[&identity].references.is_empty());
        assert_eq!(document.sessions.len(), 1);
    }

    #[test]
    fn when_all_numbers_are_in_use_the_next_set_is_refused_and_the_others_stand() {
        let mut document = Document::default();
        let label = |i: usize| format!("k8s:app=a{i}").parse().unwrap();
        let sets = (0..=NUMBERS).map(|i| (Arc::new(LabelSet::new([label(i)]).unwrap()), None));
        let wish = Wish {
            sets: sets.collect(),
            ..Wish::default()
        };
        let granted = document.grant(&writer("a"), &wish, at(0));
        assert!(granted[..NUMBERS].iter().all(Result::is_ok));
        let error = granted[NUMBERS].clone().unwrap_err().to_string();
        assert!(
            error.starts_with("no identity is left for k8s:app=a65280"),
            "{error}"
        );
    }

    #[test]
    fn what_would_give_a_wrong_identity_is_refused_with_its_reason() {
        let mut document = Document::default();
        granted(&mut document, "a", &[1, 2], 0);
        let text = serde_json::to_string(&document).unwrap();
        assert_eq!(Document::parse(text.as_bytes()), Ok(document));
        for (from, to, expected) in [
            (r#""256""#, r#""1""#, "invalid identity 1; expected 256"),
            ("k8s:app=a1", "reserved:host", "has label reserved:host"),
            (
                "k8s:app=a1",
                "k8s:app=a2",
                "256 and 257 have the same labels",
            ),
            (r#"["k8s:app=a1"]"#, "[]", "identity 256 has no labels"),
            (
                r#""version":1"#,
                r#""version":2"#,
                "unsupported version 2; expected 1",
            ),
            (r#""next""#, r#""more":1,"next""#, "unknown field `more`"),
            ("{", "", "expected struct Document"),
        ] {
            let error = Document::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{error:?} for {to}");
        }
    }
}
