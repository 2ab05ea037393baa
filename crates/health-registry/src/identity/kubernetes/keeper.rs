//! Keeps this node's wants in the store: compares the two and repairs differences while the store can be used.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use health_model::identity::Identity;
use tokio::time::{Instant, sleep};

use super::super::IdentityError;
use super::super::allocator::{Shared, Timing, shown};
use super::super::sets::NUMBERS;
use super::super::wants::{Announce, WantedIdentity};
use super::Known;
use super::collector::Collector;
use super::objects::{Entries, Entry, EntryKey, IdentityObject, slice_name};
use super::records::Step;
use super::requests::{RequestError, Requests};
use super::slices::{OwnSlices, SliceJob};
use crate::backoff::Backoff;
use crate::kubernetes::access::Access;

/// Time until a label set that the store refused is retried.
const RETRY_PERIOD: Duration = Duration::from_secs(10);
/// Minimum time between two attempts for one label set.
const SHORTEST_GAP: Duration = Duration::from_secs(1);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Maximum number of steps towards a number for one label set. A step fails only if another agent was faster.
const STEPS: usize = 100;
/// Maximum time between two reports of the keeper.
const REPORT_PERIOD: Duration = Duration::from_secs(10);
/// How long an identity is in use before a slice refers to it without an address. Most endpoints have their addresses
/// announced by then, which is a reference too.
const REFERENCE_DELAY: Duration = Duration::from_secs(5);

/// Keeps this node's wants in the store.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    known: Arc<Known>,
    access: Access,
    node: String,
    /// The connection that last worked.
    requests: Option<Requests>,
    own: OwnSlices,
    collector: Collector,
    backoff: Backoff,
    problem: Option<String>,
}

impl Keeper {
    pub(super) fn new(
        shared: Arc<Shared>,
        known: Arc<Known>,
        access: Access,
        node: &str,
        timing: Timing,
    ) -> Self {
        Self {
            collector: Collector::new(shared.clone(), known.clone(), timing),
            shared,
            known,
            access,
            node: node.to_owned(),
            requests: None,
            own: OwnSlices::default(),
            backoff: Backoff::default(),
            problem: None,
        }
    }

    /// Keeps the store up to date for as long as this is polled.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            let mut wait = REPORT_PERIOD;
            let is_usable = self.known.state().staleness().is_none();
            if is_usable {
                match self.turn().await {
                    Ok(next) => wait = wait.min(next),
                    Err(error) => {
                        self.shared.fail_writing(&error, &mut self.problem);
                        sleep(self.backoff.pause(rand::random())).await;
                        continue;
                    }
                }
            }
            let expiry = self.known.state().records.view.next_expiry();
            let expiry = expiry.map(|at| at.saturating_sub(self.known.now()));
            tokio::select! {
                () = self.shared.wake.notified() => {}
                () = sleep(expiry.map_or(wait, |expiry| expiry.min(wait))) => {}
            }
            self.expire();
        }
    }

    /// Drops expired entries, unless the store cannot be used.
    fn expire(&self) {
        let has_expired = {
            let now = self.known.now();
            let mut state = self.known.state();
            state.staleness().is_none() && state.records.expire(now)
        };
        if has_expired {
            self.known.publish(&self.shared);
        }
    }

    /// Does all that is due. Returns the time until more is due by itself.
    async fn turn(&mut self) -> Result<Duration, RequestError> {
        let requests = match self.requests.take() {
            Some(requests) => requests,
            None => Requests::open(&self.access).await?,
        };
        let sets = self.keep_sets(&requests).await?;
        let slices = self.keep_slices(&requests).await?;
        let collection = self.collector.turn(&requests).await;
        // Only reached after a success: after a failure, the credentials are read again.
        self.requests = Some(requests);
        self.backoff.reset();
        self.shared
            .succeed_writing(REPORT_PERIOD, &mut self.problem);
        let waits = sets.into_iter().chain(slices);
        Ok(waits.fold(collection, Duration::min))
    }

    /// Gets numbers for all label sets. Returns the time until a set must be tried again.
    async fn keep_sets(&self, requests: &Requests) -> Result<Option<Duration>, RequestError> {
        loop {
            let (due, wait) = self.due_sets();
            if due.is_empty() {
                // Label sets may have been released.
                self.shared.hub.publish_held(self.shared.wants().held());
                return Ok(wait);
            }
            let taken = join_all(due.iter().map(|wanted| self.take(requests, wanted))).await;
            self.shared.hub.publish_held(self.shared.wants().held());
            taken.into_iter().collect::<Result<Vec<()>, _>>()?;
        }
    }

    /// Returns some of the label sets that the store has under no number or another one, and the time until more of
    /// them must be tried.
    fn due_sets(&self) -> (Vec<WantedIdentity>, Option<Duration>) {
        let now = Instant::now();
        let mut wait: Option<Duration> = None;
        let mut is_due = |last: Option<Instant>, gap: Duration| {
            let left = last.map_or(Duration::ZERO, |last| gap.saturating_sub(now - last));
            if !left.is_zero() {
                wait = Some(wait.map_or(left, |before| before.min(left)));
            }
            left.is_zero()
        };
        let state = self.known.state();
        let wants = self.shared.wants();
        let mut due = Vec::new();
        for wanted in wants.sets() {
            let is_there = wanted.written.is_some()
                && wanted
                    .identity
                    .is_some_and(|identity| state.records.confirms(&wanted.labels, identity));
            if !is_there
                && is_due(wanted.written, SHORTEST_GAP)
                && is_due(wanted.refused, RETRY_PERIOD)
            {
                due.push(wanted);
            }
            if due.len() == AT_ONCE {
                break;
            }
        }
        (due, wait)
    }

    /// Gets the number of a label set, and answers those who wait for it.
    async fn take(&self, requests: &Requests, wanted: &WantedIdentity) -> Result<(), RequestError> {
        let answer = self.number(requests, wanted).await?;
        let mut wants = self.shared.wants();
        wants.answered(&wanted.labels, &answer, Instant::now());
        Ok(())
    }

    async fn number(
        &self,
        requests: &Requests,
        wanted: &WantedIdentity,
    ) -> Result<Result<Identity, IdentityError>, RequestError> {
        let labels = &wanted.labels;
        for _ in 0..STEPS {
            match self.step(wanted) {
                Step::Use(identity) => return Ok(Ok(identity)),
                Step::Exhausted => {
                    return Ok(Err(IdentityError::Exhausted {
                        labels: shown(labels),
                        count: NUMBERS,
                    }));
                }
                Step::Unmark(identity, version) => {
                    match requests.mark(identity, &version, None).await? {
                        Some(object) => self.put(object),
                        None => self.look_up(requests, identity).await?,
                    }
                }
                Step::Create(identity) => match requests.create_identity(identity, labels).await? {
                    Some(object) => self.put(object),
                    // If it is gone by now, the next step tries it again.
                    None => self.look_up(requests, identity).await?,
                },
            }
        }
        let reason = format!("lost the race to other agents {STEPS} times");
        Ok(Err(IdentityError::Unavailable {
            store: self.shared.store.clone(),
            reason,
        }))
    }

    fn step(&self, wanted: &WantedIdentity) -> Step {
        // The numbers of other label sets of this node, which are read only if a number must be chosen.
        let held: RefCell<Option<BTreeSet<Identity>>> = RefCell::default();
        let is_held = |identity: &Identity| {
            let read = || {
                let mut held = self.shared.wants().held();
                held.remove(&wanted.labels);
                held.into_values().collect()
            };
            held.borrow_mut()
                .get_or_insert_with(read)
                .contains(identity)
        };
        let state = self.known.state();
        let is_taken = |identity: Identity| is_held(&identity);
        let records = &state.records;
        records.step(&wanted.labels, wanted.identity, is_taken)
    }

    fn put(&self, object: IdentityObject) {
        let now = self.known.now();
        self.known.state().records.put_identity(object, now);
    }

    /// Reads the object of a number, whose known state is outdated.
    async fn look_up(&self, requests: &Requests, identity: Identity) -> Result<(), RequestError> {
        match requests.read_identity(identity).await? {
            Some(object) => self.put(object),
            None => {
                let now = self.known.now();
                let records = &mut self.known.state().records;
                records.delete_identity(&identity.to_string(), None, now);
            }
        }
        Ok(())
    }

    /// Writes this node's slices. Returns the time until more of them must be written.
    async fn keep_slices(&mut self, requests: &Requests) -> Result<Option<Duration>, RequestError> {
        let now = Instant::now();
        let (wanted, forgets_earlier, wait) = self.wanted_entries(now);
        let stored: BTreeMap<u32, Entries> = {
            let state = self.known.state();
            let own = state.records.own_slices();
            own.map(|(index, entries)| (index, entries.clone()))
                .collect()
        };
        let (jobs, gap) = self.own.plan(wanted, &stored, forgets_earlier, now);
        let done = join_all(jobs.iter().map(|job| self.write(requests, job))).await;
        done.into_iter().collect::<Result<Vec<()>, _>>()?;
        Ok(wait.into_iter().chain(gap).min())
    }

    /// Returns the entries that this node's slices should have, whether to drop those of earlier agents, and the time
    /// until entries are added.
    fn wanted_entries(&self, now: Instant) -> (Entries, bool, Option<Duration>) {
        let wants = self.shared.wants();
        let mut entries = Entries::new();
        let mut referenced = BTreeSet::new();
        let details = wants.details();
        for (ip, announce) in wants.addresses() {
            let Announce {
                endpoint,
                identity,
                node,
                ..
            } = *announce;
            let key = EntryKey::Endpoint(endpoint);
            let entry = entries.entry(key).or_insert_with(|| Entry {
                details: details.get(&endpoint).cloned(),
                ..Entry::reference(identity)
            });
            entry.addresses.insert(ip, node);
            referenced.insert(identity);
        }
        let mut wait: Option<Duration> = None;
        for wanted in wants.sets() {
            let (Some(identity), Some(since)) = (wanted.identity, wanted.written) else {
                continue;
            };
            let left = REFERENCE_DELAY.saturating_sub(now - since);
            if referenced.contains(&identity) {
                continue;
            }
            if left.is_zero() {
                let reference = Entry::reference(identity);
                entries.insert(EntryKey::Reference(identity), reference);
            } else {
                wait = Some(wait.map_or(left, |before| before.min(left)));
            }
        }
        (entries, wants.forgets_earlier(), wait)
    }

    async fn write(&self, requests: &Requests, job: &SliceJob) -> Result<(), RequestError> {
        let SliceJob {
            index,
            entries,
            is_known,
        } = job;
        if entries.is_empty() {
            requests.delete_slice(&self.node, *index).await?;
            let name = slice_name(&self.node, *index);
            let now = self.known.now();
            self.known.state().records.delete_slice(&name, None, now);
        } else {
            let written = requests.write_slice(&self.node, *index, entries, *is_known);
            let written = written.await?;
            if written.entries.as_ref() != Ok(entries) {
                return Err(RequestError::Pruned);
            }
            let now = self.known.now();
            self.known.state().records.put_slice(written, now);
        }
        Ok(())
    }
}
