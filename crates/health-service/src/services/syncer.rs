//! From what the sources say to what the provider does.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::provider::{Provider, Work};
use super::{Health, Settings, View, view};
use crate::choice::Topology;
use crate::runner::Job;
use crate::source::{ServiceSet, Sourced, Synced, merge};
use crate::spec::{PortKey, ServiceName};
use crate::state::{Changes, State};
use crate::tracker::{EndpointsChangeTracker, ServiceChangeTracker};

/// Syncs a provider with sources.
pub(super) struct Syncer<P> {
    sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
    topology: watch::Receiver<Topology>,
    /// What the trackers were told.
    told: ServiceSet,
    services: ServiceChangeTracker,
    endpoints: EndpointsChangeTracker,
    state: State,
    provider: P,
    /// What the provider has not done.
    pending: Changes,
    /// When the provider last did all that there is; none if it must.
    last_full: Option<Instant>,
    full_period: Duration,
    health: Arc<Health>,
    view: Arc<watch::Sender<Arc<View>>>,
}

impl<P: Provider> Syncer<P> {
    pub(super) fn new(
        settings: &Settings,
        topology: watch::Receiver<Topology>,
        sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
        provider: P,
        health: Arc<Health>,
        view: Arc<watch::Sender<Arc<View>>>,
    ) -> Self {
        let place = topology.borrow().clone();
        Self {
            sources,
            topology,
            told: ServiceSet::default(),
            services: ServiceChangeTracker::default(),
            endpoints: EndpointsChangeTracker::new(place.node.clone(), (settings.clock)()),
            state: State::new(place),
            provider,
            pending: Changes::default(),
            last_full: None,
            full_period: settings.intervals.max,
            health,
            view,
        }
    }

    /// Tells the trackers what differs from what they know. Returns the services that it may be about.
    fn tell(&mut self, mut set: ServiceSet) -> BTreeSet<ServiceName> {
        // Whoever has begun never waits again.
        set.synced = Synced {
            services: true,
            slices: true,
        };
        let before = std::mem::replace(&mut self.told, set);
        let mut touched = BTreeSet::new();
        for (name, _, now) in differences(&before.services, &self.told.services) {
            let service = now.and_then(|sourced| sourced.object.clone());
            self.services.update(name, service);
            touched.insert(name.clone());
        }
        for (name, before, now) in differences(&before.slices, &self.told.slices) {
            let slice = |sourced: Option<&Sourced<_>>| sourced.and_then(|one| one.object.clone());
            let (former, slice) = (slice(before), slice(now));
            touched.extend(former.map(|slice| slice.service.clone()));
            let Some(slice) = slice else {
                self.endpoints.remove(name);
                continue;
            };
            touched.insert(slice.service.clone());
            // The probes of this node change a slice too, and that is not what its time is of.
            let known = before.and_then(|sourced| sourced.trigger_time);
            let time = now.and_then(|sourced| sourced.trigger_time);
            self.endpoints.update(slice, time.filter(|_| time != known));
        }
        touched
    }

    /// Counts what the trackers were told.
    fn count(&self) {
        let mut changes = self.health.changes();
        changes.services = self.services.total();
        changes.pending_services += self.services.pending() as u64;
        changes.endpoints = self.endpoints.total();
        changes.pending_endpoints += self.endpoints.pending();
    }

    /// Adds to what the provider has not done.
    fn note(&mut self, changes: Changes, moved: BTreeSet<PortKey>) {
        let pending = &mut self.pending;
        pending.ports.extend(changes.ports);
        pending.ports.extend(moved);
        pending.deleted.extend(changes.deleted);
        let services = self.state.services();
        pending
            .deleted
            .retain(|service| services.of_service(service).next().is_none());
        for (service, mut times) in changes.trigger_times {
            let known = pending.trigger_times.entry(service).or_default();
            known.append(&mut times);
        }
    }
}

impl<P: Provider> Job for Syncer<P> {
    type Error = P::Error;

    /// Does what is to be done, if the sources are ready.
    async fn run(&mut self) -> Result<(), P::Error> {
        let sources = self.sources.iter();
        let sets: Vec<_> = sources.map(|source| source.borrow().clone()).collect();
        let set = merge(&sets);
        let is_started = self.told.synced.is_complete();
        if !is_started && !set.synced.is_complete() {
            return Ok(());
        }
        let topology = self.topology.borrow().clone();
        let moved = self.state.set_topology(topology);
        let mut touched = self.tell(set);
        self.count();
        let changes = self.state.sync(&mut self.services, &mut self.endpoints);
        self.note(changes, moved);
        let ports = self.pending.ports.iter();
        touched.extend(ports.map(|key| key.name.service.clone()));
        let (told, state) = (&self.told, &self.state);
        view::update(&self.view, |view| view.show(told, state, touched));

        let since = self.last_full.take();
        let begin = Instant::now();
        let full = since.filter(|last| begin.duration_since(*last) < self.full_period);
        let work = Work {
            state: &self.state,
            changes: &self.pending,
            is_full: full.is_none(),
        };
        let result = self.provider.sync(work).await;
        if result.is_ok() {
            self.last_full = Some(full.unwrap_or(begin));
            self.pending = Changes::default();
            self.health.updated();
        }
        let error = result.as_ref().err().map(ToString::to_string);
        if self.view.borrow().error != error {
            view::update(&self.view, |view| view.error = error);
        }
        result
    }
}

/// The name of an object, and what each of two maps has of it.
type Difference<'a, N, T> = (&'a N, Option<&'a Sourced<T>>, Option<&'a Sourced<T>>);

/// What two maps of objects differ in, those that are gone first. Looks at each object
/// once, since both maps are sorted.
fn differences<'a, N: Ord, T>(
    before: &'a BTreeMap<N, Sourced<T>>,
    now: &'a BTreeMap<N, Sourced<T>>,
) -> Vec<Difference<'a, N, T>> {
    let (mut before, mut now) = (before.iter().peekable(), now.iter().peekable());
    let pairs = iter::from_fn(move || {
        let first = match (before.peek(), now.peek()) {
            (Some((known, _)), Some((name, _))) => known.cmp(name),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return None,
        };
        let known = before.next_if(|_| first.is_le());
        let found = now.next_if(|_| first.is_ge());
        let (name, _) = known.or(found)?;
        Some((name, known.map(|(_, one)| one), found.map(|(_, one)| one)))
    });
    let different = pairs.filter(|(_, known, found)| match (known, found) {
        (Some(known), Some(found)) => !is_one(known, found),
        _ => true,
    });
    let mut different: Vec<_> = different.collect();
    different.sort_by_key(|(.., found)| found.is_some());
    different
}

/// Whether both are one object in memory, of one source.
fn is_one<T>(one: &Sourced<T>, other: &Sourced<T>) -> bool {
    let is_one = match (&one.object, &other.object) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    };
    is_one && one.source == other.source
}
