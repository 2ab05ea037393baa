//! Tables and the endpoints that use them, with a fake kernel.

use super::super::tests::fakes::{Kernel, filled_but};
use super::*;

const ONE: Identity = Identity(300);
const PEER: Identity = Identity(400);

/// A kernel with space for `entries` entries.
fn with_room(entries: usize) -> Kernel {
    let kernel = Kernel::default();
    kernel.now().filled = filled_but(entries);
    kernel
}

fn labels(identity: Identity) -> LabelSet {
    LabelSet::new([format!("n={identity}").parse().unwrap()]).unwrap()
}

/// A set of rules that tests change step by step.
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

    /// Lets one peer reach all endpoints on `ports` ports, starting at `first`.
    fn allow(&mut self, first: u16, ports: u16) -> Generation {
        let ports =
            (0..ports).map(|n| format!(r#"{{"port": "{}", "protocol": "TCP"}}"#, first + 2 * n));
        let ports = ports.collect::<Vec<_>>().join(",");
        self.import(&format!(
            r#"[{{"labels": ["allow"], "endpointSelector": {{}},
                "ingress": [{{"fromEndpoints": [{{"matchLabels": {{"n": "{PEER}"}}}}],
                              "toPorts": [{{"ports": [{ports}]}}]}}]}}]"#
        ))
    }

    /// A change that affects no endpoint.
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
        lacks_room: true,
        reason: "no room".to_owned(),
    }
}

fn build(subjects: &mut Subjects, id: u16, identity: Identity, generation: &Generation) {
    subjects
        .plan(id, identity.into(), &labels(identity), generation)
        .unwrap();
    subjects.settle(id, &[]);
}

#[test]
fn an_endpoint_that_could_not_be_set_is_behind_until_it_is() {
    let kernel = Kernel::default();
    let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
    let mut rules = Rules::new(&[ONE]);
    let first = rules.allow(2, 1);
    for id in [1, 2] {
        build(&mut subjects, id, ONE, &first);
    }
    assert_eq!(subjects.behind(&first), Behind::default());

    let second = rules.allow(4, 1);
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1, 2]));
    build(&mut subjects, 1, ONE, &second);
    subjects.plan(2, ONE.into(), &labels(ONE), &second).unwrap();
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([2]));
    subjects.fail(2, failure(&second));
    let failed = Behind {
        failed: BTreeMap::from([(2, "no room".to_owned())]),
        ..Behind::default()
    };
    assert_eq!(subjects.behind(&second), failed);
    assert!(!subjects.name_their_tables(&second));
    subjects.sweep().unwrap();
    assert_eq!(
        kernel.numbers().len(),
        2,
        "the endpoint names the former one"
    );

    // The next change requests the build again, whether or not it concerns this endpoint.
    let third = rules.change_others();
    assert_eq!(subjects.behind(&third).pending, BTreeSet::from([2]));
    build(&mut subjects, 2, ONE, &third);
    assert_eq!(subjects.behind(&third), Behind::default());
    // The build failed for a reason unrelated to policy, and nothing waits for that.
    subjects.fail(2, failure(&third));
    assert_ne!(subjects.behind(&third), Behind::default());
    assert!(subjects.name_their_tables(&third));
    subjects.sweep().unwrap();
    assert_eq!(kernel.numbers().len(), 1);
}

#[test]
fn what_is_built_by_an_older_generation_is_behind_and_takes_nothing_back() {
    let kernel = Kernel::default();
    let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
    let mut rules = Rules::new(&[ONE]);
    let first = rules.allow(2, 1);
    let second = rules.allow(4, 1);
    subjects.plan(1, ONE.into(), &labels(ONE), &first).unwrap();
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1]));
    subjects.settle(1, &[]);
    assert_eq!(subjects.behind(&second).pending, BTreeSet::from([1]));
    build(&mut subjects, 2, ONE, &second);
    build(&mut subjects, 1, ONE, &first);
    assert_eq!(subjects.behind(&second), Behind::default());
    assert_eq!(subjects.forget(1), Vec::<IpAddr>::new());
}

/// Builds an endpoint as the enforcer does. Returns whether it succeeded.
fn try_build(
    subjects: &mut Subjects,
    id: u16,
    identity: Identity,
    generation: &Generation,
) -> bool {
    match subjects.plan(id, identity.into(), &labels(identity), generation) {
        Ok(_) => {
            subjects.settle(id, &[]);
            true
        }
        Err(PolicyError::Full { .. }) => {
            subjects.fail(id, failure(generation));
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Number of entries in a table that lets one peer reach this many ports.
fn entries_for(ports: u16) -> usize {
    let kernel = Kernel::default();
    let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
    let first = Rules::new(&[ONE]).allow(2, ports);
    build(&mut subjects, 1, ONE, &first);
    kernel.used()
}

#[test]
fn tables_that_nobody_names_make_room_for_the_next_one() {
    const IDENTITIES: [Identity; 4] = [Identity(300), Identity(301), Identity(302), Identity(303)];
    let kernel = with_room(entries_for(10) * 5);
    let mut subjects = Subjects::new(Box::new(kernel), []);
    let mut rules = Rules::new(&IDENTITIES);
    let first = rules.allow(2, 10);
    let endpoints = || IDENTITIES.into_iter().zip(1..);
    for (identity, id) in endpoints() {
        build(&mut subjects, id, identity, &first);
    }
    // There is space for one more table beside the existing ones.
    let second = rules.allow(1001, 10);
    for (identity, id) in endpoints() {
        assert!(try_build(&mut subjects, id, identity, &second), "{id}");
    }
    assert_eq!(subjects.behind(&second), Behind::default());
}

#[test]
fn where_former_and_new_do_not_fit_together_one_identity_after_the_other_is_closed() {
    const IDENTITIES: [Identity; 2] = [Identity(300), Identity(301)];
    let kernel = with_room(entries_for(10) * 5 / 2);
    let mut subjects = Subjects::new(Box::new(kernel.clone()), []);
    let mut rules = Rules::new(&IDENTITIES);
    let first = rules.allow(2, 10);
    // Two endpoints of each identity.
    let endpoints = || IDENTITIES.into_iter().cycle().zip(1..=4);
    for (identity, id) in endpoints() {
        build(&mut subjects, id, identity, &first);
    }
    let second = rules.allow(1001, 10);
    subjects.behind(&second);
    for (identity, id) in endpoints() {
        assert!(!try_build(&mut subjects, id, identity, &second));
    }
    assert_eq!(subjects.cramped(), BTreeSet::from([1, 2, 3, 4]));
    assert!(!subjects.sweep().unwrap());
    for identity in IDENTITIES {
        assert_eq!(subjects.to_close(), Some(identity.into()));
        let (table, ids) = subjects.close(identity.into()).unwrap();
        assert!(kernel.now().tables[&table].is_empty());
        assert_eq!(ids.len(), 2);
        for id in &ids {
            subjects.moved(*id, table);
        }
        assert!(subjects.sweep().unwrap());
        subjects.retry(&ids);
        assert_eq!(subjects.behind(&second).pending, ids);
        for id in ids {
            assert!(try_build(&mut subjects, id, identity, &second));
        }
    }
    assert_eq!(subjects.behind(&second), Behind::default());

    // A table that does not fit at all closes no endpoint.
    let third = rules.allow(2, 30);
    subjects.behind(&third);
    for (identity, id) in endpoints() {
        assert!(!try_build(&mut subjects, id, identity, &third));
    }
    assert_eq!(subjects.to_close(), None);
    assert_eq!(subjects.behind(&third).failed.len(), 4);
    // The old rules also open an endpoint that was closed.
    let fourth = rules.allow(2, 10);
    subjects.behind(&fourth);
    for (identity, id) in endpoints() {
        try_build(&mut subjects, id, identity, &fourth);
    }
    let (table, ids) = subjects.close(Identity(300).into()).unwrap();
    for id in &ids {
        subjects.moved(*id, table);
    }
    subjects.sweep().unwrap();
    let fifth = rules.allow(1001, 10);
    for (identity, id) in endpoints() {
        assert!(try_build(&mut subjects, id, identity, &fifth), "{id}");
    }
    assert_eq!(subjects.behind(&fifth), Behind::default());
}
