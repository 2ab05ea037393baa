//! Turns the sources' objects into work for the provider.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::provider::{Provider, Work};
use super::view::{self, Failure};
use super::{Health, NodeFacts, SyncSettings, View};
use crate::difference::{Difference, differences};
use crate::runner::Job;
use crate::source::{Merger, ServiceSet, Sourced, Synced};
use crate::spec::PortKey;
use crate::state::{Changes, Conflicts, State};
use crate::tracker::{EndpointsChangeTracker, ServiceChangeTracker};

/// Maximum number of new conflicts per sync to log individually.
const MOST_LOGGED: usize = 10;

/// Syncs the objects of sources to a provider.
pub(super) struct Syncer<P> {
    sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
    node: NodeFacts,
    merger: Merger,
    /// The state of the trackers.
    tracked: ServiceSet,
    services: ServiceChangeTracker,
    endpoints: EndpointsChangeTracker,
    state: State,
    provider: P,
    /// The changes that the provider has not applied yet.
    pending: Changes,
    /// The time of the provider's last full sync; `None` if the next one must be full.
    last_full: Option<Instant>,
    full_period: Duration,
    health: Arc<Health>,
    view: Arc<watch::Sender<Arc<View>>>,
}

impl<P: Provider> Syncer<P> {
    pub(super) fn new(
        settings: &SyncSettings,
        node: NodeFacts,
        sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
        provider: P,
        health: Arc<Health>,
        view: Arc<watch::Sender<Arc<View>>>,
    ) -> Self {
        let topology = node.topology.borrow().clone();
        Self {
            sources,
            node,
            merger: Merger::default(),
            tracked: ServiceSet::default(),
            services: ServiceChangeTracker::default(),
            endpoints: EndpointsChangeTracker::new(topology.node.clone(), (settings.clock)()),
            state: State::new(topology),
            provider,
            pending: Changes::default(),
            last_full: None,
            full_period: settings.intervals.max,
            health,
            view,
        }
    }

    /// Reports all differences from the trackers' state to the trackers.
    fn publish(&mut self, mut set: ServiceSet) {
        // Once serving has started, never wait again.
        set.synced = Synced {
            services: true,
            slices: true,
        };
        let before = std::mem::replace(&mut self.tracked, set);
        for (name, _, now) in gone_first(&before.services, &self.tracked.services) {
            let service = now.and_then(|sourced| sourced.object.clone());
            self.services.update(name, service);
        }
        for (name, before, now) in gone_first(&before.slices, &self.tracked.slices) {
            let Some(slice) = now.and_then(|sourced| sourced.object.clone()) else {
                self.endpoints.remove(name);
                continue;
            };
            // This node's probes can also change a slice, but its trigger time does not refer to that change.
            let known = before.and_then(|sourced| sourced.trigger_time);
            let time = now.and_then(|sourced| sourced.trigger_time);
            self.endpoints.update(slice, time.filter(|_| time != known));
        }
    }

    /// Counts the changes reported to the trackers.
    fn count(&self) {
        let mut changes = self.health.changes();
        changes.services = self.services.total();
        changes.pending_services += self.services.pending() as u64;
        changes.endpoints = self.endpoints.total();
        changes.pending_endpoints += self.endpoints.pending();
    }

    /// Adds changes to those that the provider has not applied yet.
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

    /// Does the pending work if the sources are ready.
    async fn run(&mut self) -> Result<(), P::Error> {
        // Anything queued from now on may be too late for this run.
        let begun = self.health.now();
        let sources = self.sources.iter();
        let sets: Vec<_> = sources.map(|source| source.borrow().clone()).collect();
        let set = self.merger.merge(&sets);
        let is_started = self.tracked.synced.is_complete();
        if !is_started && !set.synced.is_complete() {
            return Ok(());
        }
        let conflicts = self.state.conflicts_by_port().clone();
        let NodeFacts { topology, reserved } = &self.node;
        let mut moved = self.state.set_topology(topology.borrow().clone());
        moved.extend(self.state.set_reserved(&reserved.borrow()));
        self.publish(set);
        self.count();
        let changes = self.state.sync(&mut self.services, &mut self.endpoints);
        self.note(changes, moved);
        log_new(&conflicts, self.state.conflicts_by_port());
        let (tracked, state) = (&self.tracked, &self.state);
        view::update(&self.view, |view| view.show(tracked, state));

        let since = self.last_full.take();
        let begin = Instant::now();
        let full = since.filter(|last| begin.duration_since(*last) < self.full_period);
        let work = Work {
            state: &self.state,
            changes: &self.pending,
            is_full: full.is_none(),
        };
        let result = self.provider.sync(work).await;
        let failure = result.as_ref().err().map(|error| Failure {
            error: error.to_string(),
            ports: P::refused(error).collect(),
        });
        if P::is_in_force(&result) {
            self.last_full = Some(full.unwrap_or(begin));
            let refused = failure.iter().flat_map(|failure| failure.ports.keys());
            self.pending = Changes {
                ports: refused.cloned().collect(),
                ..Changes::default()
            };
            self.health.updated(begun);
        }
        view::update(&self.view, |view| view.failure = failure.map(Arc::new));
        result
    }
}

/// Logs the new conflicts.
fn log_new(before: &Conflicts, now: &Conflicts) {
    let different = differences(before, now);
    let different = different.filter_map(|(_, before, now)| Some((before, now?)));
    let mut new = different.flat_map(|(before, now)| {
        let is_new = move |one: &&_| before.is_none_or(|before| !before.contains(one));
        now.iter().filter(is_new)
    });
    for conflict in new.by_ref().take(MOST_LOGGED) {
        warn!(port = %conflict.key, %conflict, "a port of a service is not served at an address");
    }
    let more = new.count();
    if more > 0 {
        warn!(
            more,
            "more ports of services are not served at an address; `service list` names them"
        );
    }
}

/// Returns the differences between two maps of objects, with removed objects first.
fn gone_first<'a, N: Ord, T: Eq>(
    before: &'a OrdMap<N, Sourced<T>>,
    now: &'a OrdMap<N, Sourced<T>>,
) -> Vec<Difference<'a, N, Sourced<T>>> {
    let mut different: Vec<_> = differences(before, now).collect();
    different.sort_by_key(|(.., found)| found.is_some());
    different
}
