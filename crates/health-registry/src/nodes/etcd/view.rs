//! Converts the keys of one cluster to nodes. No connection and no clock: receives keys and times, and returns nodes
//! and refusals.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::etcd::{Mirror, Pair};
use crate::nodes::record::NodeRecord;
use crate::nodes::validate::{Claims, Entry};
use crate::nodes::{Node, UnusableEntry};

/// Maximum length of a value in bytes. A node with the maximum number of addresses needs a tenth of that.
const MAX_RECORD_LEN: usize = 64 * 1024;
/// Maximum number of refused keys that are reported individually.
const MAX_REJECTED: usize = 100;

/// How long a node stays after its record was deleted, so that its agent can restore the record. If a running agent did
/// not delete its record itself, the deletion is a mistake, which that agent repairs immediately.
const SETTLE: Duration = Duration::from_secs(10);
/// How long a node stays whose record was missing when the store came back. A store may come back without its data, and
/// agents then need time to write theirs.
const SETTLE_UNSEEN: Duration = Duration::from_secs(120);

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

/// The meaning of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key<'a> {
    /// A node's record; holds the node's name.
    Record(&'a str),
    /// A node's presence key, which exists while its agent is connected; holds the node's name.
    Presence(&'a str),
}

impl Keys {
    pub(super) fn of(cluster: &str) -> Self {
        Self {
            prefix: format!("/health-agent/v1/{cluster}/"),
        }
    }

    /// Prefix of all keys of the cluster.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Key of a node's record.
    pub(super) fn record(&self, node: &str) -> String {
        format!("{}nodes/{node}", self.prefix)
    }

    /// Key of a node's presence.
    pub(super) fn presence(&self, node: &str) -> String {
        format!("{}presence/{node}", self.prefix)
    }

    /// Parses a key; `None` if its kind is unknown.
    pub(super) fn read<'a>(&self, key: &'a str) -> Option<Key<'a>> {
        let rest = key.strip_prefix(&self.prefix)?;
        let record = rest.strip_prefix("nodes/").map(Key::Record);
        record.or_else(|| rest.strip_prefix("presence/").map(Key::Presence))
    }
}

/// A record that is or was in the store.
#[derive(Debug)]
struct StoredRecord {
    /// The node as last read without errors.
    node: Option<Node>,
    /// Why the record cannot be read at present.
    problem: Option<String>,
    create_revision: i64,
    mod_revision: i64,
    /// When the node leaves the set because its record is gone.
    leaves_at: Option<Duration>,
    /// Since when the node's agent has been absent.
    absent_since: Option<Duration>,
}

/// The nodes of one cluster. Times count from any fixed moment.
#[derive(Debug)]
pub(super) struct View {
    cluster: String,
    keys: Keys,
    own: Option<Node>,
    /// The records by the name in the key.
    records: BTreeMap<String, StoredRecord>,
    present: HashSet<String>,
}

impl View {
    pub(super) fn new(cluster: &str, own: Option<Node>) -> Self {
        Self {
            cluster: cluster.to_owned(),
            keys: Keys::of(cluster),
            own,
            records: BTreeMap::new(),
            present: HashSet::new(),
        }
    }

    /// Sets this node as its own agent knows it, regardless of the store.
    pub(super) fn set_own(&mut self, own: Option<Node>) {
        self.own = own;
    }

    /// Records a key that was written.
    pub(super) fn put(&mut self, pair: Pair, now: Duration) {
        match self.keys.read(&pair.key) {
            Some(Key::Record(name)) => {
                let name = name.to_owned();
                let read = self.read_record(&name, &pair);
                let absent = !self.present.contains(&name);
                let stored = self.records.entry(name).or_insert(StoredRecord {
                    node: None,
                    problem: None,
                    create_revision: 0,
                    mod_revision: 0,
                    leaves_at: None,
                    absent_since: absent.then_some(now),
                });
                stored.create_revision = pair.create_revision;
                stored.mod_revision = pair.mod_revision;
                stored.leaves_at = None;
                match read {
                    Ok(node) => (stored.node, stored.problem) = (Some(node), None),
                    Err(problem) => stored.problem = Some(problem),
                }
            }
            Some(Key::Presence(name)) => {
                if let Some(stored) = self.records.get_mut(name) {
                    stored.absent_since = None;
                }
                self.present.insert(name.to_owned());
            }
            None => {}
        }
    }

    /// Records a key that was deleted.
    pub(super) fn delete(&mut self, key: &str, now: Duration) {
        match self.keys.read(key) {
            Some(Key::Record(name)) => {
                if let Some(stored) = self.records.get_mut(name) {
                    let leaves_at = now + SETTLE;
                    stored.leaves_at = Some(stored.leaves_at.unwrap_or(leaves_at).min(leaves_at));
                }
            }
            Some(Key::Presence(name)) => {
                self.present.remove(name);
                if let Some(stored) = self.records.get_mut(name) {
                    stored.absent_since = Some(now);
                }
            }
            None => {}
        }
    }

    /// Removes expired nodes. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        let before = self.records.len();
        self.records
            .retain(|_, stored| stored.leaves_at.is_none_or(|at| at > now));
        self.records.len() != before
    }

    /// When [`expire`](Self::expire) next has anything to do.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.records.values().filter_map(|s| s.leaves_at).min()
    }

    /// Returns the names of nodes whose agents have been absent for `grace`, and the revisions of their records.
    pub(super) fn abandoned(&self, grace: Duration, now: Duration) -> Vec<(String, i64)> {
        self.records
            .iter()
            .filter(|(name, stored)| {
                stored.leaves_at.is_none()
                    && stored
                        .absent_since
                        .is_some_and(|since| since + grace <= now)
                    && self.own.as_ref().is_none_or(|own| own.name != **name)
            })
            .map(|(name, stored)| (name.clone(), stored.mod_revision))
            .collect()
    }

    /// Returns the nodes, sorted by name, and the unusable keys. If two nodes claim the same thing, this node wins,
    /// else the node whose agent is present, else the node with the older record.
    pub(super) fn nodes(&self) -> (Vec<Node>, Vec<UnusableEntry>) {
        let mut claims = Claims::default();
        let mut nodes = Vec::with_capacity(self.records.len() + 1);
        let mut rejected = Vec::new();
        if let Some(own) = &self.own {
            let entry = Entry::from_node(own, "this agent's settings");
            nodes.extend(claims.take(entry, &self.cluster));
        }
        let own_name = self.own.as_ref().map(|own| own.name.as_str());
        let mut others: Vec<_> = self
            .records
            .iter()
            .filter(|(name, _)| Some(name.as_str()) != own_name)
            .collect();
        others.sort_by_key(|(_, stored)| {
            let leaving = stored.leaves_at.is_some();
            (
                leaving,
                stored.absent_since.is_some(),
                stored.create_revision,
            )
        });
        for (name, stored) in others {
            let key = self.keys.record(name);
            if let (Some(problem), None) = (&stored.problem, stored.leaves_at) {
                rejected.push(UnusableEntry {
                    key: key.clone(),
                    reason: problem.clone(),
                });
            }
            let Some(node) = &stored.node else { continue };
            match claims.take(Entry::from_node(node, &key), &self.cluster) {
                Ok(node) => nodes.push(node),
                Err(refused) if stored.leaves_at.is_none() => rejected.push(UnusableEntry {
                    key,
                    reason: refused.to_string(),
                }),
                Err(_) => {}
            }
        }
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        (nodes, summarised(rejected))
    }

    fn read_record(&self, name: &str, pair: &Pair) -> Result<Node, String> {
        let bytes = pair.value.within(MAX_RECORD_LEN)?;
        let record: NodeRecord =
            serde_json::from_slice(bytes).map_err(|error| format!("not a node record: {error}"))?;
        let (claimed_name, claimed_cluster) =
            (record.name().to_owned(), record.cluster().to_owned());
        // Without other claims, this checks the record by itself.
        let node = Claims::default()
            .take(record.into_entry(&pair.key), &self.cluster)
            .map_err(|refused| refused.to_string())?;
        if claimed_name != name {
            return Err(format!(
                "it names node {claimed_name:?}, which does not match its key"
            ));
        }
        if claimed_cluster != self.cluster {
            return Err(format!(
                "it belongs to cluster {claimed_cluster:?}, not to {:?}",
                self.cluster
            ));
        }
        Ok(node)
    }
}

impl Mirror for View {
    fn replace(&mut self, pairs: Vec<Pair>, now: Duration) {
        let listed: HashSet<String> = pairs.iter().map(|pair| pair.key.clone()).collect();
        self.present.clear();
        for stored in self.records.values_mut() {
            stored.absent_since = None;
        }
        for (name, stored) in &mut self.records {
            if !listed.contains(&self.keys.record(name)) {
                stored.leaves_at.get_or_insert(now + SETTLE_UNSEEN);
            }
        }
        for pair in pairs {
            self.put(pair, now);
        }
        for (name, stored) in &mut self.records {
            stored.absent_since = (!self.present.contains(name)).then_some(now);
        }
    }

    /// Notes that the store is back after an interruption. Agents may have been cut off too, so they get more time to
    /// restore deleted records.
    fn resume(&mut self, now: Duration) {
        for stored in self.records.values_mut() {
            stored.leaves_at = stored.leaves_at.map(|at| at.max(now + SETTLE));
            stored.absent_since = stored.absent_since.map(|_| now);
        }
    }
}

/// Limits the list to a readable length.
fn summarised(mut rejected: Vec<UnusableEntry>) -> Vec<UnusableEntry> {
    if rejected.len() > MAX_REJECTED {
        let more = rejected.len() - (MAX_REJECTED - 1);
        rejected.truncate(MAX_REJECTED - 1);
        rejected.push(UnusableEntry {
            key: format!("{more} more"),
            reason: "see the first entries".to_owned(),
        });
    }
    rejected
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::etcd::Value;

    const SECOND: Duration = Duration::from_secs(1);

    fn json(name: &str, address: &str) -> String {
        format!(r#"{{"name":"{name}","cluster":"default","addresses":["{address}"]}}"#)
    }

    fn pair(key: &str, value: impl Into<Vec<u8>>, revision: i64) -> Pair {
        Pair {
            key: format!("/health-agent/v1/default/{key}"),
            value: Value::from(value.into()),
            create_revision: revision,
            mod_revision: revision,
        }
    }

    fn record(name: &str, address: &str, revision: i64) -> Pair {
        pair(&format!("nodes/{name}"), json(name, address), revision)
    }

    fn names(view: &View) -> Vec<String> {
        view.nodes().0.into_iter().map(|node| node.name).collect()
    }

    fn reasons(view: &View) -> Vec<(String, String)> {
        let rejected = view.nodes().1;
        let short = |key: String| key.replace("/health-agent/v1/default/nodes/", "");
        rejected
            .into_iter()
            .map(|r| (short(r.key), r.reason))
            .collect()
    }

    #[test]
    fn rubbish_is_refused_by_key_and_the_others_stand() {
        let good = json("x", "10.0.0.9");
        for (key, value, expected) in [
            ("nodes/x", "".to_owned(), "not a node record: EOF"),
            ("nodes/x", "\u{0}\u{1}".to_owned(), "not a node record: "),
            ("nodes/x", "[1, 2]".to_owned(), "not a node record: "),
            (
                "nodes/x",
                "1".repeat(1 << 20),
                "the value has 1048576 bytes",
            ),
            ("nodes/x", json("y", "10.0.0.9"), "it names node \"y\""),
            (
                "nodes/a/b",
                json("a/b", "10.0.0.9"),
                "node name \"a/b\" must not",
            ),
            (
                "nodes/x",
                good.replace("default", "west"),
                "it belongs to cluster \"west\"",
            ),
            (
                "nodes/x",
                good.replace("10.0.0.9", "10.0.0.999"),
                "\"10.0.0.999\" is not an IP",
            ),
            (
                "nodes/x",
                good.replace("10.0.0.9", "224.0.0.1"),
                "224.0.0.1 is not a unicast",
            ),
            (
                "nodes/x",
                good.replace("10.0.0.9", "10.0.0.1"),
                "address 10.0.0.1 is listed twice",
            ),
        ] {
            let mut view = View::new("default", None);
            view.replace(
                vec![
                    record("a", "10.0.0.1", 1),
                    pair(key, value, 2),
                    record("b", "10.0.0.2", 3),
                ],
                Duration::ZERO,
            );
            assert_eq!(names(&view), ["a", "b"], "{expected}");
            let reasons = reasons(&view);
            assert_eq!(reasons.len(), 1, "{reasons:?}");
            assert!(
                reasons[0].1.starts_with(expected),
                "{reasons:?} for {expected}"
            );
        }
    }

    #[test]
    fn rubbish_over_a_good_record_leaves_the_good_one() {
        let mut view = View::new("default", None);
        view.put(record("a", "10.0.0.1", 1), Duration::ZERO);
        view.put(pair("nodes/a", "rubbish", 2), Duration::ZERO);
        assert_eq!(names(&view), ["a"]);
        assert_eq!(reasons(&view).len(), 1);
        view.put(record("a", "10.0.0.3", 3), Duration::ZERO);
        assert_eq!(view.nodes().0[0].addresses[0].to_string(), "10.0.0.3");
        assert_eq!(reasons(&view), []);
    }

    #[test]
    fn a_node_stays_when_its_agent_goes_and_leaves_when_its_record_stays_away() {
        let mut view = View::new("default", None);
        view.replace(
            vec![record("a", "10.0.0.1", 1), pair("presence/a", "i", 1)],
            Duration::ZERO,
        );
        view.delete("/health-agent/v1/default/presence/a", SECOND);
        assert_eq!((names(&view).len(), view.next_expiry()), (1, None));

        view.delete("/health-agent/v1/default/nodes/a", SECOND);
        assert!(!view.expire(SECOND * 10));
        assert_eq!(names(&view), ["a"]);
        view.put(record("a", "10.0.0.1", 5), SECOND * 10);
        assert!(!view.expire(SECOND * 100));

        view.delete("/health-agent/v1/default/nodes/a", SECOND * 100);
        assert_eq!(view.next_expiry(), Some(SECOND * 100 + SETTLE));
        assert!(view.expire(SECOND * 100 + SETTLE));
        assert!(names(&view).is_empty());
    }

    #[test]
    fn a_store_that_comes_back_empty_gets_time_to_be_filled() {
        let mut view = View::new("default", None);
        view.replace(
            vec![record("a", "10.0.0.1", 1), record("b", "10.0.0.2", 2)],
            Duration::ZERO,
        );
        view.replace(Vec::new(), SECOND);
        assert_eq!(names(&view), ["a", "b"]);
        // A second disconnect does not restart the timer.
        view.replace(vec![record("a", "10.0.0.1", 1)], SECOND * 60);
        assert!(view.expire(SECOND + SETTLE_UNSEEN));
        assert_eq!(names(&view), ["a"]);
    }

    #[test]
    fn what_two_claim_goes_to_the_present_one_then_to_the_older() {
        let mut view = View::new("default", None);
        view.replace(
            vec![record("new", "10.0.0.1", 7), record("old", "10.0.0.1", 2)],
            Duration::ZERO,
        );
        assert_eq!(names(&view), ["old"]);
        view.put(pair("presence/new", "i", 8), SECOND);
        assert_eq!(names(&view), ["new"]);
        let reasons = reasons(&view);
        assert_eq!(reasons[0].0, "old");
        assert!(reasons[0].1.contains("as default/new"), "{reasons:?}");
        // A deleted record yields to the other node's record, without being reported.
        view.delete("/health-agent/v1/default/nodes/new", SECOND);
        assert_eq!(names(&view), ["old"]);
        assert!(view.nodes().1.is_empty());
    }

    #[test]
    fn this_node_is_there_whatever_the_store_says() {
        let own = Node {
            name: "me".to_owned(),
            cluster: "default".to_owned(),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
            labels: BTreeMap::new(),
        };
        let mut view = View::new("default", Some(own));
        assert_eq!(names(&view), ["me"]);
        view.put(record("thief", "10.0.0.1", 1), Duration::ZERO);
        view.put(record("me", "10.0.0.7", 1), Duration::ZERO);
        assert_eq!(names(&view), ["me"]);
        assert_eq!(view.nodes().0[0].addresses[0].to_string(), "10.0.0.1");
        assert_eq!(reasons(&view)[0].0, "thief");
    }

    #[test]
    fn only_records_whose_agents_were_long_away_are_abandoned() {
        let grace = Duration::from_secs(3600);
        let mut view = View::new("default", None);
        let pairs = vec![
            record("gone", "10.0.0.1", 1),
            record("here", "10.0.0.2", 2),
            pair("presence/here", "i", 3),
        ];
        view.replace(pairs.clone(), SECOND);
        assert!(view.abandoned(grace, grace).is_empty());
        let gone = ("gone".to_owned(), 1);
        assert_eq!(view.abandoned(grace, grace + SECOND), [gone]);
        // While the store was away, agents could not be seen, so the timer restarts.
        view.replace(pairs, grace);
        assert!(view.abandoned(grace, grace + SECOND).is_empty());
    }

    #[test]
    fn countless_refusals_are_summed_up() {
        let mut view = View::new("default", None);
        let pairs = (0..150)
            .map(|i| pair(&format!("nodes/n{i}"), "", i))
            .collect();
        view.replace(pairs, Duration::ZERO);
        let reasons = reasons(&view);
        assert_eq!(reasons.len(), 100);
        assert_eq!(reasons[99].0, "51 more");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, u8),
        Rubbish(u8, String),
        Presence(u8),
        Delete(String),
        List(Vec<(u8, u8)>),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let name = 0..5_u8;
        prop_oneof![
            (name.clone(), 0..5_u8).prop_map(|(name, address)| Step::Put(name, address)),
            (name.clone(), any::<String>()).prop_map(|(name, text)| Step::Rubbish(name, text)),
            name.clone().prop_map(Step::Presence),
            name.clone()
                .prop_map(|name| Step::Delete(format!("nodes/n{name}"))),
            name.clone()
                .prop_map(|name| Step::Delete(format!("presence/n{name}"))),
            proptest::collection::vec((name, 0..5_u8), 0..6).prop_map(Step::List),
            (0..200_u64).prop_map(Step::Wait),
        ]
    }

    proptest! {
        #[test]
        fn no_history_loses_this_node_or_gives_an_address_twice(
            steps in proptest::collection::vec(step(), 1..60),
        ) {
            let record = |name: u8, address: u8, revision| {
                record(&format!("n{name}"), &format!("10.0.0.{address}"), revision)
            };
            let own = Node {
                name: "n0".to_owned(),
                cluster: "default".to_owned(),
                addresses: vec!["10.0.0.0".parse().expect("an address")],
                secondary_addresses: Vec::new(),
                pod_cidrs: Vec::new(),
                health_addresses: Vec::new(),
                labels: BTreeMap::new(),
            };
            let mut view = View::new("default", Some(own.clone()));
            let mut now = Duration::ZERO;
            for (revision, step) in (1..).zip(steps) {
                match step {
                    Step::Put(name, address) => view.put(record(name, address, revision), now),
                    Step::Rubbish(name, text) => {
                        view.put(pair(&format!("nodes/n{name}"), text, revision), now);
                    }
                    Step::Presence(name) => {
                        view.put(pair(&format!("presence/n{name}"), "i", revision), now);
                    }
                    Step::Delete(key) => {
                        view.delete(&format!("/health-agent/v1/default/{key}"), now);
                    }
                    Step::List(nodes) => {
                        let pairs = nodes.iter().map(|&(n, a)| record(n, a, revision)).collect();
                        view.replace(pairs, now);
                    }
                    Step::Wait(seconds) => now += SECOND * u32::try_from(seconds).expect("few"),
                }
                view.expire(now);
                prop_assert!(view.next_expiry().is_none_or(|at| at > now));
                let (nodes, _) = view.nodes();
                prop_assert!(nodes.contains(&own));
                let addresses: HashSet<_> = nodes.iter().map(|node| node.addresses[0]).collect();
                prop_assert_eq!(addresses.len(), nodes.len());
            }
        }
    }
}
