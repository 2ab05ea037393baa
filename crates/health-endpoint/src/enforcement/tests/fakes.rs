//! A fake kernel and a fake store of identities. Both outlive the agent, and record calls that must never happen.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, ready};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS};
use health_common::identity::{LOCAL, LOCAL_NODE};
use health_common::ipcache::IpcacheEntry;
use health_datapath::policy::{PolicyError, PolicyMatch};
use health_datapath::{DatapathError, TrieError, Workload};
use health_model::identity::Identity;
use health_model::labels::{CIDR, Label, LabelSet};
use health_net::KernelError;
use health_registry::identity::{
    AddressAnnouncement, Addresses, HeldIdentities, Identities, LocalNeeds, LocalNumbers,
};
use health_registry::nodes::Staleness;
use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::watch;

use super::super::backends::{Cluster, Prefixes, Programs, Tables};
use super::super::{HostRoutes, lock};
use crate::identities::{Hold, IdentitySource, IdentityUnavailable};

/// This node's name in the store.
pub(super) const NODE: &str = "n1";

/// The verdicts of a table.
pub(in crate::enforcement) type Entries = BTreeMap<PolicyMatch, u8>;

/// The kernel's programs and maps.
#[derive(Clone, Default)]
pub(in crate::enforcement) struct Kernel(Arc<Mutex<KernelState>>);

#[derive(Debug, Default)]
pub(in crate::enforcement) struct KernelState {
    pub(in crate::enforcement) served: BTreeMap<u16, Workload>,
    /// Endpoints with programs attached to their devices.
    pub(in crate::enforcement) attached: BTreeSet<u16>,
    pub(in crate::enforcement) tables: BTreeMap<u32, Entries>,
    pub(in crate::enforcement) prefixes: BTreeMap<IpNet, IpcacheEntry>,
    /// Number of table entries that count as occupied.
    pub(in crate::enforcement) filled: usize,
    pub(in crate::enforcement) refuses_programs: bool,
    pub(in crate::enforcement) refuses_prefixes: bool,
    /// Calls that must never reach a kernel.
    pub(in crate::enforcement) mistakes: Vec<String>,
}

/// Total capacity for table entries.
const CAPACITY: usize = 10_000;

impl KernelState {
    fn check_named(&mut self, id: u16, table: u32) {
        if table != 0 && !self.tables.contains_key(&table) {
            let mistake = format!("endpoint {id} names table {table}, which is not there");
            self.mistakes.push(mistake);
        }
    }
}

impl Kernel {
    pub(in crate::enforcement) fn now(&self) -> MutexGuard<'_, KernelState> {
        lock(&self.0)
    }

    /// Number of entries in all tables.
    pub(in crate::enforcement) fn used(&self) -> usize {
        self.now().tables.values().map(BTreeMap::len).sum()
    }

    /// The entries of the table that an endpoint uses; `None` if it uses none.
    pub(super) fn table_of(&self, id: u16) -> Option<Entries> {
        let state = self.now();
        let table = state.served.get(&id)?.info.policy;
        state.tables.get(&table).cloned()
    }
}

impl Programs for Kernel {
    fn set(&self, workload: Workload) -> Result<(), DatapathError> {
        let mut state = self.now();
        let id = workload.info.id;
        state.check_named(id, workload.info.policy);
        if state.refuses_programs && !state.attached.contains(&id) {
            return Err(DatapathError::Missing("room for programs".to_owned()));
        }
        state.attached.insert(id);
        state.served.insert(id, workload);
        Ok(())
    }

    fn set_policy(&self, id: u16, table: u32) -> Result<(), DatapathError> {
        let mut state = self.now();
        state.check_named(id, table);
        if let Some(workload) = state.served.get_mut(&id) {
            workload.info.policy = table;
        }
        Ok(())
    }

    fn shut_off(&self, id: u16, table: u32) -> Result<(), DatapathError> {
        self.set_policy(id, table)?;
        if let Some(workload) = self.now().served.get_mut(&id) {
            workload.info.flags |= ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
        }
        Ok(())
    }

    fn remove(&self, id: u16) -> Result<(), DatapathError> {
        let mut state = self.now();
        state.served.remove(&id);
        state.attached.remove(&id);
        Ok(())
    }

    fn served(&self) -> Vec<Workload> {
        self.now().served.values().cloned().collect()
    }

    fn is_changing_layout(&self) -> bool {
        false
    }
}

impl Tables for Kernel {
    fn install(
        &mut self,
        table: u32,
        _: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError> {
        if !self.has_room(entries.len(), &BTreeSet::new()) {
            return Err(PolicyError::Full {
                table,
                wanted: entries.len(),
                used: self.used(),
            });
        }
        let former = self
            .now()
            .tables
            .insert(table, entries.iter().copied().collect());
        if former.is_some() {
            let mistake = format!("table {table} was there already");
            self.now().mistakes.push(mistake);
        }
        Ok(())
    }

    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError> {
        let mut state = self.now();
        let named: BTreeSet<u32> = state.served.values().map(|one| one.info.policy).collect();
        for table in tables {
            state.tables.remove(table);
            if named.contains(table) {
                let mistake = format!("table {table} was removed while an endpoint named it");
                state.mistakes.push(mistake);
            }
        }
        Ok(())
    }

    fn numbers(&self) -> BTreeSet<u32> {
        self.now().tables.keys().copied().collect()
    }

    fn has_room(&self, entries: usize, without: &BTreeSet<u32>) -> bool {
        let state = self.now();
        let kept = state.tables.iter();
        let kept = kept.filter(|(table, _)| !without.contains(table));
        let used: usize = kept.map(|(_, entries)| entries.len()).sum();
        used + entries + state.filled <= CAPACITY
    }
}

/// The value of `filled` that leaves space for `room` table entries.
pub(in crate::enforcement) fn filled_but(room: usize) -> usize {
    CAPACITY - room
}

impl Prefixes for Kernel {
    fn entries(&self) -> Box<dyn Iterator<Item = (IpNet, IpcacheEntry)> + '_> {
        Box::new(self.now().prefixes.clone().into_iter())
    }

    fn set(&mut self, net: IpNet, entry: IpcacheEntry) -> Result<(), TrieError> {
        let mut state = self.now();
        if state.refuses_prefixes && !state.prefixes.contains_key(&net) {
            return Err(full(1));
        }
        state.prefixes.insert(net, entry);
        Ok(())
    }

    fn set_all(&mut self, wanted: &BTreeMap<IpNet, IpcacheEntry>) -> Result<(), TrieError> {
        let mut state = self.now();
        if state.refuses_prefixes {
            return Err(full(wanted.len()));
        }
        state.prefixes.clone_from(wanted);
        Ok(())
    }
}

fn full(wanted: usize) -> TrieError {
    TrieError::Full {
        map: "HEALTH_IPCACHE",
        wanted,
        capacity: 0,
    }
}

/// A host without addresses.
pub(super) struct NoRoutes;

impl HostRoutes for NoRoutes {
    fn to_this_host(
        &self,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<IpNet>, KernelError>> + Send + '_>> {
        Box::pin(ready(Ok(Vec::new())))
    }
}

/// The store shared by all agents, and this node's file with its identities of prefixes.
#[derive(Clone, Default)]
pub(super) struct Store(Arc<Mutex<StoreState>>);

#[derive(Debug, Default)]
pub(super) struct StoreState {
    pub(super) numbers: BTreeMap<LabelSet, Identity>,
    /// Whether the store refuses new numbers for labels without one.
    pub(super) is_full: bool,
    pub(super) is_away: bool,
    /// Numbers that the store gave to other labels while they were in use; their holders cannot keep them.
    lost: BTreeSet<Identity>,
    given: u32,
    local: LocalNumbers,
    local_given: u32,
    /// The latest needs of this node's agent.
    needs: LocalNeeds,
    /// What each agent started so far holds and announces.
    agents: Vec<Claims>,
    /// Calls that must never reach a store.
    pub(super) mistakes: Vec<String>,
}

/// What an agent holds and announces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claims {
    /// Labels, and how often each is held.
    pub(super) held: BTreeMap<LabelSet, usize>,
    pub(super) announced: BTreeMap<IpAddr, Identity>,
}

impl StoreState {
    /// Returns what earlier agents of this node still hold and announce, and what the current one does.
    pub(super) fn claims(&self) -> (Vec<&Claims>, Claims) {
        let (last, former) = self.agents.split_last().expect("there was an agent");
        let is_left = |claims: &&Claims| **claims != Claims::default();
        (former.iter().filter(is_left).collect(), last.clone())
    }

    fn is_held(&self, labels: &LabelSet) -> bool {
        self.agents
            .iter()
            .any(|agent| agent.held.contains_key(labels))
    }

    fn next_number(&mut self) -> Identity {
        self.given += 1;
        Identity(299 + self.given)
    }

    /// Number of prefixes with an identity.
    pub(super) fn local_prefixes(&self) -> usize {
        self.local.prefixes.len()
    }

    pub(super) fn labels(&self) -> BTreeMap<Identity, Arc<LabelSet>> {
        let reserved = Identity::all_reserved()
            .filter_map(|identity| Some((identity, Arc::new(identity.reserved_labels()?))));
        let numbers = self.numbers.iter();
        let numbers = numbers.map(|(labels, identity)| (*identity, Arc::new(labels.clone())));
        let local = self.local.prefixes.iter();
        let local = local.map(|(prefix, identity)| {
            let is_server = self.needs.api_servers.iter();
            let is_server = is_server.map(|ip| IpNet::from(*ip)).any(|ip| ip == *prefix);
            let server = is_server.then(|| Label::reserved("kube-apiserver"));
            let prefix = Label::new(CIDR, &prefix.to_string(), "").unwrap();
            let labels = [prefix, Label::reserved("world")].into_iter().chain(server);
            let labels = LabelSet::new(labels).unwrap();
            (*identity, Arc::new(labels))
        });
        let nodes = self.local.nodes.iter();
        let nodes = nodes.map(|(labels, identity)| (*identity, Arc::new(labels.clone())));
        let host = self.needs.host.clone().with_reserved("host");
        let host = [(Identity::HOST, Arc::new(host))];
        reserved
            .chain(numbers)
            .chain(local)
            .chain(nodes)
            .chain(host)
            .collect()
    }
}

impl Store {
    pub(in crate::enforcement) fn now(&self) -> MutexGuard<'_, StoreState> {
        lock(&self.0)
    }

    /// Forgets the identities that nobody holds and frees their numbers. Returns those that could have been kept.
    pub(super) fn collect(&self) -> Vec<Identity> {
        let mut state = self.now();
        let numbers = std::mem::take(&mut state.numbers);
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = numbers
            .into_iter()
            .partition(|(labels, _)| state.is_held(labels));
        state.numbers = kept;
        let gone = gone.into_values();
        gone.filter(|identity| !state.lost.contains(identity))
            .collect()
    }
}

/// An agent's connection to the store.
pub(super) struct Session {
    store: Store,
    number: usize,
    identities: watch::Sender<Arc<Identities>>,
    addresses: watch::Sender<Arc<Addresses>>,
    held: watch::Sender<Arc<HeldIdentities>>,
}

impl Session {
    pub(super) fn new(store: &Store) -> Arc<Self> {
        let mut state = store.now();
        state.agents.push(Claims::default());
        let known = Identities {
            labels: Arc::new(BTreeMap::new()),
            stale: Some(stale()),
            ..Identities::default()
        };
        let session = Self {
            store: store.clone(),
            number: state.agents.len() - 1,
            identities: watch::Sender::new(Arc::new(known)),
            addresses: watch::Sender::default(),
            held: watch::Sender::default(),
        };
        drop(state);
        session.publish();
        Arc::new(session)
    }

    /// Reports the current contents of the store to the agent, or that the store is unavailable.
    pub(super) fn publish(&self) {
        let state = self.store.now();
        let known = self.identities.borrow().clone();
        let mut labels = state.labels();
        if state.is_away {
            // The agent keeps what it knew of the cluster.
            let of_cluster: BTreeSet<Identity> = state.numbers.values().copied().collect();
            labels.retain(|identity, _| !of_cluster.contains(identity));
            let cluster = known.labels.iter();
            let cluster = cluster.filter(|(identity, _)| !identity.is_local());
            labels.extend(cluster.map(|(identity, labels)| (*identity, labels.clone())));
        }
        let next = Identities {
            labels: match labels == *known.labels {
                true => known.labels.clone(),
                false => Arc::new(labels),
            },
            stale: state.is_away.then(stale),
            ..Identities::default()
        };
        if !state.is_away {
            let claims = &state.agents[self.number];
            let announced = claims.announced.iter().map(|(ip, identity)| {
                let announcement = AddressAnnouncement {
                    identity: *identity,
                    node: NODE_ADDRESS,
                    owner: NODE.to_owned(),
                };
                (IpNet::from(*ip), announcement)
            });
            let announced = Addresses(announced.collect());
            self.addresses.send_if_modified(|known| {
                let is_other = **known != announced;
                *known = Arc::new(announced);
                is_other
            });
            let held = claims.held.keys();
            let held = held.filter_map(|labels| {
                let identity = state.numbers.get(labels)?;
                Some((Arc::new(labels.clone()), *identity))
            });
            self.held.send_replace(Arc::new(held.collect()));
        }
        if *known != next {
            self.identities.send_replace(Arc::new(next));
        }
    }

    /// Gives numbers to labels that have none.
    pub(super) fn number(&self, all: &[LabelSet]) {
        let mut state = self.store.now();
        for labels in all {
            let next = state.next_number();
            state.numbers.entry(labels.clone()).or_insert(next);
        }
        drop(state);
        self.publish();
    }

    /// The addresses that nodes announce for their endpoints.
    pub(super) fn addresses_now(&self) -> Arc<Addresses> {
        self.addresses.borrow().clone()
    }

    /// Swaps the numbers of two label sets, as can happen in a store that lost them.
    pub(super) fn swap(&self, one: &LabelSet, other: &LabelSet) {
        let mut state = self.store.now();
        let numbers = [one, other].map(|labels| state.numbers.get(labels).copied());
        if let ([Some(first), Some(second)], false) = (numbers, state.is_away) {
            state.lost.extend([first, second]);
            state.numbers.insert(one.clone(), second);
            state.numbers.insert(other.clone(), first);
        }
        drop(state);
        self.publish();
    }
}

/// The address of this node.
pub(super) const NODE_ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn stale() -> Staleness {
    Staleness {
        since: Timestamp::UNIX_EPOCH,
        reason: "the store is away".to_owned(),
    }
}

impl IdentitySource for Session {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Hold, IdentityUnavailable>> + Send + 'a>> {
        let mut state = self.store.now();
        let refused = match (
            state.is_away,
            state.is_full && !state.numbers.contains_key(labels),
        ) {
            (true, _) => Some("the store is away"),
            (_, true) => Some("no identity is left"),
            _ => None,
        };
        if let Some(reason) = refused {
            return Box::pin(ready(Err(IdentityUnavailable(reason.to_owned()))));
        }
        let identity = match state.numbers.get(labels) {
            Some(identity) => *identity,
            None => state.next_number(),
        };
        state.numbers.insert(labels.clone(), identity);
        let held = &mut state.agents[self.number].held;
        *held.entry(labels.clone()).or_default() += 1;
        drop(state);
        self.publish();
        Box::pin(ready(Ok(Hold {
            labels: labels.clone(),
            identity,
        })))
    }

    fn release(&self, hold: Hold) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let mut state = self.store.now();
        let held = &mut state.agents[self.number].held;
        match held.get_mut(&hold.labels) {
            Some(1) => drop(held.remove(&hold.labels)),
            Some(count) => *count -= 1,
            None => state.mistakes.push(format!("{hold:?} was not held")),
        }
        Box::pin(ready(()))
    }

    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.held.subscribe()
    }
}

/// The same session, as the enforcer's cluster.
pub(super) struct SessionCluster(pub(super) Arc<Session>);

impl Cluster for SessionCluster {
    fn identities(&self) -> watch::Receiver<Arc<Identities>> {
        self.0.identities.subscribe()
    }

    fn addresses(&self) -> watch::Receiver<Arc<Addresses>> {
        self.0.addresses.subscribe()
    }

    fn local(&self) -> LocalNumbers {
        self.0.store.now().local.clone()
    }

    fn require(&self, needs: &LocalNeeds) -> LocalNumbers {
        let mut state = self.0.store.now();
        let before = (state.local.clone(), state.needs.clone());
        state.needs.clone_from(needs);
        let prefixes = &needs.prefixes;
        let StoreState {
            local, local_given, ..
        } = &mut *state;
        local.prefixes.retain(|prefix, _| prefixes.contains(prefix));
        for prefix in prefixes {
            let next = Identity(LOCAL | (*local_given + 1));
            if *local.prefixes.entry(*prefix).or_insert(next) == next {
                *local_given += 1;
            }
        }
        local.nodes.retain(|labels, _| needs.nodes.contains(labels));
        for labels in &needs.nodes {
            let next = Identity(LOCAL_NODE | (*local_given + 1));
            if *local.nodes.entry(labels.clone()).or_insert(next) == next {
                *local_given += 1;
            }
        }
        let now = (state.local.clone(), state.needs.clone());
        drop(state);
        if now != before {
            self.0.publish();
        }
        now.0
    }

    fn announce(&self, _: u16, identity: Identity, addresses: &[(IpAddr, IpAddr)]) {
        let mut state = self.0.store.now();
        let announced = &mut state.agents[self.0.number].announced;
        announced.extend(addresses.iter().map(|(ip, _)| (*ip, identity)));
        drop(state);
        self.0.publish();
    }

    fn withdraw(&self, ip: IpAddr) {
        let mut state = self.0.store.now();
        state.agents[self.0.number].announced.remove(&ip);
        drop(state);
        self.0.publish();
    }

    fn forget_earlier(&self) {
        let mut state = self.0.store.now();
        for earlier in &mut state.agents[..self.0.number] {
            *earlier = Claims::default();
        }
    }
}
