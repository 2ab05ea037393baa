//! The expected state, as plain data.

use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS};
use health_common::identity::LOCAL;
use health_model::api::Endpoint;

use super::super::fakes::{Claims, Entries};
use super::*;
use crate::enforcement::build::subject_labels;

/// An endpoint that was created and not deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlainEndpoint {
    pub(super) id: u16,
    pub(super) labels: LabelSet,
    pub(super) addresses: Vec<IpAddr>,
}

impl PlainEndpoint {
    pub(super) fn of(endpoint: &Endpoint, labels: LabelSet) -> Self {
        Self {
            id: endpoint.id,
            labels,
            addresses: endpoint.ipv4.into_iter().chain(endpoint.ipv6).collect(),
        }
    }

    /// Returns the identity of the endpoint's labels, if the store has one.
    pub(super) fn identity(&self, numbers: &BTreeMap<LabelSet, Identity>) -> Option<Identity> {
        match self.labels.is_empty() {
            true => Some(Identity::INIT),
            false => numbers.get(&self.labels).copied(),
        }
    }
}

/// Returns the labels that an endpoint was given.
pub(super) fn labels_of(shown: &Endpoint) -> LabelSet {
    let labels = shown.labels.iter().map(|label| label.parse().unwrap());
    let labels = LabelSet::new(labels).unwrap();
    match Some(&labels) == Identity::INIT.reserved_labels().as_ref() {
        true => LabelSet::default(),
        false => labels,
    }
}

/// What the programs enforce for an endpoint: its identity, the enforced directions, and its table.
pub(super) type Found = (Identity, u32, Option<Entries>);

impl Kernel {
    pub(super) fn found(&self, id: u16) -> Option<Found> {
        let info = self.now().served.get(&id)?.info;
        let enforced = info.flags & (ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS);
        Some((Identity(info.identity), enforced, self.table_of(id)))
    }
}

/// The complete expected state.
#[derive(Debug, Default)]
pub(super) struct Plain {
    /// Endpoints by the number of their namespace.
    pub(super) endpoints: BTreeMap<u16, PlainEndpoint>,
    /// Policy documents by the number of the policy.
    pub(super) policies: BTreeMap<usize, String>,
    /// Namespaces whose endpoint possibly could not be removed.
    pub(super) leaving: BTreeSet<u16>,
}

impl Plain {
    pub(super) fn add(&mut self, n: u16, endpoint: PlainEndpoint) {
        for other in self.endpoints.values() {
            assert_ne!(other.id, endpoint.id, "an id was given twice");
            let mut addresses = endpoint.addresses.iter();
            assert!(
                !addresses.any(|address| other.addresses.contains(address)),
                "an address was given twice"
            );
        }
        assert_eq!(endpoint.addresses.len(), 2, "one of each IP version");
        self.endpoints.insert(n, endpoint);
    }

    fn repository(&self) -> Repository {
        let mut repository = Repository::default();
        for text in self.policies.values() {
            repository.import(text).unwrap();
        }
        repository
    }

    pub(super) fn has_policies_of(&self, other: &Repository) -> bool {
        let documents = |repository: &Repository| {
            let policies = repository.iter();
            policies
                .map(|policy| (policy.name().to_string(), policy.document().clone()))
                .collect::<Vec<_>>()
        };
        documents(&self.repository()) == documents(other)
    }

    /// Returns what the programs should enforce for an endpoint.
    pub(super) fn wanted(&self, endpoint: &PlainEndpoint, store: &Store) -> Found {
        let state = store.now();
        let identity = endpoint.identity(&state.numbers).expect("an identity");
        let generation = Generation {
            number: 1,
            repository: Arc::new(self.repository()),
            settings: PolicySettings::default(),
            identities: Arc::new(state.labels()),
        };
        let kernel = Kernel::default();
        let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
        let labels = subject_labels(identity, &endpoint.labels);
        let realized = subjects.plan(endpoint.id, identity.into(), &labels, &generation);
        let realized = realized.unwrap();
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let enforced = flag(realized.enforces_ingress, ENDPOINT_ENFORCE_INGRESS)
            | flag(realized.enforces_egress, ENDPOINT_ENFORCE_EGRESS);
        let table = kernel.now().tables.get(&realized.policy).cloned();
        (identity, enforced, table)
    }

    /// Checks that exactly the expected endpoints are shown, apart from those being removed. Returns each endpoint as
    /// expected and as shown.
    pub(super) fn check_shown(&self, manager: &Manager) -> Vec<(&PlainEndpoint, Arc<Endpoint>)> {
        let mut shown = manager.endpoints();
        shown.retain(|one| one.state != "disconnected");
        let (ending, living): (Vec<_>, Vec<_>) = shown
            .into_iter()
            .partition(|one| one.state == "disconnecting");
        for one in ending {
            let mut leaving = self.leaving.iter();
            assert!(
                leaving.any(|n| one.netns == format!("/n{n}")),
                "{one:?} should not be there"
            );
        }
        let mut pairs = Vec::new();
        for (n, endpoint) in &self.endpoints {
            let netns = format!("/n{n}");
            let mut found = living.iter().filter(|one| one.netns == netns);
            let one = found
                .next()
                .unwrap_or_else(|| panic!("{endpoint:?} is not there"));
            assert_eq!(PlainEndpoint::of(one, labels_of(one)), *endpoint);
            pairs.push((endpoint, one.clone()));
        }
        assert_eq!(living.len(), pairs.len(), "{living:?}");
        pairs
    }

    /// Checks that everything on the machine is as expected at rest.
    pub(super) fn check_site(&self, site: &Site, agent: &Agent) {
        let Site {
            kernel,
            store,
            devices,
            dir,
            follows_cluster: _,
            nodes: _,
        } = site;
        let endpoints = || self.endpoints.values();
        let ids: BTreeSet<u16> = endpoints().map(|endpoint| endpoint.id).collect();
        assert_eq!(agent.enforcer.lag(), None);
        let repository = agent.enforcer.repository();
        assert!(self.has_policies_of(&repository), "{repository:?}");
        let followed = *agent.enforcer.0.followed.borrow();
        assert_eq!(followed, repository.revision());
        for (endpoint, shown) in self.check_shown(&agent.manager) {
            assert_eq!(shown.state, "ready", "{shown:?}");
            let health = agent.manager.health(endpoint.id).unwrap();
            assert_eq!(health.overall_health.text(), "OK", "{shown:?}");
            let wanted = self.wanted(endpoint, store);
            assert_eq!(Identity(shown.identity), wanted.0, "{shown:?}");
            assert_eq!(kernel.found(endpoint.id), Some(wanted), "of {endpoint:?}");
        }

        // Every endpoint resource belongs to one of these endpoints.
        let owners: BTreeMap<IpAddr, u16> = agent
            .manager
            .taken_addresses()
            .unwrap()
            .into_iter()
            .map(|taken| (taken.address, taken.endpoint))
            .collect();
        let addresses = endpoints().flat_map(|one| one.addresses.iter().map(|ip| (*ip, one.id)));
        assert_eq!(owners, addresses.collect());
        let found = devices.devices.lock().unwrap();
        assert_eq!(
            found.values().map(|(id, _)| *id).collect::<BTreeSet<_>>(),
            ids
        );
        let (saved, damaged) = StateDir::of(dir.path()).load().unwrap();
        assert_eq!(damaged, []);
        assert_eq!(saved.iter().map(|one| one.id).collect::<BTreeSet<_>>(), ids);

        let state = kernel.now();
        assert_eq!(state.served.keys().copied().collect::<BTreeSet<_>>(), ids);
        assert_eq!(state.attached, ids);
        let named = state.served.values().map(|one| one.info.policy);
        let named: BTreeSet<u32> = named.filter(|table| *table != 0).collect();
        assert_eq!(state.tables.keys().copied().collect::<BTreeSet<_>>(), named);

        // Addresses, prefixes and the store.
        let store = store.now();
        let identity = |endpoint: &PlainEndpoint| endpoint.identity(&store.numbers).unwrap();
        let wanted: BTreeMap<IpAddr, Identity> = endpoints()
            .flat_map(|one| one.addresses.iter().map(move |ip| (*ip, one)))
            .map(|(ip, one)| (ip, identity(one)))
            .collect();
        let pods = ["10.0.0.0/24", "fd00::/64"].map(|cidr| cidr.parse::<IpNet>().unwrap());
        let prefixes = || state.prefixes.iter();
        let of_pods = prefixes().filter(|(net, _)| pods.iter().any(|pods| pods.contains(*net)));
        let of_pods = of_pods.map(|(net, entry)| (net.addr(), Identity(entry.identity)));
        assert_eq!(of_pods.collect::<BTreeMap<_, _>>(), wanted);
        let local = prefixes().filter(|(_, entry)| entry.identity & LOCAL != 0);
        let local: BTreeSet<IpNet> = local.map(|(net, _)| *net).collect();
        assert_eq!(local, self.repository().prefixes());
        assert_eq!(local.len(), store.local_prefixes());
        let mut claims = Claims {
            announced: wanted,
            ..Claims::default()
        };
        for endpoint in endpoints().filter(|one| !one.labels.is_empty()) {
            *claims.held.entry(endpoint.labels.clone()).or_default() += 1;
        }
        let (former, last) = store.claims();
        assert_eq!(last, claims);
        assert!(former.is_empty(), "{former:?}");
    }
}
