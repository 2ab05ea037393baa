//! The policy test table and Cilium's published examples, evaluated by the library: once from the rules themselves, once
//! from compiled entries.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use health_model::identity::Identity;
use health_model::labels::{Label, LabelSet};
use health_model::policy::Direction;
use health_policy::{Peer, Policy, PolicySettings, Repository, TraceRequest, Verdict};
use tests::policy::cases::{Case, ENDPOINTS, End, Outcome, SCENARIOS, Scenario};
use tests::policy::examples::{EXAMPLES, Example, Expected};

/// A scenario's policies, and the identities of all endpoints and addresses in its cases.
struct World {
    repository: Repository,
    settings: PolicySettings,
    identities: BTreeMap<Identity, Arc<LabelSet>>,
    endpoints: BTreeMap<&'static str, Identity>,
}

impl World {
    fn of(scenario: &Scenario) -> Result<Self> {
        let mut repository = Repository::default();
        for document in scenario.documents {
            repository.import(document)?;
        }
        let mut identities = BTreeMap::new();
        for identity in Identity::all_reserved() {
            let labels = identity
                .reserved_labels()
                .context("reserved without labels")?;
            identities.insert(identity, Arc::new(labels));
        }
        let mut endpoints = BTreeMap::new();
        for (number, endpoint) in (256..).zip(ENDPOINTS) {
            let identity = if endpoint.labels.is_empty() {
                Identity::INIT
            } else {
                identities.insert(Identity(number), set(endpoint.labels)?);
                Identity(number)
            };
            endpoints.insert(endpoint.name, identity);
        }
        for (number, prefix) in ((1 << 24) + 1..).zip(repository.prefixes()) {
            let label = format!("cidr:{prefix}");
            identities.insert(Identity(number), set(&[&label, "reserved:world"])?);
        }
        Ok(Self {
            repository,
            settings: PolicySettings {
                mode: scenario.mode,
                allow_localhost: scenario.allow_localhost,
            },
            identities,
            endpoints,
        })
    }

    /// Looks an address up the way the ipcache does: returns the identity of the longest prefix that contains it.
    fn identity_of_address(&self, address: IpAddr) -> Identity {
        let prefixes = self.identities.iter().filter_map(|(identity, labels)| {
            let prefix = health_policy::prefix(labels)?;
            prefix
                .contains(&address)
                .then_some((prefix.prefix_len(), *identity))
        });
        prefixes
            .max()
            .map_or(Identity::WORLD, |(_, identity)| identity)
    }

    fn peer(&self, end: End) -> Result<Peer<'_>> {
        let identity = match end {
            End::Endpoint(name) => self.endpoints[name],
            End::Host => Identity::HOST,
            End::RemoteNode => Identity::REMOTE_NODE,
            End::World(address) => self.identity_of_address(address.parse()?),
        };
        Ok(Peer::new(identity, &self.identities[&identity]))
    }

    fn by_rules(&self, case: &Case) -> Result<Outcome> {
        let request = TraceRequest {
            source: self.peer(case.from)?,
            destination: self.peer(case.to)?,
            l4: case.l4,
            only: None,
        };
        let trace = self.repository.trace(&request, [self.settings; 2]);
        let [egress, ingress] = [0, 1].map(|side| trace.sides[side].decision.verdict);
        let outcome = outcome(egress, ingress);
        assert_eq!(trace.passes, outcome == Outcome::Passes, "{case:?}");
        Ok(outcome)
    }

    fn by_entries(&self, case: &Case) -> Result<Outcome> {
        let (source, destination) = (self.peer(case.from)?, self.peer(case.to)?);
        let decide = |subject: &Peer<'_>, direction, peer: &Peer<'_>| {
            let resolved = self.repository.resolve(subject.labels(), self.settings);
            let compiled = resolved.compile(&self.identities);
            compiled
                .direction(direction)
                .lookup(peer.identity(), case.l4)
        };
        let egress = decide(&source, Direction::Egress, &destination);
        let ingress = decide(&destination, Direction::Ingress, &source);
        Ok(outcome(egress, ingress))
    }
}

fn set(labels: &[&str]) -> Result<Arc<LabelSet>> {
    let labels: Vec<Label> = labels
        .iter()
        .map(|label| label.parse())
        .collect::<Result<_, _>>()?;
    Ok(Arc::new(LabelSet::new(labels)?))
}

/// Combines the verdicts of both sides. Egress is checked first.
fn outcome(egress: Verdict, ingress: Verdict) -> Outcome {
    match (egress, ingress) {
        (Verdict::None, _) => Outcome::EgressDrops,
        (Verdict::Deny, _) => Outcome::EgressDenies,
        (Verdict::Allow, Verdict::None) => Outcome::IngressDrops,
        (Verdict::Allow, Verdict::Deny) => Outcome::IngressDenies,
        (Verdict::Allow, Verdict::Allow) => Outcome::Passes,
    }
}

fn check(scenario: &Scenario) -> Result<()> {
    let world = World::of(scenario)?;
    for case in scenario.cases {
        let name = scenario.name;
        assert_eq!(
            world.by_rules(case)?,
            case.outcome,
            "rules: {name}: {case:?}"
        );
        assert_eq!(
            world.by_entries(case)?,
            case.outcome,
            "entries: {name}: {case:?}"
        );
    }
    Ok(())
}

#[test]
fn every_case_of_the_table_is_decided_as_it_says() -> Result<()> {
    SCENARIOS.iter().try_for_each(check)
}

#[test]
fn each_published_example_is_decided_as_it_says() -> Result<()> {
    let mut scenarios = EXAMPLES.iter().filter_map(Example::scenario);
    scenarios.try_for_each(|scenario| check(&scenario))
}

#[test]
fn each_other_published_example_is_refused_by_name() -> Result<()> {
    for example in EXAMPLES {
        let Expected::Refused(words) = example.expected else {
            continue;
        };
        let read = health_policy::parse(example.document);
        let read = read.and_then(|found| {
            let mut policies = found.policies.iter();
            policies.try_for_each(Policy::check_without_cluster)
        });
        let Err(refused) = read else {
            bail!("{} was accepted", example.published);
        };
        let refused = refused.to_string();
        assert!(refused.contains(words), "{}: {refused}", example.published);
    }
    Ok(())
}

#[test]
fn each_example_in_force_allows_something_and_not_everything() {
    for example in EXAMPLES {
        let Expected::InForce(cases) = example.expected else {
            continue;
        };
        let is_passed = |case: &Case| case.outcome == Outcome::Passes;
        assert!(cases.iter().any(is_passed), "{}", example.published);
        assert!(!cases.iter().all(is_passed), "{}", example.published);
    }
}

#[test]
fn the_table_has_cases_of_every_kind() {
    let cases = || SCENARIOS.iter().flat_map(|scenario| scenario.cases);
    assert!(cases().count() >= 60, "{}", cases().count());
    for outcome in [
        Outcome::Passes,
        Outcome::EgressDrops,
        Outcome::EgressDenies,
        Outcome::IngressDrops,
        Outcome::IngressDenies,
    ] {
        assert!(cases().any(|case| case.outcome == outcome), "{outcome:?}");
    }
}
