//! A node in JSON, in the format of stores and of this agent's cache.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Node;
use super::validate::{Entry, SourceText};

/// The serialized form of a node; see [`Node`]. The format is public: fields may be added, existing fields keep their
/// meaning, and readers ignore unknown fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    name: String,
    cluster: String,
    addresses: Vec<String>,
    #[serde(
        rename = "secondaryAddresses",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    secondary_addresses: Vec<String>,
    #[serde(rename = "podCIDRs", default, skip_serializing_if = "Vec::is_empty")]
    pod_cidrs: Vec<String>,
    #[serde(
        rename = "healthAddresses",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    health_addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
}

impl From<&Node> for NodeRecord {
    fn from(node: &Node) -> Self {
        fn texts<T: ToString>(list: &[T]) -> Vec<String> {
            list.iter().map(T::to_string).collect()
        }
        Self {
            name: node.name.clone(),
            cluster: node.cluster.clone(),
            addresses: texts(&node.addresses),
            secondary_addresses: texts(&node.secondary_addresses),
            pod_cidrs: texts(&node.pod_cidrs),
            health_addresses: texts(&node.health_addresses),
            labels: node.labels.clone(),
        }
    }
}

impl NodeRecord {
    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of the node's cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Converts the record, found at `place`, to an entry that has yet to be checked.
    pub(crate) fn into_entry(self, place: &str) -> Entry<String> {
        let written = |text: String| SourceText {
            text,
            place: place.to_owned(),
        };
        let all = |list: Vec<String>| list.into_iter().map(written).collect();
        Entry {
            place: place.to_owned(),
            name: written(self.name),
            cluster: Some(written(self.cluster)),
            addresses: all(self.addresses),
            secondary_addresses: all(self.secondary_addresses),
            pod_cidrs: all(self.pod_cidrs),
            health_addresses: all(self.health_addresses),
            labels: self.labels,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::validate::Claims;

    #[test]
    fn a_node_survives_its_record_and_unknown_fields_are_passed_over() {
        let text = r#"{
            "name": "hnode1", "cluster": "default", "since": [1, {"two": null}],
            "addresses": ["172.30.0.1", "fd00:30::1"], "podCIDRs": ["10.244.1.0/24"],
            "healthAddresses": ["10.244.1.7"], "secondaryAddresses": ["192.168.0.1"],
            "labels": {"zone": "a"}
        }"#;
        let record: NodeRecord = serde_json::from_str(text).expect("a record");
        let entry = record.clone().into_entry("here");
        let node = Claims::default().take(entry, "other").expect("a node");
        assert_eq!(node.full_name(), "default/hnode1");
        assert_eq!(NodeRecord::from(&node), record);
        let json = serde_json::to_string(&record).expect("plain data");
        assert_eq!(
            json,
            r#"{"name":"hnode1","cluster":"default","addresses":["172.30.0.1","fd00:30::1"],"secondaryAddresses":["192.168.0.1"],"podCIDRs":["10.244.1.0/24"],"healthAddresses":["10.244.1.7"],"labels":{"zone":"a"}}"#
        );
    }
}
