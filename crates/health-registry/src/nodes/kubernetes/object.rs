//! The relevant fields of a Node object, and their conversion to a registry entry.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use kube::api::Object;
use serde::Deserialize;

use crate::nodes::Standing;
use crate::nodes::validate::{Entry, SourceText};

/// Key of the annotation with the IPv4 address of a node's health endpoint.
pub const IPV4_HEALTH_ANNOTATION: &str = "health-agent.io/ipv4-health-ip";
/// Key of the annotation with the IPv6 address of a node's health endpoint.
pub const IPV6_HEALTH_ANNOTATION: &str = "health-agent.io/ipv6-health-ip";
/// Key of the label with a node's zone, set by the cloud's controller.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Label that excludes a node from the mesh, whatever its value.
pub const EXCLUDE_LABEL: &str = "health-agent.io/exclude";

/// Selects the nodes that can be part of the mesh. Leaves out nodes that the operator excludes, and nodes that are not
/// hosts, where no agent can run.
pub(super) const SELECTOR: &str =
    "!health-agent.io/exclude,type!=virtual-kubelet,eks.amazonaws.com/compute-type!=fargate";

/// A Node object without the irrelevant fields, which make up most of it.
pub(super) type NodeObject = Object<NodeSpec, NodeStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeSpec {
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Vec<String>,
    /// Set by clusters before Kubernetes 1.16.
    #[serde(rename = "podCIDR", default)]
    pod_cidr: Option<String>,
    #[serde(default)]
    taints: Vec<Taint>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Taint {
    #[serde(default)]
    key: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct NodeStatus {
    #[serde(default)]
    addresses: Vec<NodeAddress>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

/// The relevant contents of a Node object, as written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    name: String,
    created: Option<Timestamp>,
    addresses: Vec<String>,
    secondary_addresses: Vec<String>,
    pod_cidrs: Vec<String>,
    health_addresses: Vec<String>,
    labels: BTreeMap<String, String>,
    is_deleting: bool,
    taints: Vec<String>,
    zone: Option<String>,
}

impl From<NodeObject> for Record {
    fn from(object: NodeObject) -> Self {
        let labels = object.metadata.labels.unwrap_or_default();
        let health_addresses = health_annotations(object.metadata.annotations.as_ref());
        let listed = object.status.unwrap_or_default().addresses;
        let of_kind = |kind: &str| -> Vec<String> {
            let matching = listed.iter().filter(|listed| listed.kind == kind);
            matching.map(|listed| listed.address.clone()).collect()
        };
        // Kubernetes' own order of preference for a node's address.
        let mut addresses = of_kind("InternalIP");
        let mut secondary_addresses = of_kind("ExternalIP");
        if addresses.is_empty() {
            addresses = std::mem::take(&mut secondary_addresses);
        }
        // A host with a single address may have that address listed as both kinds.
        secondary_addresses.retain(|address| !addresses.contains(address));
        let mut pod_cidrs = object.spec.pod_cidrs;
        if pod_cidrs.is_empty() {
            pod_cidrs.extend(object.spec.pod_cidr.filter(|cidr| !cidr.is_empty()));
        }
        let taints = object.spec.taints.into_iter();
        Self {
            is_deleting: object.metadata.deletion_timestamp.is_some(),
            taints: taints.map(|taint| taint.key).collect(),
            zone: labels.get(ZONE_LABEL).cloned(),
            name: object.metadata.name.unwrap_or_default(),
            created: object.metadata.creation_timestamp.map(|time| time.0),
            addresses,
            secondary_addresses,
            pod_cidrs,
            health_addresses,
            labels,
        }
    }
}

impl Record {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The values of the annotations, IPv4 first.
    pub(super) fn health_addresses(&self) -> &[String] {
        &self.health_addresses
    }

    /// Returns how the cluster sees the node.
    pub(super) fn standing(&self) -> Standing {
        Standing::Known {
            is_deleting: self.is_deleting,
            taints: self.taints.clone(),
            zone: self.zone.clone(),
        }
    }

    /// Sort key: if two nodes claim the same thing, the first node keeps it, so a node that joins takes nothing from
    /// earlier nodes.
    pub(super) fn seniority(&self) -> impl Ord {
        (self.created.is_none(), self.created, self.name.clone())
    }

    /// Converts the record to an entry. The location of each part is the object's name.
    pub(super) fn entry(&self) -> Entry<Arc<str>> {
        let place: Arc<str> = format!("Node {}", self.name).into();
        let written = |text: &String| SourceText {
            text: text.clone(),
            place: place.clone(),
        };
        Entry {
            name: written(&self.name),
            cluster: None,
            addresses: self.addresses.iter().map(written).collect(),
            secondary_addresses: self.secondary_addresses.iter().map(written).collect(),
            pod_cidrs: self.pod_cidrs.iter().map(written).collect(),
            health_addresses: self.health_addresses.iter().map(written).collect(),
            labels: self.labels.clone(),
            place: place.clone(),
        }
    }
}

/// Returns the values of the health annotations, IPv4 first.
pub(super) fn health_annotations(annotations: Option<&BTreeMap<String, String>>) -> Vec<String> {
    [IPV4_HEALTH_ANNOTATION, IPV6_HEALTH_ANNOTATION]
        .into_iter()
        .filter_map(|key| annotations?.get(key).cloned())
        .collect()
}

/// Returns the annotations for these addresses, one per family; `None` for an annotation that must be removed.
pub(super) fn annotations(health: &[IpAddr]) -> [(&'static str, Option<String>); 2] {
    let first = |is_wanted: fn(&IpAddr) -> bool| {
        let address = health.iter().find(|address| is_wanted(address));
        address.map(ToString::to_string)
    };
    [
        (IPV4_HEALTH_ANNOTATION, first(IpAddr::is_ipv4)),
        (IPV6_HEALTH_ANNOTATION, first(IpAddr::is_ipv6)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(object: serde_json::Value) -> Record {
        let object: NodeObject = serde_json::from_value(object).unwrap();
        Record::from(object)
    }

    #[test]
    fn a_node_object_is_read() {
        let record = record(serde_json::json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": "n1", "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": { "kubernetes.io/os": "linux" },
                "annotations": {
                    IPV6_HEALTH_ANNOTATION: "fd00:10:244:1::7",
                    IPV4_HEALTH_ANNOTATION: "10.244.1.7",
                    "node.alpha.kubernetes.io/ttl": "0",
                },
            },
            "spec": { "podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"] },
            "status": {
                "addresses": [
                    { "type": "Hostname", "address": "n1" },
                    { "type": "ExternalIP", "address": "192.0.2.1" },
                    { "type": "InternalIP", "address": "172.30.0.1" },
                    { "type": "ExternalIP", "address": "172.30.0.1" },
                    { "type": "InternalIP", "address": "fd00:30::1" },
                ],
                "images": [{ "names": ["pause"], "sizeBytes": 1 }],
            },
        }));
        assert_eq!(record.name, "n1");
        assert_eq!(record.addresses, ["172.30.0.1", "fd00:30::1"]);
        assert_eq!(record.secondary_addresses, ["192.0.2.1"]);
        assert_eq!(record.pod_cidrs, ["10.244.1.0/24", "fd00:10:244:1::/64"]);
        assert_eq!(record.health_addresses, ["10.244.1.7", "fd00:10:244:1::7"]);
        assert_eq!(record.entry().labels["kubernetes.io/os"], "linux");
    }

    #[test]
    fn an_external_address_serves_where_there_is_no_internal_one() {
        let record = record(serde_json::json!({
            "metadata": { "name": "n1" }, "spec": { "podCIDR": "10.244.1.0/24" },
            "status": { "addresses": [{ "type": "ExternalIP", "address": "192.0.2.1" }] },
        }));
        assert_eq!(record.addresses, ["192.0.2.1"]);
        assert!(record.secondary_addresses.is_empty());
        assert_eq!(record.pod_cidrs, ["10.244.1.0/24"]);
    }

    #[test]
    fn the_selector_leaves_out_what_the_label_says() {
        assert!(SELECTOR.starts_with(&format!("!{EXCLUDE_LABEL},")));
    }

    #[test]
    fn annotations_without_an_address_go() {
        let v6: IpAddr = "fd00::7".parse().unwrap();
        assert_eq!(
            annotations(&[v6]),
            [
                (IPV4_HEALTH_ANNOTATION, None),
                (IPV6_HEALTH_ANNOTATION, Some("fd00::7".to_owned()))
            ]
        );
    }
}
