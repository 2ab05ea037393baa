//! The objects in which the API server keeps identities and endpoints: their kinds, how they are read, and how they are
//! written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use health_model::address::parse_ip;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::sets;

const GROUP: &str = "health-agent.io";
const VERSION: &str = "v1";

/// Returns the kind of the objects that map a number to a label set.
pub(super) fn identity_kind() -> ApiResource {
    kind("HealthIdentity", "healthidentities")
}

/// Returns the kind of the objects that hold some endpoints of a node.
pub(super) fn slice_kind() -> ApiResource {
    kind("HealthEndpointSlice", "healthendpointslices")
}

fn kind(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

/// One version of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ObjectVersion {
    pub(super) uid: String,
    pub(super) resource_version: String,
}

impl ObjectVersion {
    fn of(object: &DynamicObject) -> Self {
        let metadata = &object.metadata;
        Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
        }
    }

    /// The version as a number that grows with each change; 0 if it is none.
    pub(super) fn order(&self) -> u64 {
        self.resource_version.parse().unwrap_or_default()
    }

    /// Whether this is certainly an earlier state of the server than `other`.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        (1..other.order()).contains(&self.order())
    }
}

/// An object that maps a number to a label set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IdentityObject {
    pub(super) name: String,
    /// The number, or why the name is none.
    pub(super) identity: Result<Identity, &'static str>,
    pub(super) version: ObjectVersion,
    pub(super) created: Option<Timestamp>,
    /// The label set, or why it gives no identity.
    pub(super) labels: Result<Arc<LabelSet>, String>,
    /// The mark: since when no node has used the identity.
    pub(super) unused_since: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct IdentitySpec {
    labels: LabelSet,
    unused_since: Option<Timestamp>,
}

impl From<DynamicObject> for IdentityObject {
    fn from(mut object: DynamicObject) -> Self {
        let version = ObjectVersion::of(&object);
        let name = object.metadata.name.take().unwrap_or_default();
        let spec: Result<IdentitySpec, _> = serde_json::from_value(object.data["spec"].take());
        let spec = spec.map_err(|error| format!("not an identity: {error}"));
        let unused_since = spec.as_ref().ok().and_then(|spec| spec.unused_since);
        Self {
            identity: number(&name),
            name,
            version,
            created: object.metadata.creation_timestamp.map(|time| time.0),
            labels: spec
                .and_then(|spec| sets::checked(spec.labels))
                .map(Arc::new),
            unused_since,
        }
    }
}

/// Parses a number, which must be in canonical form.
pub(super) fn number(text: &str) -> Result<Identity, &'static str> {
    let number = text.parse().map(Identity);
    let number = number.map_err(|_| "its name is not a number")?;
    if number.is_of_cluster() && number.to_string() == text {
        Ok(number)
    } else {
        Err("its name is not a cluster identity; expected 256 to 65535")
    }
}

/// Returns a new object that maps a number to a label set.
pub(super) fn new_identity(identity: Identity, labels: &LabelSet) -> DynamicObject {
    let spec = json!({ "spec": { "labels": labels } });
    DynamicObject::new(&identity.to_string(), &identity_kind()).data(spec)
}

/// Returns the merge patch that marks an identity as unused, or removes the mark. It fails for any other version.
pub(super) fn mark_patch(version: &ObjectVersion, unused_since: Option<Timestamp>) -> Value {
    json!({
        "metadata": { "uid": version.uid, "resourceVersion": version.resource_version },
        "spec": { "unusedSince": unused_since.map(|since| format!("{since:.0}")) },
    })
}

/// What tells the entries of a node's slices apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EntryKey {
    /// The address of an endpoint.
    Address(IpAddr),
    /// An identity of endpoints without an address.
    Reference(Identity),
}

/// The contents of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) identity: Identity,
    /// The address of the node, if the entry is that of an address.
    pub(super) node: Option<IpAddr>,
}

/// The entries of a slice.
pub(super) type Entries = BTreeMap<EntryKey, Entry>;

/// The node of a slice, and the slice's index among that node's slices.
pub(super) type SliceKey = (String, u32);

/// An object that holds some endpoints of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SliceObject {
    pub(super) name: String,
    pub(super) version: ObjectVersion,
    /// The contents, or why they cannot be used.
    pub(super) entries: Result<Entries, String>,
}

#[derive(Deserialize, Serialize)]
struct SliceSpec {
    node: String,
    /// The number of entries, which `kubectl get` shows.
    count: usize,
    endpoints: Vec<EndpointEntry>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointEntry {
    identity: Identity,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_address: Option<String>,
}

impl EndpointEntry {
    fn of((key, entry): (&EntryKey, &Entry)) -> Self {
        let address = match key {
            EntryKey::Address(ip) => Some(ip.to_string()),
            EntryKey::Reference(_) => None,
        };
        Self {
            identity: entry.identity,
            address,
            node_address: entry.node.map(|node| node.to_string()),
        }
    }

    fn read(self) -> Result<(EntryKey, Entry), String> {
        let identity = self.identity;
        if !identity.is_of_endpoints() {
            return Err(format!("identity {identity} is not valid for endpoints"));
        }
        let ip = |text: String| parse_ip(&text).map_err(|_| format!("{text:?} is not an address"));
        let address = self.address.map(ip).transpose()?;
        let node = self.node_address.map(ip).transpose()?;
        let key = match (address, node) {
            (Some(address), Some(_)) => EntryKey::Address(address),
            (None, None) => EntryKey::Reference(identity),
            _ => return Err("an address without nodeAddress, or the reverse".to_owned()),
        };
        Ok((key, Entry { identity, node }))
    }
}

impl From<DynamicObject> for SliceObject {
    fn from(mut object: DynamicObject) -> Self {
        let version = ObjectVersion::of(&object);
        let name = object.metadata.name.take().unwrap_or_default();
        let spec: Result<SliceSpec, _> = serde_json::from_value(object.data["spec"].take());
        let entries = spec
            .map_err(|error| format!("not a slice of endpoints: {error}"))
            .and_then(|spec| {
                let (node, _) = slice_key(&name).ok_or("its name is not NODE-NUMBER")?;
                if node != spec.node {
                    return Err(format!("its name is not that of a slice of {}", spec.node));
                }
                spec.endpoints
                    .into_iter()
                    .map(EndpointEntry::read)
                    .collect()
            });
        Self {
            name,
            version,
            entries,
        }
    }
}

/// Returns the name of a node's slice.
pub(super) fn slice_name(node: &str, index: u32) -> String {
    format!("{node}-{index}")
}

/// Parses the name of a slice.
pub(super) fn slice_key(name: &str) -> Option<SliceKey> {
    let (node, index) = name.rsplit_once('-')?;
    let index = index.parse().ok()?;
    (slice_name(node, index) == name).then(|| (node.to_owned(), index))
}

/// Returns the `spec` of a node's slice.
pub(super) fn slice_spec(node: &str, entries: &Entries) -> Value {
    json!(SliceSpec {
        node: node.to_owned(),
        count: entries.len(),
        endpoints: entries.iter().map(EndpointEntry::of).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, spec: Value) -> IdentityObject {
        let data = json!({ "spec": spec });
        DynamicObject::new(name, &identity_kind()).data(data).into()
    }

    fn slice(name: &str, spec: Value) -> SliceObject {
        let data = json!({ "spec": spec });
        DynamicObject::new(name, &slice_kind()).data(data).into()
    }

    #[test]
    fn objects_are_read_as_they_are_written() {
        let labels = LabelSet::new(["k8s:app=a".parse().unwrap()]).unwrap();
        let read = IdentityObject::from(new_identity(Identity(300), &labels));
        assert_eq!(read.identity, Ok(Identity(300)));
        assert_eq!(read.labels, Ok(Arc::new(labels)));
        let node = Some("172.30.0.1".parse().unwrap());
        let address = EntryKey::Address("fd00::7".parse().unwrap());
        let identity = Identity(300);
        let entries = Entries::from([
            (address, Entry { identity, node }),
            (
                EntryKey::Reference(identity),
                Entry {
                    identity,
                    node: None,
                },
            ),
        ]);
        let read = slice("n-1-0", slice_spec("n-1", &entries));
        assert_eq!(read.entries, Ok(entries));
        assert_eq!(slice_key("n-1-0"), Some(("n-1".to_owned(), 0)));
    }

    #[test]
    fn what_would_give_a_wrong_identity_is_not_read() {
        for name in ["255", "65536", "0300", "+300", "", "hello"] {
            let labels = json!({ "labels": ["k8s:a=1"] });
            assert!(identity(name, labels).identity.is_err(), "{name}");
        }
        for spec in [
            json!(null),
            json!({}),
            json!({ "labels": [] }),
            json!({ "labels": ["reserved:host"] }),
            json!({ "labels": ["k8s:a=1", "reserved:host"] }),
            json!({ "labels": ["cidr:10.0.0.0/8"] }),
            json!({ "labels": ["a=1", "a=2"] }),
        ] {
            assert!(identity("300", spec.clone()).labels.is_err(), "{spec}");
        }
        let entry = |entry: Value| json!({ "node": "n", "count": 1, "endpoints": [entry] });
        for (name, spec) in [
            ("n-0", json!({})),
            ("m-0", entry(json!({ "identity": 300 }))),
            ("n-00", entry(json!({ "identity": 300 }))),
            ("n-0", entry(json!({ "identity": 1 }))),
            ("n-0", entry(json!({ "identity": 16_777_217 }))),
            (
                "n-0",
                entry(json!({ "identity": 300, "address": "10.0.0.1" })),
            ),
            (
                "n-0",
                entry(json!({ "identity": 300, "address": "ten", "nodeAddress": "10.0.0.1" })),
            ),
        ] {
            assert!(slice(name, spec.clone()).entries.is_err(), "{name} {spec}");
        }
    }
}
