//! Merges several sources into one.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::Hash;
use std::ops::Bound;
use std::sync::Arc;

use health_model::api::ServiceProblem;
use health_model::manifest::Problem;
use imbl::OrdMap;

use super::{ServiceSet, Sourced, Synced};
use crate::difference::differences;
use crate::spec::{EndpointSlice, Extent, Kind, Service, ServiceName, SliceName, SpecError};

/// Merges the sets of several sources into one. Remembers the last input, so that the cost of the next set depends only
/// on the differences.
#[derive(Debug, Default)]
pub struct Merger(Holders<usize>);

impl Merger {
    /// Returns all objects of these sets without duplicates: if two sets have the same object, the first set's is used,
    /// and the other one is a problem. The sets must come from the same sources in each call.
    pub fn merge(&mut self, sets: &[Arc<ServiceSet>]) -> ServiceSet {
        if let [only] = sets {
            return ServiceSet::clone(only);
        }
        for (rank, set) in sets.iter().enumerate() {
            self.0.set(&rank, &set.services, &set.slices);
        }
        let problems = sets.iter().flat_map(|set| set.problems.iter().cloned());
        ServiceSet {
            synced: Synced {
                services: sets.iter().all(|set| set.synced.services),
                slices: sets.iter().all(|set| set.synced.slices),
            },
            problems: problems.chain(self.0.duplicates()).collect(),
            services: self.0.services.first.clone(),
            slices: self.0.slices.first.clone(),
        }
    }
}

/// The objects of several holders, in order of precedence.
#[derive(Debug)]
pub(super) struct Holders<K> {
    services: Ranked<K, ServiceName, Service>,
    slices: Ranked<K, SliceName, EndpointSlice>,
}

impl<K> Default for Holders<K> {
    fn default() -> Self {
        Self {
            services: Ranked::default(),
            slices: Ranked::default(),
        }
    }
}

impl<K: Clone + Ord> Holders<K> {
    /// Sets the objects of a holder.
    pub(super) fn set(
        &mut self,
        holder: &K,
        services: &OrdMap<ServiceName, Sourced<Service>>,
        slices: &OrdMap<SliceName, Sourced<EndpointSlice>>,
    ) {
        self.services.set(holder, services);
        self.slices.set(holder, slices);
    }

    /// Removes all objects of a holder.
    pub(super) fn remove(&mut self, holder: &K) {
        self.set(holder, &OrdMap::new(), &OrdMap::new());
        self.services.held.remove(holder);
        self.slices.held.remove(holder);
    }

    /// Returns the objects without duplicates.
    pub(super) fn objects(&self) -> ServiceSet {
        ServiceSet {
            services: self.services.first.clone(),
            slices: self.slices.first.clone(),
            ..ServiceSet::default()
        }
    }

    /// Returns the objects that are not used because another holder has them too, as problems.
    pub(super) fn duplicates(&self) -> impl Iterator<Item = ServiceProblem> {
        let services = self.services.duplicates(Kind::Service);
        services.chain(self.slices.duplicates(Kind::Slice))
    }
}

/// Objects of one kind.
#[derive(Debug)]
struct Ranked<K, N: Ord, T> {
    /// The objects of each holder.
    held: BTreeMap<K, OrdMap<N, Sourced<T>>>,
    /// The object that is used for each name.
    first: OrdMap<N, Sourced<T>>,
    /// The holder of each object in use.
    holders: HashMap<N, K>,
    /// The same objects from later holders.
    others: BTreeMap<(N, K), Sourced<T>>,
}

impl<K, N: Ord, T> Default for Ranked<K, N, T> {
    fn default() -> Self {
        Self {
            held: BTreeMap::new(),
            first: OrdMap::new(),
            holders: HashMap::new(),
            others: BTreeMap::new(),
        }
    }
}

impl<K, N, T> Ranked<K, N, T>
where
    K: Clone + Ord,
    N: Clone + Ord + Hash + fmt::Display,
    T: Eq,
{
    fn set(&mut self, holder: &K, now: &OrdMap<N, Sourced<T>>) {
        let before = self.held.insert(holder.clone(), now.clone());
        for (name, _, object) in differences(&before.unwrap_or_default(), now) {
            match object {
                Some(object) => self.add(holder, name, object.clone()),
                None => self.remove(holder, name),
            }
        }
    }

    fn add(&mut self, holder: &K, name: &N, object: Sourced<T>) {
        match self.holders.get(name) {
            Some(first) if first < holder => {
                self.others.insert((name.clone(), holder.clone()), object);
                return;
            }
            Some(later) if later > holder => {
                let later = (name.clone(), later.clone());
                let loser = self.first.get(name).cloned();
                self.others.extend(loser.map(|loser| (later, loser)));
            }
            _ => {}
        }
        self.holders.insert(name.clone(), holder.clone());
        self.first.insert(name.clone(), object);
    }

    fn remove(&mut self, holder: &K, name: &N) {
        let at = (name.clone(), holder.clone());
        if self.holders.get(name) != Some(holder) {
            self.others.remove(&at);
            return;
        }
        let mut later = self.others.range((Bound::Excluded(at), Bound::Unbounded));
        match later.next().map(|(at, _)| at.clone()) {
            Some(next) if next.0 == *name => {
                let object = self.others.remove(&next);
                self.first
                    .extend(object.map(|object| (name.clone(), object)));
                self.holders.insert(next.0, next.1);
            }
            _ => {
                self.first.remove(name);
                self.holders.remove(name);
            }
        }
    }

    fn duplicates(&self, kind: Kind) -> impl Iterator<Item = ServiceProblem> {
        self.others.iter().filter_map(move |((name, _), sourced)| {
            let first = self.first.get(name)?;
            let error = SpecError {
                kind,
                object: name.to_string(),
                path: "metadata.name".to_owned(),
                problem: Problem::Duplicate(name.to_string()),
                extent: Extent::Object,
            };
            Some(ServiceProblem {
                subject: sourced.source.to_string(),
                problem: format!("{error}: also used in {}", first.source),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::array;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::super::testing::{ServiceText, service_set};
    use super::*;

    fn reported(set: &ServiceSet) -> Vec<String> {
        let problems = set.problems.iter();
        problems
            .map(|one| format!("{}: {}", one.subject, one.problem))
            .collect()
    }

    #[test]
    fn the_first_of_two_sources_with_an_object_counts_and_the_other_is_reported() {
        let set = |source: &str, ip: &str| {
            let service = ServiceText::new("web", ip);
            Arc::new(service_set(source, &[service]))
        };
        let mut merger = Merger::default();
        let merged = merger.merge(&[set("a", "10.96.0.1"), set("b", "10.96.0.2")]);
        let web = &merged.services[&ServiceName::new("shop", "web")];
        assert_eq!(&*web.source, "a");
        let duplicate = |kind| {
            format!(
                r#"b: {kind} shop/web: metadata.name: Duplicate value: "shop/web": also used in a"#
            )
        };
        assert_eq!(
            reported(&merged),
            [duplicate("service"), duplicate("endpoint slice")]
        );
        assert!(merged.synced.is_complete());
    }

    #[test]
    fn a_kind_is_synced_when_all_sources_have_it() {
        let set = |services, slices| {
            Arc::new(ServiceSet {
                synced: Synced { services, slices },
                ..ServiceSet::default()
            })
        };
        let merged = Merger::default().merge(&[set(true, true), set(true, false)]);
        assert_eq!(
            merged.synced,
            Synced {
                services: true,
                slices: false
            }
        );
        assert!(!merged.synced.is_complete());
    }

    const NAMES: [&str; 3] = ["a", "b", "c"];
    const SOURCES: usize = 3;
    const VERSIONS: usize = 2;

    /// The set with one service alone, by source, name and version. Parsing the sets again for each case would take a
    /// minute.
    static SETS: LazyLock<[[[ServiceSet; VERSIONS]; NAMES.len()]; SOURCES]> = LazyLock::new(|| {
        array::from_fn(|source| {
            array::from_fn(|name| {
                array::from_fn(|version| {
                    let text = ServiceText::new(NAMES[name], &format!("10.96.0.{}", version + 1));
                    service_set(&source.to_string(), &[text])
                })
            })
        })
    });

    /// The set of a source: one version of each service, counted from 1, or none (0).
    fn set_of(source: usize, versions: [usize; NAMES.len()]) -> ServiceSet {
        let mut set = service_set(&source.to_string(), &[]);
        for (name, version) in versions.into_iter().enumerate() {
            if let Some(version) = version.checked_sub(1) {
                let alone = SETS[source][name][version].clone();
                set.services.extend(alone.services);
                set.slices.extend(alone.slices);
            }
        }
        set
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// For each of three sources, which of three services it has: none, or one of two versions of the service.
        #[test]
        fn sets_that_come_one_after_the_other_are_merged_as_they_would_be_at_once(
            steps in prop::collection::vec(prop::array::uniform3(prop::array::uniform3(0..=VERSIONS)), 1..20),
        ) {
            let mut merger = Merger::default();
            for step in steps {
                let sets = step.into_iter().enumerate();
                let sets: Vec<_> = sets.map(|(source, versions)| Arc::new(set_of(source, versions))).collect();
                let merged = merger.merge(&sets);
                prop_assert_eq!(&merged, &Merger::default().merge(&sets));
                for name in NAMES {
                    let name = ServiceName::new("shop", name);
                    let first = sets.iter().find_map(|set| set.services.get(&name));
                    prop_assert_eq!(merged.services.get(&name), first);
                }
            }
        }
    }
}
