//! Tables and who names them, on a map of the test's making.

use std::sync::Mutex;

use super::*;

const ONE: Identity = Identity(300);
const PEER: Identity = Identity(400);

/// The map: how many entries each table has.
#[derive(Clone, Default)]
struct Map {
    tables: Arc<Mutex<BTreeMap<u32, usize>>>,
}

impl Tables for Map {
    fn install(
        &mut self,
        table: u32,
        _: u32,
        entries: &[(PolicyMatch, u8)],
    ) -> Result<(), PolicyError> {
        self.tables.lock().unwrap().insert(table, entries.len());
        Ok(())
    }

    fn remove(&mut self, tables: &[u32]) -> Result<(), PolicyError> {
        let mut map = self.tables.lock().unwrap();
        map.retain(|table, _| !tables.contains(table));
        Ok(())
    }

    fn numbers(&self) -> BTreeSet<u32> {
        self.tables.lock().unwrap().keys().copied().collect()
    }
}

fn labels(identity: Identity) -> LabelSet {
    LabelSet::new([format!("n={identity}").parse().unwrap()]).unwrap()
}

/// The rules as they change.
struct Rules {
    repository: Repository,
    identities: Arc<BTreeMap<Identity, Arc<LabelSet>>>,
    number: u64,
}

impl Rules {
    fn new(identities: &[Identity]) -> Self {
        let known = identities.iter().chain([&PEER]);
        let known = known.map(|identity| (*identity, Arc::new(labels(*identity))));
        Self {
            repository: Repository::default(),
            identities: Arc::new(known.collect()),
            number: 0,
        }
    }

    /// All endpoints may be reached by one peer, at as many ports, from this one on.
    fn allow(&mut self, first: u16, ports: u16) -> Generation {
        let ports = (0..ports).map(|n| format!(r#"{{"port": "{}", "protocol": "TCP"}}"#, first + 2 * n));
        let ports = ports.collect::<Vec<_>>().join(",");
        self.import(&format!(
            r#"[{{"labels": ["allow"], "endpointSelector": {{}},
                "ingress": [{{"fromEndpoints": [{{"matchLabels": {{"n": "{PEER}"}}}}],
                              "toPorts": [{{"ports": [{ports}]}}]}}]}}]"#
        ))
    }

    /// A change that is about no endpoint.
    fn change_others(&mut self) -> Generation {
        let text = format!(
            r#"[{{"labels": ["other"], "endpointSelector": {{"matchLabels": {{"no": "{}"}}}}, "ingress": [{{}}]}}]"#,
            self.number
        );
        self.import(&text)
    }

    fn import(&mut self, text: &str) -> Generation {
        self.repository.import(text).unwrap();
        self.number += 1;
        Generation {
            number: self.number,
            repository: Arc::new(self.repository.clone()),
            settings: PolicySettings::default(),
            identities: self.identities.clone(),
        }
    }
}

fn failure(generation: &Generation) -> BuildFailure {
    BuildFailure {
        generation: generation.number,
        reason: "no room".to_owned(),
    }
}

fn build(subjects: &mut Subjects, id: u16, identity: Identity, generation: &Generation) {
    subjects
        .plan(id, identity, &labels(identity), generation)
        .unwrap();
    subjects.settle(id, &[]);
}

#[test]
fn an_endpoint_that_could_not_be_set_is_behind_until_it_is() {
    let map = Map::default();
    let mut subjects = Subjects::new(map.clone(), []);
    let mut rules = Rules::new(&[ONE]);
    let first = rules.allow(2, 1);
    for id in [1, 2] {
        build(&mut subjects, id, ONE, &first);
    }
    assert_eq!(subjects.behind(&first), Behind::default());

    let second = rules.allow(4, 1);
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1, 2]));
    build(&mut subjects, 1, ONE, &second);
    subjects.plan(2, ONE, &labels(ONE), &second).unwrap();
    assert_eq!(subjects.behind(&second).pending, BTreeSet::new());
    subjects.fail(2, failure(&second));
    let failed = Behind {
        failed: BTreeMap::from([(2, "no room".to_owned())]),
        pending: BTreeSet::new(),
    };
    assert_eq!(subjects.behind(&second), failed);
    subjects.sweep().unwrap();
    assert_eq!(map.numbers().len(), 2, "the endpoint names the former one");

    // The next change asks for it again, whether it is about it or not.
    let third = rules.change_others();
    assert_eq!(subjects.behind(&third).pending, BTreeSet::from([2]));
    build(&mut subjects, 2, ONE, &third);
    assert_eq!(subjects.behind(&third), Behind::default());
    subjects.sweep().unwrap();
    assert_eq!(map.numbers().len(), 1);
}

#[test]
fn what_is_built_by_an_older_generation_is_behind_and_takes_nothing_back() {
    let map = Map::default();
    let mut subjects = Subjects::new(map.clone(), []);
    let mut rules = Rules::new(&[ONE]);
    let first = rules.allow(2, 1);
    let second = rules.allow(4, 1);
    subjects.plan(1, ONE, &labels(ONE), &first).unwrap();
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1]));
    subjects.settle(1, &[]);
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1]));
    build(&mut subjects, 2, ONE, &second);
    build(&mut subjects, 1, ONE, &first);
    assert_eq!(subjects.behind(&second), Behind::default());
    assert_eq!(subjects.forget(1), Vec::<IpAddr>::new());
}
