//! Keeps this node's wants in the store: compares the two and repairs differences while connected.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use health_model::activity::Problem;
use health_model::identity::Identity;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tracing::{info, warn};

use super::super::allocator::{Shared, Timing};
use super::super::wants::{Announce, WantedIdentity};
use super::SharedRecords;
use super::keys::{AddressRecord, Keys};
use super::requests::{Holder, TakeError};
use super::transactions::Transactions;
use crate::backoff::Backoff;
use crate::etcd::{LeaseHold, Store, StoreError};

/// Minimum time between two writes of a key: it takes a moment until a write is read back, and two agents with the same
/// name must not keep the store busy.
const SHORTEST_GAP: Duration = Duration::from_secs(1);
/// Time until a label set that the store refused is retried.
const RETRY_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Maximum time between two extensions of the lease, so that the loss of the lease is noticed early.
const EXTEND_PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of identities that one check collects.
const COLLECT_AT_ONCE: usize = 64;
/// Maximum random addition to the grace period of unused identities, so that agents do not all collect at once.
const COLLECT_SPREAD: f64 = 0.5;

/// Keeps this node's wants in the store. Its lease outlives connections.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    known: Arc<SharedRecords>,
    keys: Keys,
    node: String,
    timing: Timing,
    lease: Option<i64>,
    pub(super) collect_after: Duration,
    /// Where the search for a free number starts.
    pub(super) random: fn() -> u32,
    problem: Option<String>,
}

/// A key that is missing in the store or must be removed.
pub(super) enum Job {
    Take(WantedIdentity),
    Announce(IpAddr, Announce),
    DropReference(Identity),
    DropAddress(IpAddr),
}

impl Keeper {
    pub(super) fn new(
        shared: Arc<Shared>,
        known: Arc<SharedRecords>,
        keys: Keys,
        node: &str,
        timing: Timing,
    ) -> Self {
        let spread = timing.collect_after.mul_f64(COLLECT_SPREAD);
        Self {
            shared,
            known,
            keys,
            node: node.to_owned(),
            timing,
            lease: None,
            collect_after: timing.collect_after + spread.mul_f64(rand::random()),
            random: rand::random,
            problem: None,
        }
    }

    /// Keeps the store up to date for as long as this is polled.
    pub(super) async fn keep(&mut self, mut store: Store) -> Infallible {
        let mut backoff = Backoff::default();
        loop {
            let Err(error) = self.keep_lease(&mut store, &mut backoff).await else {
                continue;
            };
            self.shared.fail_writing(&error, &mut self.problem);
            tokio::time::sleep(backoff.pause(rand::random())).await;
        }
    }

    /// Keeps the lease alive. Returns when the lease is lost.
    async fn keep_lease(
        &mut self,
        store: &mut Store,
        backoff: &mut Backoff,
    ) -> Result<(), StoreError> {
        let (lease, mut hold) = self.lease(store).await?;
        let holder = Holder {
            keys: self.keys.clone(),
            node: self.node.clone(),
            lease,
        };
        let extend_period = EXTEND_PERIOD.min(self.timing.lease / 3);
        let mut extensions = ticks(extend_period);
        self.shared
            .collector_reporter
            .due_within(self.timing.look_period);
        let mut looks = ticks(self.timing.look_period);
        loop {
            let (jobs, may_change) = self.jobs(&holder);
            let is_idle = jobs.is_empty();
            let done = join_all(
                jobs.into_iter()
                    .map(|job| self.run(&holder, store.clone(), job)),
            );
            let done: Result<Vec<()>, _> = done.await.into_iter().collect();
            self.shared.hub.publish_held(self.shared.wants().held());
            done?;
            backoff.reset();
            self.shared
                .succeed_writing(extend_period, &mut self.problem, None);
            let idle = async {
                match (is_idle, may_change) {
                    (false, _) => {}
                    (true, true) => tokio::time::sleep(SHORTEST_GAP / 4).await,
                    (true, false) => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = extensions.tick() => {
                    if !hold.extend().await? {
                        warn!(lease = ?self.lease, "identity lease lost; acquiring the identities again");
                        self.lease = None;
                        return Ok(());
                    }
                }
                _ = looks.tick() => {
                    let collected = self.collect(&holder, store).await;
                    let problem = collected.as_ref().err().map(Problem::warning);
                    let period = self.timing.look_period;
                    self.shared.collector_reporter.end(problem, Some(period));
                    collected?;
                }
                () = self.shared.wake.notified() => {}
                () = idle => {}
            }
        }
    }

    /// Returns the lease of an earlier connection if it still exists, else a new one.
    async fn lease(&mut self, store: &mut Store) -> Result<(i64, LeaseHold), StoreError> {
        if let Some(lease) = self.lease
            && let Ok(mut hold) = store.keep(lease).await
            && hold.extend().await.unwrap_or(false)
        {
            return Ok((lease, hold));
        }
        let lease = store.grant(self.timing.lease).await?;
        self.lease = Some(lease);
        Ok((lease, store.keep(lease).await?))
    }

    /// Returns some of the jobs that are due now, and whether more jobs will become due by themselves.
    pub(super) fn jobs(&self, holder: &Holder) -> (Vec<Job>, bool) {
        let now = Instant::now();
        let session = holder.session();
        let records = self.known.records();
        let wants = self.shared.wants();
        let mut waits = false;
        let mut is_due = |last: Option<Instant>, gap: Duration| {
            let is_due = last.is_none_or(|last| now - last >= gap);
            waits |= !is_due;
            is_due
        };
        let mut jobs = Vec::new();
        let mut used = BTreeSet::new();
        for wanted in wants.sets() {
            used.extend(wanted.identity);
            let is_there = wanted.written.is_some()
                && wanted
                    .identity
                    .is_some_and(|id| records.confirms(&wanted.labels, id, &session));
            if !is_there
                && is_due(wanted.written, SHORTEST_GAP)
                && is_due(wanted.refused, RETRY_PERIOD)
            {
                jobs.push(Job::Take(wanted));
            }
        }
        for (ip, announce) in wants.addresses() {
            let is_there =
                announce.written.is_some() && records.confirms_address(ip, announce, &session);
            if !is_there && is_due(announce.written, SHORTEST_GAP) {
                jobs.push(Job::Announce(ip, announce.clone()));
            }
        }
        let is_ours = |other: &str| other == session || wants.forgets_earlier();
        // A set without a number may be about to get one of these numbers.
        let all_are_known = !wants.sets().any(|wanted| wanted.identity.is_none());
        for (identity, other) in records.own_references() {
            if all_are_known && is_ours(other) && !used.contains(&identity) {
                jobs.push(Job::DropReference(identity));
            }
        }
        for (ip, other) in records.own_addresses() {
            if is_ours(other) && !wants.is_announced(ip) {
                jobs.push(Job::DropAddress(ip));
            }
        }
        jobs.truncate(AT_ONCE);
        (jobs, waits)
    }

    pub(super) async fn run(
        &self,
        holder: &Holder,
        mut store: impl Transactions,
        job: Job,
    ) -> Result<(), StoreError> {
        match job {
            Job::Take(wanted) => {
                let records = || self.known.records();
                // If the store lost the number, its holders may be about to write it again.
                let former = || records().former_number(&wanted.labels);
                let preferred = wanted.identity.or_else(former);
                let free = |taken: &BTreeSet<Identity>| {
                    let mut taken = taken.clone();
                    taken.extend(self.shared.wants().held().into_values());
                    records().free((self.random)(), &taken)
                };
                let taken = holder
                    .take(&mut store, &wanted.labels, preferred, free)
                    .await;
                let answer = match taken {
                    Ok(identity) => Ok(identity),
                    Err(TakeError::Refused(error)) => Err(error),
                    Err(TakeError::Store(error)) => return Err(error),
                };
                let mut wants = self.shared.wants();
                wants.answered(&wanted.labels, &answer, Instant::now());
                Ok(())
            }
            Job::Announce(ip, announce) => {
                let record = AddressRecord {
                    identity: announce.identity,
                    node: announce.node,
                    session: holder.session(),
                };
                let key = self.keys.address(&self.node, ip);
                holder.put(&mut store, key, record.text()).await?;
                let mut wants = self.shared.wants();
                wants.announced(ip, announce.identity, Instant::now());
                Ok(())
            }
            Job::DropReference(identity) => {
                let key = self.keys.reference(identity, &self.node);
                holder.delete(&mut store, key).await?;
                self.known.records().dropped_reference(identity);
                Ok(())
            }
            Job::DropAddress(ip) => {
                let key = self.keys.address(&self.node, ip);
                holder.delete(&mut store, key).await?;
                self.known.records().dropped_address(ip);
                Ok(())
            }
        }
    }

    /// Collects identities that have been unused for a long time.
    pub(super) async fn collect(
        &self,
        holder: &Holder,
        store: &mut impl Transactions,
    ) -> Result<(), StoreError> {
        let now = self.known.now();
        let unused = self.known.records().unused(self.collect_after, now);
        if unused.is_empty() {
            return Ok(());
        }
        let freed = store.grant(self.timing.reuse_after).await?;
        for unused in unused.iter().take(COLLECT_AT_ONCE) {
            let identity = unused.identity;
            if holder.collect(store, unused, freed).await? {
                info!(%identity, "collected an unused identity");
            } else {
                let now = self.known.now();
                self.known.records().not_collected(identity, now);
            }
        }
        Ok(())
    }
}

/// Creates an interval whose first tick comes after a whole period.
fn ticks(period: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
