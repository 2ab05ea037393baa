//! The node set built from a table of Node objects, without the unusable entries.

use std::collections::BTreeMap;

use super::object::Record;
use crate::nodes::validate::Claims;
use crate::nodes::{Node, UnusableEntry};

/// The last known state of the cluster's Node objects.
#[derive(Debug, Default)]
pub(super) struct View {
    records: BTreeMap<String, Record>,
    /// The objects of a listing that is not complete yet.
    listed: BTreeMap<String, Record>,
}

impl View {
    /// Starts a listing.
    pub(super) fn begin_list(&mut self) {
        self.listed.clear();
    }

    pub(super) fn list(&mut self, record: Record) {
        self.listed.insert(record.name().to_owned(), record);
    }

    /// Completes a listing. Refuses an empty listing: a cluster has nodes, so its store must have been lost.
    pub(super) fn end_list(&mut self) -> Result<(), EmptyList> {
        if self.listed.is_empty() {
            return Err(EmptyList);
        }
        self.records = std::mem::take(&mut self.listed);
        Ok(())
    }

    /// Records a new or changed object. Returns whether the set may differ; most changes are mere heartbeats.
    pub(super) fn apply(&mut self, record: Record) -> bool {
        if self.records.get(record.name()) == Some(&record) {
            return false;
        }
        self.records.insert(record.name().to_owned(), record);
        true
    }

    /// Removes an object. Returns whether it existed.
    pub(super) fn delete(&mut self, name: &str) -> bool {
        self.records.remove(name).is_some()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Record> {
        self.records.get(name)
    }

    /// Returns the usable nodes, sorted by name, and the unusable objects.
    pub(super) fn nodes(&self, cluster: &str) -> (Vec<Node>, Vec<UnusableEntry>) {
        let mut records: Vec<_> = self.records.values().collect();
        records.sort_by_cached_key(|record| record.seniority());
        let mut claims = Claims::default();
        let mut nodes = Vec::with_capacity(records.len());
        let mut rejected = Vec::new();
        for record in records {
            match claims.take(record.entry(), cluster) {
                Ok(node) => nodes.push(node),
                Err(refused) => rejected.push(UnusableEntry {
                    key: record.name().to_owned(),
                    reason: refused.to_string(),
                }),
            }
        }
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        rejected.sort_by(|a, b| a.key.cmp(&b.key));
        (nodes, rejected)
    }
}

/// A listing without nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API server lists no nodes; its store may have been lost")]
pub(super) struct EmptyList;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::kubernetes::object::{IPV4_HEALTH_ANNOTATION, NodeObject};

    fn record(name: &str, day: u8, address: &str, cidr: &str, health: Option<&str>) -> Record {
        let object: NodeObject = serde_json::from_value(serde_json::json!({
            "metadata": {
                "name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z"),
                "annotations": health.map(|h| serde_json::json!({ IPV4_HEALTH_ANNOTATION: h })),
            },
            "spec": { "podCIDRs": [cidr] },
            "status": { "addresses": [{ "type": "InternalIP", "address": address }] },
        }))
        .unwrap();
        object.into()
    }

    #[test]
    fn objects_that_cannot_be_used_are_named_and_the_others_stand() {
        let mut view = View::default();
        for record in [
            record("good", 1, "10.0.0.1", "10.1.0.0/24", Some("10.1.0.7")),
            record("half", 2, "ten", "10.2.0.0/24", None),
            record("away", 3, "10.0.0.3", "10.3.0.0/24", Some("10.4.0.7")),
            record("joins", 5, "10.0.0.9", "10.9.0.0/24", None),
            record("a-late", 6, "10.0.0.9", "10.8.0.0/24", None),
        ] {
            assert!(view.apply(record));
        }
        let (nodes, rejected) = view.nodes("west");
        let names: Vec<_> = nodes.iter().map(Node::full_name).collect();
        assert_eq!(names, ["west/good", "west/joins"]);
        let rejected: Vec<_> = rejected
            .iter()
            .map(|rejected| (rejected.key.as_str(), rejected.reason.as_str()))
            .collect();
        assert_eq!(
            rejected,
            [
                (
                    "a-late",
                    "address 10.0.0.9 is listed twice, first at Node joins as west/joins"
                ),
                (
                    "away",
                    "health address 10.4.0.7 is in none of the pod CIDRs of west/away"
                ),
                ("half", "\"ten\" is not an IP address"),
            ]
        );
    }

    #[test]
    fn heartbeats_and_empty_lists_change_nothing() {
        let mut view = View::default();
        let node = || record("a", 1, "10.0.0.1", "10.1.0.0/24", None);
        view.begin_list();
        view.list(node());
        assert_eq!(view.end_list(), Ok(()));
        assert!(!view.apply(node()));
        view.begin_list();
        assert_eq!(view.end_list(), Err(EmptyList));
        assert_eq!(view.nodes("west").0.len(), 1);
        view.begin_list();
        view.list(node());
        assert_eq!(view.end_list(), Ok(()));
        assert!(view.delete("a"));
        assert!(!view.delete("a"));
    }
}
