//! Tells each reader how the set of nodes has changed since its last read.
//!
//! Each change of the set is a generation. A reader that names its generation gets the difference between that
//! generation and the current one, as often as it asks, so that no removal is lost with a lost response. A reader whose
//! generation is no longer remembered gets all nodes, marked as such. Generations start at a random number, so that
//! those of an earlier process are not mistaken for ours.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use health_model::api::{
    ClusterNodeStatus, NodeAddressing, NodeAddressingElement, NodeElement, NodeEntry, NodeList,
};

/// Maximum number of remembered readers. A new one replaces the one that has been idle for longest.
const MAX_CLIENTS: usize = 64;
/// How long idle readers are remembered.
const CLIENT_LIFETIME: Duration = Duration::from_secs(15 * 60);
/// Maximum number of remembered node changes. Readers that are further behind get all nodes.
const MAX_CHANGES: usize = 16 << 10;
/// Client ids and generations stay below this, so that readers with only floating-point numbers can represent them.
const NUMBERS: u64 = 1 << 53;

/// A random initial generation, far below the maximum.
pub(super) fn random_generation() -> u64 {
    rand::random_range(1..NUMBERS / 2)
}

/// An id for a new reader.
pub(super) fn random_client_id() -> i64 {
    rand::random_range(1..NUMBERS as i64)
}

/// The set of nodes, its recent changes, and the readers' positions.
#[derive(Debug)]
pub(super) struct NodeFeed {
    generation: u64,
    /// The oldest generation from which `changes` lead to the current one.
    oldest: u64,
    nodes: BTreeMap<String, NodeElement>,
    changes: VecDeque<Change>,
    clients: HashMap<i64, Client>,
}

/// A change of a node, with the value before it.
#[derive(Debug)]
struct Change {
    /// The generation in which the value changed.
    generation: u64,
    name: String,
    before: Option<NodeElement>,
}

#[derive(Debug)]
struct Client {
    /// The generation that was last sent.
    sent: u64,
    last_read: Duration,
}

/// The difference between a generation and the current one.
#[derive(Debug, Default)]
struct Difference {
    full: bool,
    added: Vec<NodeElement>,
    removed: Vec<NodeElement>,
}

impl NodeFeed {
    /// An empty feed at this generation, without readers.
    pub(super) fn new(generation: u64) -> Self {
        Self {
            generation,
            oldest: generation,
            nodes: BTreeMap::new(),
            changes: VecDeque::new(),
            clients: HashMap::new(),
        }
    }

    /// Replaces the set of nodes.
    pub(super) fn update(&mut self, list: &NodeList) {
        let next = self.generation + 1;
        let nodes: BTreeMap<_, _> = list
            .nodes
            .iter()
            .map(|node| (node.name.clone(), element(node)))
            .collect();
        let before = std::mem::take(&mut self.nodes);
        let new = nodes.keys().filter(|name| !before.contains_key(*name));
        let mut changes: Vec<_> = new
            .map(|name| Change {
                generation: next,
                name: name.clone(),
                before: None,
            })
            .collect();
        changes.extend(
            before
                .into_iter()
                .filter(|(name, node)| nodes.get(name) != Some(node))
                .map(|(name, node)| Change {
                    generation: next,
                    name,
                    before: Some(node),
                }),
        );
        self.nodes = nodes;
        if changes.is_empty() {
            return;
        }
        self.generation = next;
        self.changes.extend(changes);
        while self.changes.len() > MAX_CHANGES {
            if let Some(change) = self.changes.pop_front() {
                self.oldest = change.generation;
            }
        }
    }

    /// The response to a reader, without the name of the local node. `client_id` is the id in the last response to the
    /// reader, 0 for a new reader, `None` for one that wants all nodes. `has` is the reader's generation; without it,
    /// the reader is assumed to have received every response. `now` never decreases.
    pub(super) fn read(
        &mut self,
        client_id: Option<i64>,
        has: Option<u64>,
        now: Duration,
        new_id: impl FnMut() -> i64,
    ) -> ClusterNodeStatus {
        self.clients
            .retain(|_, client| now.saturating_sub(client.last_read) <= CLIENT_LIFETIME);
        let sent = Client {
            sent: self.generation,
            last_read: now,
        };
        let (client_id, difference) = match client_id {
            None => (0, self.all()),
            Some(id) => match self.clients.insert(id, sent) {
                Some(client) => (id, self.since(has.unwrap_or(client.sent))),
                None => (self.rename(id, new_id), self.all()),
            },
        };
        ClusterNodeStatus {
            client_id,
            own_name: String::new(),
            nodes_added: difference.added,
            nodes_removed: difference.removed,
            generation: self.generation,
            full: difference.full,
        }
    }

    /// Gives a reader with an unknown id a new id.
    fn rename(&mut self, unknown: i64, mut new_id: impl FnMut() -> i64) -> i64 {
        let Some(client) = self.clients.remove(&unknown) else {
            return 0;
        };
        if self.clients.len() >= MAX_CLIENTS {
            let idle = self.clients.iter().min_by_key(|(_, c)| c.last_read);
            if let Some(id) = idle.map(|(&id, _)| id) {
                self.clients.remove(&id);
            }
        }
        let id = loop {
            let id = new_id();
            if id != 0 && !self.clients.contains_key(&id) {
                break id;
            }
        };
        self.clients.insert(id, client);
        id
    }

    fn all(&self) -> Difference {
        Difference {
            full: true,
            added: self.nodes.values().cloned().collect(),
            removed: Vec::new(),
        }
    }

    fn since(&self, generation: u64) -> Difference {
        if !(self.oldest..=self.generation).contains(&generation) {
            return self.all();
        }
        let begin = self
            .changes
            .partition_point(|change| change.generation <= generation);
        // If a node changed several times, the first change holds the value that the reader knows.
        let mut known: BTreeMap<&str, Option<&NodeElement>> = BTreeMap::new();
        for change in self.changes.range(begin..) {
            known
                .entry(&change.name)
                .or_insert_with(|| change.before.as_ref());
        }
        let mut difference = Difference::default();
        for (name, before) in known {
            let node = self.nodes.get(name);
            if node != before {
                difference.added.extend(node.cloned());
                difference.removed.extend(before.cloned());
            }
        }
        difference
    }
}

fn element(node: &NodeEntry) -> NodeElement {
    let addressing = |addresses: &[IpAddr]| {
        let first = |v4| {
            let found = addresses.iter().find(|ip| ip.is_ipv4() == v4);
            found.map(|&ip| address(node, ip))
        };
        NodeAddressing {
            ipv4: first(true),
            ipv6: first(false),
        }
    };
    let primary = addressing(&node.addresses);
    let is_primary = |ip: &IpAddr| {
        let both = [&primary.ipv4, &primary.ipv6];
        both.into_iter().flatten().any(|first| first.ip == *ip)
    };
    let secondary = node.addresses.iter().filter(|ip| !is_primary(ip));
    let health = &node.health_addresses;
    NodeElement {
        name: node.name.clone(),
        secondary_addresses: secondary.map(|&ip| address(node, ip)).collect(),
        health_endpoint_address: (!health.is_empty()).then(|| NodeAddressing {
            ipv4: health
                .iter()
                .find(|ip| ip.is_ipv4())
                .map(|&ip| plain(node, ip)),
            ipv6: health
                .iter()
                .find(|ip| ip.is_ipv6())
                .map(|&ip| plain(node, ip)),
        }),
        primary_address: primary,
    }
}

fn address(node: &NodeEntry, ip: IpAddr) -> NodeAddressingElement {
    let same_family = |cidr: &&ipnet::IpNet| cidr.addr().is_ipv4() == ip.is_ipv4();
    NodeAddressingElement {
        alloc_range: node.pod_cidrs.iter().find(same_family).copied(),
        ..plain(node, ip)
    }
}

fn plain(node: &NodeEntry, ip: IpAddr) -> NodeAddressingElement {
    NodeAddressingElement {
        ip,
        enabled: !node.not_probed.contains(&ip),
        alloc_range: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    /// A registry with these nodes. A node's value determines its addresses.
    fn list(nodes: &BTreeMap<u8, u8>) -> NodeList {
        let entry = |(name, address): (&u8, &u8)| NodeEntry {
            name: format!("default/{name}"),
            local: false,
            addresses: vec![IpAddr::from([10, 0, *name, *address])],
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
            not_probed: Vec::new(),
        };
        NodeList {
            registries: Vec::new(),
            nodes: nodes.iter().map(entry).collect(),
        }
    }

    /// A reader's state.
    #[derive(Debug, Default)]
    struct Reader {
        id: i64,
        generation: Option<u64>,
        nodes: BTreeMap<String, NodeElement>,
    }

    impl Reader {
        fn apply(&mut self, answer: &ClusterNodeStatus) {
            if answer.full {
                self.nodes.clear();
                assert!(answer.nodes_removed.is_empty());
            }
            for node in &answer.nodes_removed {
                assert_eq!(self.nodes.remove(&node.name).as_ref(), Some(node));
            }
            for node in &answer.nodes_added {
                let before = self.nodes.insert(node.name.clone(), node.clone());
                assert_eq!(before, None);
            }
            self.id = answer.client_id;
            self.generation = Some(answer.generation);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Nodes(BTreeMap<u8, u8>),
        Read { is_lost: bool },
        OtherReaders(usize),
        Wait(u64),
        Restart(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => btree_map(0..8u8, 0..3u8, 0..8).prop_map(Step::Nodes),
            4 => any::<bool>().prop_map(|is_lost| Step::Read { is_lost }),
            1 => (0..2 * MAX_CLIENTS).prop_map(Step::OtherReaders),
            1 => (0..2000u64).prop_map(Step::Wait),
            1 => (1..NUMBERS / 2).prop_map(Step::Restart),
        ];
        vec(step, 0..40)
    }

    fn ids() -> impl FnMut() -> i64 {
        let mut last = 0;
        move || {
            last += 1;
            last
        }
    }

    proptest! {
        #[test]
        fn a_reader_that_says_what_it_has_ends_with_the_registrys_nodes(steps in steps()) {
            let mut feed = NodeFeed::new(1000);
            let mut ids = ids();
            let (mut reader, mut now) = (Reader::default(), Duration::ZERO);
            let mut registry = BTreeMap::new();
            for step in steps.into_iter().chain([Step::Read { is_lost: false }]) {
                match step {
                    Step::Nodes(nodes) => registry = nodes,
                    Step::Wait(seconds) => now += Duration::from_secs(seconds),
                    Step::Restart(generation) => feed = NodeFeed::new(generation),
                    Step::OtherReaders(number) => for _ in 0..number {
                        feed.read(Some(0), None, now, &mut ids);
                    },
                    Step::Read { is_lost } => {
                        feed.update(&list(&registry));
                        let answer = feed.read(Some(reader.id), reader.generation, now, &mut ids);
                        if !is_lost {
                            reader.apply(&answer);
                            let nodes: Vec<_> = reader.nodes.values().cloned().collect();
                            prop_assert_eq!(&nodes, &feed.all().added);
                            prop_assert_eq!(nodes.len(), registry.len());
                        }
                    }
                }
                prop_assert!(feed.clients.len() <= MAX_CLIENTS);
            }
        }

        #[test]
        fn a_reader_without_generations_that_loses_nothing_ends_so_too(
            sets in vec(btree_map(0..8u8, 0..3u8, 0..8), 1..20),
        ) {
            let mut feed = NodeFeed::new(7);
            let (mut ids, mut reader) = (ids(), Reader::default());
            for set in sets {
                feed.update(&list(&set));
                let answer = feed.read(Some(reader.id), None, Duration::ZERO, &mut ids);
                reader.apply(&answer);
                prop_assert_eq!(reader.nodes.len(), set.len());
            }
        }
    }

    #[test]
    fn readers_without_an_id_get_all_and_leave_no_trace() {
        let mut feed = NodeFeed::new(7);
        feed.update(&list(&BTreeMap::from([(1, 1)])));
        for _ in 0..2 {
            let answer = feed.read(None, None, Duration::ZERO, || unreachable!());
            assert_eq!((answer.client_id, answer.full), (0, true));
            assert_eq!(answer.nodes_added.len(), 1);
        }
        assert!(feed.clients.is_empty());
    }

    #[test]
    fn a_changed_node_is_removed_and_added_and_one_that_came_and_went_is_neither() {
        let mut feed = NodeFeed::new(7);
        let mut ids = ids();
        feed.update(&list(&BTreeMap::from([(1, 1)])));
        let id = feed.read(Some(0), None, Duration::ZERO, &mut ids).client_id;
        feed.update(&list(&BTreeMap::from([(1, 2), (2, 1)])));
        feed.update(&list(&BTreeMap::from([(1, 3)])));
        let answer = feed.read(Some(id), None, Duration::ZERO, &mut ids);
        let addresses = |nodes: &[NodeElement]| -> Vec<_> {
            let first = |node: &NodeElement| node.primary_address.ipv4.as_ref().unwrap().ip;
            nodes.iter().map(first).collect()
        };
        assert_eq!(
            addresses(&answer.nodes_removed),
            [IpAddr::from([10, 0, 1, 1])]
        );
        assert_eq!(
            addresses(&answer.nodes_added),
            [IpAddr::from([10, 0, 1, 3])]
        );
        assert!(!answer.full);
        let again = feed.read(Some(id), Some(8), Duration::ZERO, &mut ids);
        assert_eq!(again, answer);
        let nothing = feed.read(Some(id), None, Duration::ZERO, &mut ids);
        assert!(nothing.nodes_added.is_empty() && nothing.nodes_removed.is_empty());
    }

    #[test]
    fn who_is_too_far_behind_gets_all() {
        let mut feed = NodeFeed::new(7);
        let mut ids = ids();
        let id = feed.read(Some(0), None, Duration::ZERO, &mut ids).client_id;
        for change in 0..=MAX_CHANGES {
            let address = u8::try_from(change % 2).unwrap();
            feed.update(&list(&BTreeMap::from([(1, address)])));
        }
        assert_eq!(feed.changes.len(), MAX_CHANGES);
        assert!(feed.read(Some(id), None, Duration::ZERO, &mut ids).full);
        assert!(feed.read(Some(id), Some(7), Duration::ZERO, &mut ids).full);
        let kept = feed.read(Some(id), Some(8), Duration::ZERO, &mut ids);
        assert!(!kept.full);
    }

    #[test]
    fn addresses_are_sorted_into_cilium_s_fields() {
        let node = element(&NodeEntry {
            name: "default/a".into(),
            local: true,
            addresses: ["10.0.0.1", "fd00::1", "10.0.0.2"]
                .map(|ip| ip.parse().unwrap())
                .into(),
            pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
            health_addresses: vec!["fd00::7".parse().unwrap()],
            not_probed: vec!["fd00::1".parse().unwrap()],
        });
        let json = serde_json::to_value(node).unwrap();
        let expected = serde_json::json!({
            "name": "default/a",
            "primary-address": {
                "ipv4": { "ip": "10.0.0.1", "enabled": true, "alloc-range": "10.244.1.0/24" },
                "ipv6": { "ip": "fd00::1", "enabled": false },
            },
            "secondary-addresses": [
                { "ip": "10.0.0.2", "enabled": true, "alloc-range": "10.244.1.0/24" },
            ],
            "health-endpoint-address": { "ipv6": { "ip": "fd00::7", "enabled": true } },
        });
        assert_eq!(json, expected);
    }
}
