//! Several sources as one.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

use health_model::api::ServiceProblem;
use health_model::manifest::Problem;

use super::{ServiceSet, Sourced, Synced};
use crate::spec::{EndpointSlice, Kind, Service, ServiceName, SliceName, SpecError};

/// All objects of these sets, each once: one that two sets have is that of the first, and the other is a problem.
pub fn merge(sets: &[Arc<ServiceSet>]) -> ServiceSet {
    let Some((first, others)) = sets.split_first() else {
        return ServiceSet {
            synced: Synced {
                services: true,
                slices: true,
            },
            ..ServiceSet::default()
        };
    };
    let mut merged = ServiceSet::clone(first);
    for set in others {
        merged.synced.services &= set.synced.services;
        merged.synced.slices &= set.synced.slices;
        merged.problems.extend(set.problems.iter().cloned());
        merged.add(&set.services, &set.slices);
    }
    merged
}

impl ServiceSet {
    /// Adds objects that count less than those that are there.
    pub(super) fn add(
        &mut self,
        services: &BTreeMap<ServiceName, Sourced<Service>>,
        slices: &BTreeMap<SliceName, Sourced<EndpointSlice>>,
    ) {
        let problems = &mut self.problems;
        add(&mut self.services, services, Kind::Service, problems);
        add(&mut self.slices, slices, Kind::Slice, problems);
    }
}

fn add<N: Clone + Ord + fmt::Display, T>(
    known: &mut BTreeMap<N, Sourced<T>>,
    more: &BTreeMap<N, Sourced<T>>,
    kind: Kind,
    problems: &mut Vec<ServiceProblem>,
) {
    for (name, sourced) in more {
        match known.entry(name.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(sourced.clone());
            }
            Entry::Occupied(first) => {
                let error = SpecError {
                    kind,
                    object: name.to_string(),
                    path: "metadata.name".to_owned(),
                    problem: Problem::Duplicate(name.to_string()),
                };
                problems.push(ServiceProblem {
                    subject: sourced.source.to_string(),
                    problem: format!("{error}: {} has it too", first.get().source),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ServiceText, service_set};
    use super::*;

    #[test]
    fn of_an_object_that_two_sources_have_the_first_counts_and_the_other_is_told() {
        let set = |source: &str, ip: &str| {
            let service = ServiceText::new("web", ip);
            Arc::new(service_set(source, &[service]))
        };
        let merged = merge(&[set("a", "10.96.0.1"), set("b", "10.96.0.2")]);
        let web = &merged.services[&ServiceName::new("shop", "web")];
        assert_eq!(&*web.source, "a");
        let told: Vec<_> = merged
            .problems
            .iter()
            .map(|one| format!("{}: {}", one.subject, one.problem))
            .collect();
        let duplicate = |kind| {
            format!(
                r#"b: {kind} shop/web: metadata.name: Duplicate value: "shop/web": a has it too"#
            )
        };
        assert_eq!(told, [duplicate("service"), duplicate("endpoint slice")]);
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
        let merged = merge(&[set(true, true), set(true, false)]);
        assert_eq!(
            merged.synced,
            Synced {
                services: true,
                slices: false
            }
        );
        assert!(!merged.synced.is_complete());
    }
}
