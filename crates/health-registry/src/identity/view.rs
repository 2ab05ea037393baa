//! All that is known about the cluster's identities and addresses: built from the contents of a store, and published as
//! complete snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use ipnet::IpNet;
use tokio::sync::watch;

use super::lasting::LastingMap;
use crate::nodes::{Staleness, UnusableEntry};

/// Maximum number of unusable entries of a store that are reported individually.
pub(super) const MOST_REJECTED: usize = 100;

/// All identities at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identities {
    /// Labels by identity: the reserved identities, the cluster's, and this node's own for CIDRs. Stays the same `Arc`
    /// unless an identity is added, removed or changed.
    pub labels: Arc<BTreeMap<Identity, Arc<LabelSet>>>,
    /// The nodes that use an identity, sorted; only for identities of the cluster.
    pub references: BTreeMap<Identity, Vec<String>>,
    /// The store of the cluster's identities, as written in the settings.
    pub store: String,
    /// Since when and why the store cannot be used; its last contents remain in force meanwhile.
    pub stale: Option<Staleness>,
    /// Entries of the store that cannot be used.
    pub rejected: Vec<UnusableEntry>,
}

/// The addresses of the cluster's endpoints at one moment, as their nodes announced them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses(pub BTreeMap<IpNet, AddressAnnouncement>);

/// A node's announcement of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressAnnouncement {
    /// The endpoint's identity.
    pub identity: Identity,
    /// The address of the node that the endpoint is on.
    pub node: IpAddr,
    /// That node's name.
    pub owner: String,
}

/// The identities that this node holds for its endpoints.
pub type HeldIdentities = BTreeMap<Arc<LabelSet>, Identity>;

/// Times that a view uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settle {
    /// How long an entry stays after it was seen to disappear: its node may restore it.
    pub(super) seen: Duration,
    /// How long an entry stays that was missing when the store came back: a store may come back without its data, and
    /// agents then need time to write theirs.
    pub(super) unseen: Duration,
}

/// The first 64 bits of the SHA-256 of a label set's JSON form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LabelsDigest(pub(super) u64);

/// The label set of an identity.
#[derive(Debug)]
struct Labelled {
    labels: Arc<LabelSet>,
    /// `None` if no announcement names one.
    digest: Option<LabelsDigest>,
}

/// An announcement as the store has it.
#[derive(Debug)]
struct Announced {
    /// Greater for later announcements.
    order: u64,
    announcement: AddressAnnouncement,
    /// The digest of the label set that the announcement means; `None` if the store keeps numbers and announcements
    /// consistent.
    digest: Option<LabelsDigest>,
}

/// The contents of one store. Times count from any fixed moment.
#[derive(Debug)]
pub(super) struct View {
    settle: Settle,
    identities: LastingMap<Identity, Labelled>,
    references: BTreeMap<Identity, BTreeSet<String>>,
    /// The announcements by address and owner.
    addresses: LastingMap<(IpAddr, String), Announced>,
}

impl View {
    pub(super) fn new(settle: Settle) -> Self {
        Self {
            settle,
            identities: LastingMap::default(),
            references: BTreeMap::new(),
            addresses: LastingMap::default(),
        }
    }

    /// Starts to replace all entries: those not in `identities` and `addresses` are removed after a while.
    pub(super) fn retain(
        &mut self,
        identities: &BTreeSet<Identity>,
        addresses: &BTreeSet<(IpAddr, String)>,
        now: Duration,
    ) {
        self.retain_identities(identities, now);
        self.retain_addresses(addresses, now);
    }

    /// Starts to replace all identities, see [`Self::retain`].
    pub(super) fn retain_identities(&mut self, identities: &BTreeSet<Identity>, now: Duration) {
        let at = now + self.settle.unseen;
        self.identities.retain(at, |key| identities.contains(key));
    }

    /// Starts to replace all addresses and references, see [`Self::retain`].
    pub(super) fn retain_addresses(
        &mut self,
        addresses: &BTreeSet<(IpAddr, String)>,
        now: Duration,
    ) {
        let at = now + self.settle.unseen;
        self.addresses.retain(at, |key| addresses.contains(key));
        self.references.clear();
    }

    /// Notes that the store is back: other nodes may have been cut off too, so entries that are about to be removed get
    /// more time.
    pub(super) fn resume(&mut self, now: Duration) {
        self.identities.prolong(now + self.settle.seen);
        self.addresses.prolong(now + self.settle.seen);
    }

    /// Adds an identity. `digest` is that of the labels if announcements name theirs.
    pub(super) fn put_identity(
        &mut self,
        identity: Identity,
        labels: Arc<LabelSet>,
        digest: Option<LabelsDigest>,
    ) {
        self.identities.put(identity, Labelled { labels, digest });
    }

    pub(super) fn remove_identity(&mut self, identity: Identity, now: Duration) {
        self.identities.remove(&identity, now + self.settle.seen);
    }

    pub(super) fn put_reference(&mut self, identity: Identity, node: &str) {
        let nodes = self.references.entry(identity).or_default();
        nodes.insert(node.to_owned());
    }

    pub(super) fn remove_reference(&mut self, identity: Identity, node: &str) {
        if let Some(nodes) = self.references.get_mut(&identity) {
            nodes.remove(node);
            if nodes.is_empty() {
                self.references.remove(&identity);
            }
        }
    }

    /// Adds an announcement. `order` is greater for later announcements. With a `digest`, it counts only while the
    /// identity has the label set with this digest.
    pub(super) fn put_address(
        &mut self,
        ip: IpAddr,
        order: u64,
        announcement: AddressAnnouncement,
        digest: Option<LabelsDigest>,
    ) {
        let key = (ip, announcement.owner.clone());
        let announced = Announced {
            order,
            announcement,
            digest,
        };
        self.addresses.put(key, announced);
    }

    pub(super) fn remove_address(&mut self, ip: IpAddr, owner: &str, now: Duration) {
        let at = now + self.settle.seen;
        self.addresses.remove(&(ip, owner.to_owned()), at);
    }

    /// Drops expired entries. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        let identities = self.identities.expire(now);
        let addresses = self.addresses.expire(now);
        identities || addresses
    }

    /// When [`Self::expire`] next has anything to do.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        let identities = self.identities.next_expiry();
        let addresses = self.addresses.next_expiry();
        identities.into_iter().chain(addresses).min()
    }

    /// The labels of an identity that is in the store.
    pub(super) fn present(&self, identity: Identity) -> Option<&Arc<LabelSet>> {
        Some(&self.identities.present(&identity)?.labels)
    }

    /// Whether a number is known, even if only for a while longer.
    pub(super) fn is_known(&self, identity: Identity) -> bool {
        self.identities.contains(&identity)
    }

    /// The labels of an identity, even if it is known only for a while longer.
    pub(super) fn labels(&self, identity: Identity) -> Option<&Arc<LabelSet>> {
        Some(&self.identities.get(&identity)?.labels)
    }

    /// All known identities.
    pub(super) fn identities(&self) -> impl Iterator<Item = (&Identity, &Arc<LabelSet>)> {
        let identities = self.identities.iter();
        identities.map(|(identity, labelled)| (identity, &labelled.labels))
    }

    /// Whether any node uses the identity.
    pub(super) fn is_referenced(&self, identity: Identity) -> bool {
        self.references.contains_key(&identity)
    }

    /// Returns all addresses. If two nodes announce an address, the later announcement wins. An address whose number
    /// means other labels here than to its node is left out: no identity is better than a wrong one.
    pub(super) fn addresses(&self) -> Addresses {
        let mut newest: BTreeMap<IpNet, &Announced> = BTreeMap::new();
        for ((ip, _), announced) in self.addresses.iter() {
            let known = newest.entry(IpNet::from(*ip)).or_insert(announced);
            if known.order < announced.order {
                *known = announced;
            }
        }
        let is_agreed = |one: &Announced| {
            let known = self.identities.get(&one.announcement.identity);
            one.digest.is_none() || known.is_some_and(|known| known.digest == one.digest)
        };
        let agreed = newest.into_iter().filter(|(_, one)| is_agreed(one));
        Addresses(
            agreed
                .map(|(ip, one)| (ip, one.announcement.clone()))
                .collect(),
        )
    }
}

/// Publishes the contents of the store and this node's own CIDRs.
#[derive(Debug)]
pub(super) struct Hub {
    local: Mutex<BTreeMap<Identity, Arc<LabelSet>>>,
    identities: watch::Sender<Arc<Identities>>,
    addresses: watch::Sender<Arc<Addresses>>,
    held: watch::Sender<Arc<HeldIdentities>>,
}

impl Hub {
    /// Starts with only the reserved identities, for a store that has not been heard yet.
    pub(super) fn new(store: String, stale: Staleness) -> Self {
        let identities = Identities {
            labels: Arc::new(with_reserved(BTreeMap::new())),
            references: BTreeMap::new(),
            store,
            stale: Some(stale),
            rejected: Vec::new(),
        };
        Self {
            local: Mutex::default(),
            identities: watch::Sender::new(Arc::new(identities)),
            addresses: watch::Sender::default(),
            held: watch::Sender::default(),
        }
    }

    pub(super) fn identities(&self) -> watch::Receiver<Arc<Identities>> {
        self.identities.subscribe()
    }

    pub(super) fn addresses(&self) -> watch::Receiver<Arc<Addresses>> {
        self.addresses.subscribe()
    }

    pub(super) fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.held.subscribe()
    }

    /// Publishes the current contents of a view.
    pub(super) fn publish(
        &self,
        view: &View,
        rejected: Vec<UnusableEntry>,
        stale: Option<Staleness>,
    ) {
        let local = self.local();
        let known = self.identities.borrow().clone();
        let of_cluster = view.identities();
        let of_cluster = of_cluster.map(|(id, labels)| (*id, labels.clone()));
        let mut labels = with_reserved(of_cluster.collect());
        labels.extend(local.clone());
        let references = view.references.iter();
        let next = Identities {
            labels: unless_same(&known.labels, labels),
            references: references
                .map(|(identity, nodes)| (*identity, nodes.iter().cloned().collect()))
                .collect(),
            store: known.store.clone(),
            stale,
            rejected,
        };
        // Published first, so that a reader that waits for identities finds the addresses updated too.
        let addresses = view.addresses();
        self.addresses.send_if_modified(|known| {
            let is_other = **known != addresses;
            if is_other {
                *known = Arc::new(addresses);
            }
            is_other
        });
        if *known != next {
            self.identities.send_replace(Arc::new(next));
        }
    }

    /// Whether the store cannot be used.
    pub(super) fn is_stale(&self) -> bool {
        self.identities.borrow().stale.is_some()
    }

    /// Publishes that the store cannot be used. The known contents stay in force.
    pub(super) fn publish_stale(&self, stale: Staleness) {
        self.identities.send_modify(|known| {
            let next = Identities {
                stale: Some(stale),
                ..(**known).clone()
            };
            *known = Arc::new(next);
        });
    }

    /// Publishes this node's own identities. Their labels replace those of reserved identities.
    pub(super) fn publish_local(&self, next: BTreeMap<Identity, Arc<LabelSet>>) {
        let mut local = self.local();
        *local = next;
        self.identities.send_modify(|known| {
            let of_cluster = known.labels.iter().filter(|(id, _)| !id.is_local());
            let of_cluster = of_cluster.map(|(id, labels)| (*id, labels.clone()));
            let mut labels = with_reserved(of_cluster.collect());
            labels.extend(local.clone());
            let next = Identities {
                labels: unless_same(&known.labels, labels),
                ..(**known).clone()
            };
            *known = Arc::new(next);
        });
    }

    /// Publishes the identities that this node holds.
    pub(super) fn publish_held(&self, held: HeldIdentities) {
        self.held.send_if_modified(|known| {
            let is_other = **known != held;
            if is_other {
                *known = Arc::new(held);
            }
            is_other
        });
    }

    /// Held while a snapshot is built, so that two builders do not undo each other's work.
    fn local(&self) -> MutexGuard<'_, BTreeMap<Identity, Arc<LabelSet>>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Labels = BTreeMap<Identity, Arc<LabelSet>>;

fn with_reserved(mut labels: Labels) -> Labels {
    for identity in Identity::all_reserved() {
        if let Some(set) = identity.reserved_labels() {
            labels.insert(identity, Arc::new(set));
        }
    }
    labels
}

fn unless_same(known: &Arc<Labels>, next: Labels) -> Arc<Labels> {
    if **known == next {
        known.clone()
    } else {
        Arc::new(next)
    }
}
