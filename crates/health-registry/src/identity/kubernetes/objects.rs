//! The objects in which the API server keeps identities and endpoints: their kinds, how they are read, and how they are
//! written.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use health_model::address::parse_ip;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::EndpointDetails;
use super::super::sets;
use super::super::view::LabelsDigest;

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
    /// The id of an endpoint with addresses.
    Endpoint(u16),
    /// An identity of endpoints without an address.
    Reference(Identity),
}

/// The contents of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) identity: Identity,
    /// The digest of the identity's labels, by which readers notice that its number means other labels to them. Entries
    /// with addresses and an identity of the cluster have one.
    pub(super) digest: Option<LabelsDigest>,
    /// The endpoint's addresses, and the address of the node by which other nodes reach each.
    pub(super) addresses: BTreeMap<IpAddr, IpAddr>,
    /// Information for users; agents ignore it.
    pub(super) details: Option<EndpointDetails>,
}

impl Entry {
    /// The entry of endpoints without an address.
    pub(super) const fn reference(identity: Identity) -> Self {
        Self {
            identity,
            digest: None,
            addresses: BTreeMap::new(),
            details: None,
        }
    }

    /// Whether agents read the same from both entries.
    pub(super) fn is_same_to_agents(&self, other: &Self) -> bool {
        let read = |entry: &Self| (entry.identity, entry.digest);
        read(self) == read(other) && self.addresses == other.addresses
    }
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
    /// The entries that can be read; `None` if the object is no slice.
    pub(super) entries: Option<Entries>,
    /// The identities of entries that cannot be read, such as entries of a newer agent.
    pub(super) unread: BTreeSet<Identity>,
    /// Why the object, or one of its entries, cannot be read.
    pub(super) problem: Option<String>,
    /// Whether it has an owner, which should be its Node.
    pub(super) has_owner: bool,
}

#[derive(Deserialize, Serialize)]
struct SliceSpec {
    node: String,
    /// A summary of the entries, which `kubectl get` shows.
    #[serde(flatten)]
    summary: Summary,
    /// Each an [`EndpointEntry`].
    endpoints: Vec<Value>,
}

/// A summary of the entries of a slice.
#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct Summary {
    /// The number of entries.
    count: usize,
    /// The number of endpoints in state `ready`.
    ready: usize,
    /// The first pods, and the number of all others.
    pods: String,
}

impl Summary {
    /// Maximum number of pods that are named.
    const NAMED: usize = 3;

    fn of(entries: &Entries) -> Self {
        let details = || entries.values().filter_map(|entry| entry.details.as_ref());
        let pods: Vec<_> = details()
            .filter_map(|details| details.pod.as_deref())
            .collect();
        let named = pods[..pods.len().min(Self::NAMED)].join(",");
        let more = pods.len().saturating_sub(Self::NAMED);
        Self {
            count: entries.len(),
            ready: details().filter(|details| details.state == READY).count(),
            pods: match more {
                0 => named,
                more => format!("{named} + {more} more..."),
            },
        }
    }
}

/// The state of an endpoint whose datapath is up to date.
const READY: &str = "ready";

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointEntry {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u16>,
    identity: Identity,
    /// The [`LabelsDigest`], as 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    labels_digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    addresses: Vec<AddressEntry>,
}

#[derive(Deserialize, Serialize)]
struct AddressEntry {
    ip: String,
    node: String,
}

impl EndpointEntry {
    fn of((key, entry): (&EntryKey, &Entry)) -> Self {
        let id = match key {
            EntryKey::Endpoint(id) => Some(*id),
            EntryKey::Reference(_) => None,
        };
        let addresses = entry.addresses.iter().map(|(ip, node)| AddressEntry {
            ip: ip.to_string(),
            node: node.to_string(),
        });
        let details = entry.details.clone();
        Self {
            id,
            identity: entry.identity,
            labels_digest: entry
                .digest
                .map(|LabelsDigest(digest)| format!("{digest:016x}")),
            state: details.as_ref().map(|details| details.state.clone()),
            pod: details.and_then(|details| details.pod),
            addresses: addresses.collect(),
        }
    }

    fn read(self) -> Result<(EntryKey, Entry), String> {
        let identity = self.identity;
        if !identity.is_of_endpoints() {
            return Err(format!("identity {identity} is not valid for endpoints"));
        }
        let ip = |text: String| parse_ip(&text).map_err(|_| format!("{text:?} is not an address"));
        let addresses = self.addresses.into_iter();
        let addresses: Result<BTreeMap<_, _>, String> = addresses
            .map(|address| Ok((ip(address.ip)?, ip(address.node)?)))
            .collect();
        let addresses = addresses?;
        let key = match self.id {
            Some(id) => EntryKey::Endpoint(id),
            None if addresses.is_empty() => EntryKey::Reference(identity),
            None => return Err("addresses without the id of their endpoint".to_owned()),
        };
        let digest = self.labels_digest.map(|text| digest(&text)).transpose()?;
        if digest.is_none() && identity.is_of_cluster() && !addresses.is_empty() {
            return Err(format!("no labelsDigest of identity {identity}"));
        }
        let pod = self.pod;
        let entry = Entry {
            identity,
            digest,
            addresses,
            details: self.state.map(|state| EndpointDetails { pod, state }),
        };
        Ok((key, entry))
    }
}

impl From<DynamicObject> for SliceObject {
    fn from(mut object: DynamicObject) -> Self {
        let version = ObjectVersion::of(&object);
        let name = object.metadata.name.take().unwrap_or_default();
        let owners = object.metadata.owner_references.take();
        let has_owner = owners.is_some_and(|owners| !owners.is_empty());
        let spec: Result<SliceSpec, _> = serde_json::from_value(object.data["spec"].take());
        let endpoints = spec
            .map_err(|error| format!("not a slice of endpoints: {error}"))
            .and_then(|spec| {
                let (node, _) = slice_key(&name).ok_or("its name is not NODE-NUMBER")?;
                match node == spec.node {
                    true => Ok(spec.endpoints),
                    false => Err(format!("its name is not that of a slice of {}", spec.node)),
                }
            });
        let mut slice = Self {
            name,
            version,
            entries: None,
            unread: BTreeSet::new(),
            problem: None,
            has_owner,
        };
        match endpoints {
            Ok(endpoints) => slice.read(endpoints),
            Err(reason) => slice.problem = Some(reason),
        }
        slice
    }
}

impl SliceObject {
    /// Reads the entries one by one: an unreadable one takes nothing from the others.
    fn read(&mut self, endpoints: Vec<Value>) {
        let mut entries = Entries::new();
        for endpoint in endpoints {
            let identity = endpoint["identity"].as_u64();
            let identity = identity.and_then(|number| u32::try_from(number).ok().map(Identity));
            let entry = serde_json::from_value(endpoint)
                .map_err(|error| error.to_string())
                .and_then(EndpointEntry::read);
            match entry {
                Ok((key, entry)) => drop(entries.insert(key, entry)),
                Err(reason) => {
                    self.unread
                        .extend(identity.filter(|one| one.is_of_cluster()));
                    self.problem
                        .get_or_insert_with(|| format!("an entry cannot be read: {reason}"));
                }
            }
        }
        self.entries = Some(entries);
    }
}

/// Parses a digest as [`EndpointEntry`] has it.
fn digest(text: &str) -> Result<LabelsDigest, String> {
    let digest = u64::from_str_radix(text, 16).ok();
    let digest = digest.filter(|digest| format!("{digest:016x}") == text);
    digest
        .map(LabelsDigest)
        .ok_or_else(|| format!("labelsDigest {text:?} is not 16 hexadecimal digits"))
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
        summary: Summary::of(entries),
        endpoints: entries
            .iter()
            .map(|entry| json!(EndpointEntry::of(entry)))
            .collect(),
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
        let node: IpAddr = "172.30.0.1".parse().unwrap();
        let addresses = ["10.244.1.7", "fd00::7"].map(|ip| (ip.parse().unwrap(), node));
        let identity = Identity(300);
        let pod = Some("shop/web".to_owned());
        let state = "ready".to_owned();
        let endpoint = Entry {
            identity,
            digest: Some(LabelsDigest(0x7f)),
            addresses: addresses.into(),
            details: Some(EndpointDetails { pod, state }),
        };
        let entries = Entries::from([
            (EntryKey::Endpoint(7), endpoint),
            (EntryKey::Reference(identity), Entry::reference(identity)),
        ]);
        let spec = slice_spec("n-1", &entries);
        assert_eq!(spec["endpoints"][0]["labelsDigest"], "000000000000007f");
        let read = slice("n-1-0", spec);
        assert_eq!((read.entries, read.problem), (Some(entries), None));
        assert_eq!(slice_key("n-1-0"), Some(("n-1".to_owned(), 0)));
    }

    #[test]
    fn a_slice_summarizes_its_endpoints() {
        let entry = |id: u16| {
            let details = EndpointDetails {
                pod: (id > 0).then(|| format!("shop/web-{id}")),
                state: if id.is_multiple_of(2) {
                    "ready"
                } else {
                    "regenerating"
                }
                .to_owned(),
            };
            let entry = Entry {
                details: Some(details),
                ..Entry::reference(Identity(300))
            };
            (EntryKey::Endpoint(id), entry)
        };
        let summary = |ids: std::ops::Range<u16>| {
            let spec = slice_spec("n", &ids.map(entry).collect());
            let pods = spec["pods"].as_str().map(str::to_owned);
            (spec["count"].as_u64(), spec["ready"].as_u64(), pods)
        };
        let pods = "shop/web-1,shop/web-2".to_owned();
        assert_eq!(summary(0..3), (Some(3), Some(2), Some(pods)));
        let pods = "shop/web-1,shop/web-2,shop/web-3 + 6 more...".to_owned();
        assert_eq!(summary(0..10), (Some(10), Some(5), Some(pods)));
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
        let address = |ip: &str| json!({ "ip": ip, "node": "10.0.0.2" });
        for (name, spec) in [
            ("n-0", json!({})),
            ("m-0", entry(json!({ "identity": 300 }))),
            ("n-00", entry(json!({ "identity": 300 }))),
            ("n-0", entry(json!({ "identity": 1 }))),
            ("n-0", entry(json!({ "identity": 16_777_217 }))),
            (
                "n-0",
                entry(json!({ "identity": 300, "addresses": [address("10.0.0.1")] })),
            ),
            (
                "n-0",
                entry(json!({ "id": 7, "identity": 300, "addresses": [address("ten")] })),
            ),
            ("n-0", entry(json!({ "id": 70_000, "identity": 300 }))),
        ] {
            let read = slice(name, spec.clone());
            assert!(read.problem.is_some(), "{name} {spec}");
            assert!(read.entries.unwrap_or_default().is_empty(), "{name} {spec}");
        }
    }

    #[test]
    fn an_entry_that_cannot_be_read_takes_nothing_from_the_others_and_is_a_reference() {
        let addresses = json!([{ "ip": "10.0.0.1", "node": "10.0.0.2" }]);
        let digest = "00000000000000ff";
        let unreadable = [
            json!({ "id": 2, "identity": 301, "addresses": addresses }),
            json!({ "id": 3, "identity": 302, "labelsDigest": "ff", "addresses": addresses }),
            json!({ "id": 4, "identity": 303, "labelsDigest": digest, "addresses": { "new": 1 } }),
            json!({ "id": "5", "identity": 304 }),
            json!({ "id": 6, "identity": "305" }),
            json!(7),
        ];
        let mut endpoints = vec![
            json!({ "id": 1, "identity": 300, "labelsDigest": digest, "addresses": addresses }),
            json!({ "id": 8, "identity": Identity::INIT, "addresses": addresses }),
        ];
        endpoints.extend(unreadable);
        let read = slice("n-0", json!({ "node": "n", "endpoints": endpoints }));
        let readable: Vec<_> = read.entries.unwrap().into_keys().collect();
        assert_eq!(readable, [1, 8].map(EntryKey::Endpoint));
        assert!(read.unread.into_iter().eq((301..=304).map(Identity)));
        assert!(read.problem.unwrap().contains("identity 301"));
    }
}
