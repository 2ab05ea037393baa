//! Combines objects that a source stores individually into one set.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_model::api::ServiceProblem;
use imbl::OrdMap;

use super::known::{Known, KnownService, KnownSlice, ServiceDocument};
use super::{ServiceSet, Sourced, Synced};
use crate::difference::differences;
use crate::spec::{EndpointSlice, Service, ServiceName, SliceName};

/// Gathers the known objects, each under its own key. Remembers the last input, so that the cost of the next table
/// depends only on the differences.
#[derive(Debug, Default)]
pub struct Gathered {
    known_services: OrdMap<String, Arc<KnownService>>,
    known_slices: OrdMap<String, Arc<KnownSlice>>,
    documents: OrdMap<String, Arc<ServiceDocument>>,
    services: OrdMap<ServiceName, Sourced<Service>>,
    slices: OrdMap<SliceName, Sourced<EndpointSlice>>,
    /// Problems by kind and key, where the kinds are services, slices, and other documents.
    ill: BTreeMap<(u8, String), Vec<ServiceProblem>>,
}

impl Gathered {
    /// Takes over the services known now.
    pub fn take_services(&mut self, now: &OrdMap<String, Arc<KnownService>>) {
        let before = std::mem::replace(&mut self.known_services, now.clone());
        for (key, before, now) in changes(&before, now) {
            self.service(key, before, now);
        }
    }

    /// Takes over the endpoint slices known now.
    pub fn take_slices(&mut self, now: &OrdMap<String, Arc<KnownSlice>>) {
        let before = std::mem::replace(&mut self.known_slices, now.clone());
        for (key, before, now) in changes(&before, now) {
            self.slice(key, before, now);
        }
    }

    /// Takes over the documents known now, for a source with services and slices in one store.
    pub fn take_documents(&mut self, now: &OrdMap<String, Arc<ServiceDocument>>) {
        let former = std::mem::replace(&mut self.documents, now.clone());
        for (key, before, now) in changes(&former, now) {
            let of = ServiceDocument::service;
            self.service(key, before.and_then(of), now.and_then(of));
            let of = ServiceDocument::slice;
            self.slice(key, before.and_then(of), now.and_then(of));
            self.note(2, key, now.map_or(&[], ServiceDocument::other));
        }
    }

    /// Returns all objects and all problems: `outages` are the source's problems, the rest are those of objects.
    pub fn set(
        &self,
        outages: impl IntoIterator<Item = ServiceProblem>,
        synced: Synced,
    ) -> ServiceSet {
        let ill = self.ill.values().flatten().cloned();
        ServiceSet {
            services: self.services.clone(),
            slices: self.slices.clone(),
            problems: outages.into_iter().chain(ill).collect(),
            synced,
        }
    }

    fn service(&mut self, key: &str, before: Option<&KnownService>, now: Option<&KnownService>) {
        replace(&mut self.services, before, now);
        self.note(0, key, now.map_or(&[], Known::problems));
    }

    fn slice(&mut self, key: &str, before: Option<&KnownSlice>, now: Option<&KnownSlice>) {
        replace(&mut self.slices, before, now);
        self.note(1, key, now.map_or(&[], Known::problems));
    }

    fn note(&mut self, kind: u8, key: &str, problems: &[ServiceProblem]) {
        let at = (kind, key.to_owned());
        if problems.is_empty() {
            self.ill.remove(&at);
        } else {
            self.ill.insert(at, problems.to_vec());
        }
    }
}

fn replace<N: Clone + Ord, T>(
    objects: &mut OrdMap<N, Sourced<T>>,
    before: Option<&Known<N, T>>,
    now: Option<&Known<N, T>>,
) {
    let before = before.and_then(Known::good);
    let now = now.and_then(Known::good);
    if let Some((name, _)) = before.filter(|(name, _)| now.is_none_or(|(other, _)| name != other)) {
        objects.remove(name);
    }
    if let Some((name, sourced)) = now {
        objects.insert(name.clone(), sourced.clone());
    }
}

/// A key, and its value in each of two tables.
type Change<'a, T> = (&'a str, Option<&'a T>, Option<&'a T>);

/// Returns the differences between two tables.
fn changes<'a, T: PartialEq>(
    before: &'a OrdMap<String, Arc<T>>,
    now: &'a OrdMap<String, Arc<T>>,
) -> impl Iterator<Item = Change<'a, T>> {
    let of = |one: Option<&'a Arc<T>>| one.map(Arc::as_ref);
    differences(before, now).map(move |(key, before, now)| (key.as_str(), of(before), of(now)))
}
