//! Compares the enforcer alone with a plain list: the table that each endpoint uses, and the addresses in the ipcache,
//! however little space there is.

use std::collections::BTreeMap;

use health_model::api::EndpointSettings;
use health_net::mac::MacAddr;
use proptest::prelude::*;

use super::fakes::Entries;
use super::model::{policy_name, policy_text};
use super::*;
use crate::enforcement::build::Room;
use crate::enforcement::local::LocalAddresses;
use crate::regenerate::Regeneration;

/// Label sets for endpoints, each with its own identity.
const LABELS: [&str; 3] = ["app=a", "app=b", "app=a,zone=x"];

const POLICIES: usize = 5;

#[derive(Clone, Debug)]
enum Step {
    /// Builds an endpoint with a label set.
    Build(u16, usize),
    TakeAway(u16),
    Import(usize, u8),
    DeletePolicy(usize),
    /// Builds the endpoints that lag behind, and makes space, until nothing more can be done.
    Bring,
    Sweep,
    /// Writes the addresses to the ipcache.
    Write,
    /// Leaves space for this many more table entries, or removes the limit.
    Room(Option<u8>),
    /// Stops programs from being attached, or allows it again.
    Programs(bool),
    /// Removes an endpoint's programs.
    Detach(u16),
    /// Stops addresses from being written, or allows it again.
    Prefixes(bool),
    /// Another agent takes over.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = || 1_u16..7;
    let step = prop_oneof![
        8 => (id(), 0..LABELS.len()).prop_map(|(id, with)| Step::Build(id, with)),
        2 => id().prop_map(Step::TakeAway),
        6 => (0..POLICIES, 0_u8..3).prop_map(|(policy, variant)| Step::Import(policy, variant)),
        1 => (0..POLICIES).prop_map(Step::DeletePolicy),
        6 => Just(Step::Bring),
        2 => Just(Step::Sweep),
        2 => Just(Step::Write),
        3 => proptest::option::weighted(0.8, 0_u8..30).prop_map(Step::Room),
        2 => any::<bool>().prop_map(Step::Programs),
        2 => id().prop_map(Step::Detach),
        1 => any::<bool>().prop_map(Step::Prefixes),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The state with which an endpoint was last built.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Built {
    with: usize,
    table: Option<Entries>,
    /// Whether the endpoint was built since the agent's start.
    is_by_this_agent: bool,
}

struct Model {
    site: Site,
    enforcer: Enforcer,
    session: Arc<Session>,
    policies: BTreeMap<usize, String>,
    built: BTreeMap<u16, Built>,
}

impl Model {
    fn new() -> Self {
        let site = Site::new();
        let session = Session::new(&site.store);
        session.number(&LABELS.map(labels));
        Self {
            enforcer: site.enforcer(&session),
            site,
            session,
            policies: BTreeMap::new(),
            built: BTreeMap::new(),
        }
    }

    fn regeneration(&self, id: u16, with: usize) -> Regeneration {
        let labels = labels(LABELS[with]);
        Regeneration {
            id,
            identity: self.identity(with),
            labels,
            fails_closed: false,
            settings: EndpointSettings::default(),
            addresses: vec![
                IpAddr::from([10, 0, 0, id.to_be_bytes()[1]]),
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, id]),
            ],
            device: format!("lxc{id}"),
            ifindex: 100 + u32::from(id),
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        }
    }

    fn identity(&self, with: usize) -> Identity {
        self.site.store.now().numbers[&labels(LABELS[with])]
    }

    /// The expected table of a label set.
    fn wanted(&self, with: usize) -> Option<Entries> {
        let kernel = Kernel::default();
        let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
        let generation = self.enforcer.generation();
        let realized = subjects.plan(
            1,
            self.identity(with).into(),
            &labels(LABELS[with]),
            &generation,
        );
        let table = realized.unwrap().policy;
        kernel.now().tables.get(&table).cloned()
    }

    /// Builds an endpoint. Returns whether the build succeeded.
    fn build(&mut self, id: u16, with: usize) -> bool {
        let built = self.enforcer.build(&self.regeneration(id, with));
        let state = self.site.kernel.now();
        let may_fail = state.refuses_programs || state.refuses_prefixes || state.filled > 0;
        let is_served_so = state.served.get(&id).is_some_and(|one| {
            one.info.identity == self.identity(with).0 && state.attached.contains(&id)
        });
        drop(state);
        match built {
            Ok(_) => {
                assert!(is_served_so);
                self.set(id, with);
                true
            }
            Err(error) => {
                assert!(may_fail, "{error}");
                // Addresses are written last: by then the new table already judges packets.
                if error.to_string().contains("HEALTH_IPCACHE") {
                    assert!(is_served_so);
                    self.set(id, with);
                } else if !self.built.contains_key(&id) {
                    // The code that creates the endpoint then removes it.
                    self.enforcer.take_away(id).unwrap();
                }
                false
            }
        }
    }

    fn set(&mut self, id: u16, with: usize) {
        let built = Built {
            with,
            table: self.wanted(with),
            is_by_this_agent: true,
        };
        self.built.insert(id, built);
    }

    /// Handles the endpoints as the enforcer's turn does, but without a manager.
    fn bring(&mut self) {
        let generation = self.enforcer.generation();
        let mut closed = BTreeSet::new();
        for _ in 0..20 {
            let pending = self.enforcer.subjects().behind(&generation).pending;
            for id in pending {
                self.build(id, self.built[&id].with);
            }
            let ids = match self.enforcer.free_tables(&mut closed).unwrap() {
                Room::Swept(ids) => ids,
                Room::Closed(ids) => {
                    for id in &ids {
                        let built = self.built.get_mut(id).expect("one that was built");
                        assert!(built.is_by_this_agent);
                        built.table = Some(Entries::new());
                    }
                    ids
                }
            };
            if ids.is_empty() {
                return;
            }
            self.enforcer.subjects().retry(&ids);
            for id in ids {
                self.build(id, self.built[&id].with);
            }
        }
        panic!("making room has no end");
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Build(id, with) => {
                self.build(*id, *with);
            }
            Step::TakeAway(id) => {
                self.enforcer.take_away(*id).unwrap();
                self.built.remove(id);
            }
            Step::Import(policy, variant) => {
                let text = policy_text(*policy, *variant);
                self.enforcer.import(&text).unwrap();
                self.policies.insert(*policy, text);
            }
            Step::DeletePolicy(policy) => {
                let deleted = self.enforcer.delete(&policy_name(*policy));
                assert_eq!(deleted.is_ok(), self.policies.remove(policy).is_some());
            }
            Step::Bring => self.bring(),
            Step::Sweep => {
                self.enforcer.subjects().sweep().unwrap();
                self.check_tables();
            }
            Step::Write => self.write(),
            Step::Room(room) => {
                let used = self.site.kernel.used();
                let filled = room.map_or(0, |room| filled_but(used + usize::from(room)));
                self.site.kernel.now().filled = filled;
            }
            Step::Programs(are_taken) => self.site.kernel.now().refuses_programs = !are_taken,
            Step::Detach(id) => {
                self.site.kernel.now().attached.remove(id);
            }
            Step::Prefixes(are_taken) => self.site.kernel.now().refuses_prefixes = !are_taken,
            Step::Restart => {
                let former = std::mem::replace(&mut self.session, Session::new(&self.site.store));
                drop(former);
                // An agent cannot start if it cannot write the addresses of endpoints.
                self.site.kernel.now().refuses_prefixes = false;
                self.enforcer = self.site.enforcer(&self.session);
                for built in self.built.values_mut() {
                    built.is_by_this_agent = false;
                }
            }
        }
        self.check();
    }

    fn write(&self) {
        let mut around = surroundings();
        around.host_prefixes = Some(Vec::new());
        let announced = self.session.addresses_now();
        let written =
            self.enforcer
                .write_ipcache(&mut around, &announced, &LocalAddresses::default());
        let refuses = self.site.kernel.now().refuses_prefixes;
        assert_eq!(written.is_err(), refuses);
    }

    /// Checks the invariants.
    fn check(&self) {
        let state = self.site.kernel.now();
        assert_eq!(state.mistakes, [""; 0]);
        for (id, built) in &self.built {
            let info = state.served[id].info;
            let table = state.tables.get(&info.policy);
            assert_eq!(table, built.table.as_ref(), "of endpoint {id}");
        }
        drop(state);
        let generation = self.enforcer.generation();
        let behind = self.enforcer.subjects().behind(&generation);
        for (id, built) in &self.built {
            let is_behind = built.is_by_this_agent && built.table != self.wanted(built.with);
            let is_reported = behind.pending.contains(id) || behind.failed.contains_key(id);
            assert!(
                is_reported || !is_behind,
                "endpoint {id} is behind, and not reported"
            );
        }
    }

    /// Checks that, after a sweep, the only tables are those in use by endpoints and those of the endpoints'
    /// identities.
    fn check_tables(&self) {
        let state = self.site.kernel.now();
        let named = state.served.values().map(|one| one.info.policy);
        let named: BTreeSet<u32> = named.filter(|table| *table != 0).collect();
        let there: BTreeSet<u32> = state.tables.keys().copied().collect();
        assert!(named.is_subset(&there));
        let identities: BTreeSet<u32> =
            state.served.values().map(|one| one.info.identity).collect();
        assert!(there.len() <= named.len() + identities.len());
    }

    fn end(mut self) {
        self.take(&Step::Room(None));
        self.take(&Step::Programs(true));
        self.take(&Step::Prefixes(true));
        for (id, built) in self.built.clone() {
            assert!(self.build(id, built.with));
        }
        self.bring();
        self.check();
        self.enforcer.subjects().sweep().unwrap();
        self.write();
        for built in self.built.values() {
            assert_eq!(built.table, self.wanted(built.with));
        }
        let state = self.site.kernel.now();
        let named = state.served.values().map(|one| one.info.policy);
        let named: BTreeSet<u32> = named.filter(|table| *table != 0).collect();
        assert_eq!(state.tables.keys().copied().collect::<BTreeSet<_>>(), named);
        let addresses = self.built.iter().flat_map(|(id, built)| {
            let endpoint = self.regeneration(*id, built.with);
            let identity = endpoint.identity.0;
            endpoint
                .addresses
                .into_iter()
                .map(move |ip| (IpNet::from(ip), identity))
        });
        for (net, identity) in addresses {
            assert_eq!(state.prefixes[&net].identity, identity, "of {net}");
        }
        let served: BTreeSet<u16> = state.served.keys().copied().collect();
        assert_eq!(served, self.built.keys().copied().collect());
        drop(state);
        for id in self.built.keys() {
            self.enforcer.take_away(*id).unwrap();
        }
        self.enforcer.subjects().sweep().unwrap();
        let state = self.site.kernel.now();
        assert_eq!((state.served.len(), state.tables.len()), (0, 0));
        let (_, claims) = self.site.store.now().claims();
        assert_eq!(claims.announced, BTreeMap::new());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 10_000, ..ProptestConfig::with_cases(cases(256)) })]

    #[test]
    fn tables_and_addresses_are_those_of_a_plain_list_however_little_room_there_is(steps in steps()) {
        let mut model = Model::new();
        for step in &steps {
            model.take(step);
        }
        model.end();
    }
}
