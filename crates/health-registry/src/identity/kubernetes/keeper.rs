//! Keeps this node's wants in the store: compares the two and repairs differences while the store can be used.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use tokio::time::{Instant, sleep};

use super::super::allocator::{Shared, Timing, shown};
use super::super::sets::{self, NUMBERS};
use super::super::view::LabelsDigest;
use super::super::wants::{Announce, WantedIdentity};
use super::super::{HeldIdentities, IdentityError};
use super::Known;
use super::collector::Collector;
use super::lane::Lane;
use super::objects::{Entries, Entry, EntryKey, IdentityObject, slice_name};
use super::quota::Quota;
use super::records::{Step, namespace_of};
use super::requests::{Blame, RequestError, Requests};
use super::slices::{OwnSlices, SliceJob};
use crate::kubernetes::access::Access;

/// Time until a label set that the store refused is retried.
const RETRY_PERIOD: Duration = Duration::from_secs(10);
/// Minimum time between two attempts for one label set.
const SHORTEST_GAP: Duration = Duration::from_secs(1);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Maximum number of steps towards a number for one label set. A step fails only if another agent was faster.
const STEPS: usize = 100;
/// Number of replies older than the known state after which a label set waits for a later attempt. One such reply may
/// be late; several mean that the server's store was restored.
const OUTDATED_ANSWERS: usize = 3;
/// With more nodes than this, an agent pauses before it creates a number.
const FEW_NODES: usize = 50;
/// The longest of these pauses.
const LONGEST_CREATION_PAUSE: Duration = Duration::from_millis(300);
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
    /// The writes of label sets, and of slices.
    sets: Lane,
    slices: Lane,
    /// The label set that failed last.
    last_failed: Option<Arc<LabelSet>>,
    /// When to look again for the owner of slices without one, and how often.
    adopt_at: Instant,
    adopt_period: Duration,
    quota: Mutex<Quota>,
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
            sets: Lane::new(SHORTEST_GAP),
            slices: Lane::new(Lane::LONGEST),
            last_failed: None,
            adopt_at: Instant::now() + timing.look_period,
            adopt_period: timing.look_period,
            quota: Mutex::new(Quota::new(Instant::now())),
            problem: None,
        }
    }

    /// Keeps the store up to date for as long as this is polled.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            let mut wait = REPORT_PERIOD;
            if self.known.state().staleness().is_none() {
                wait = wait.min(self.turn().await);
                let expiry = self.known.state().records.view.next_expiry();
                let expiry = expiry.map(|at| at.saturating_sub(self.known.now()));
                wait = expiry.map_or(wait, |expiry| expiry.min(wait));
            }
            tokio::select! {
                () = self.shared.wake.notified() => {}
                () = sleep(wait) => {}
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

    /// Does some of what is due. Returns the time until more is due by itself. A failure of one kind of write does not
    /// hold up the others.
    async fn turn(&mut self) -> Duration {
        let requests = match self.requests.clone() {
            Some(requests) => Ok(requests),
            None => Requests::open(&self.access).await,
        };
        let requests = match requests {
            Ok(requests) => self.requests.insert(requests).clone(),
            Err(error) => {
                let error = error.into();
                self.fail_sets(&error);
                return self.sets.wait(Instant::now()).unwrap_or(REPORT_PERIOD);
            }
        };
        let sets = self.turn_of_sets(&requests).await;
        let slices = self.turn_of_slices(&requests).await;
        let collection = self.collector.turn(&requests).await;
        if self.sets.is_well() && self.slices.is_well() {
            let warning = self.known.state().records.crowding();
            self.shared
                .succeed_writing(REPORT_PERIOD, &mut self.problem, warning);
        }
        sets.min(slices).min(collection)
    }

    /// Gets numbers for some of the label sets that are due. Returns the time until more are due.
    async fn turn_of_sets(&mut self, requests: &Requests) -> Duration {
        if let Some(wait) = self.sets.wait(Instant::now()) {
            return wait;
        }
        let (due, wait) = self.due_sets(self.sets.at_once(AT_ONCE));
        let taken = join_all(due.iter().map(|wanted| self.take(requests, wanted))).await;
        // Also if nothing is due: label sets may have been released.
        self.shared.hub.publish_held(self.shared.wants().held());
        let mut failure = None;
        for (wanted, taken) in due.iter().zip(taken) {
            let Err(error) = taken else { continue };
            // The others come first the next time.
            self.last_failed = Some(wanted.labels.clone());
            if error.blame() == Blame::Object {
                let error = self.unavailable(error.to_string());
                let now = Instant::now();
                self.shared.wants().postpone(&wanted.labels, &error, now);
            }
            failure = Some(error);
        }
        if let Some(error) = failure {
            self.fail_sets(&error);
            return self.sets.wait(Instant::now()).unwrap_or(REPORT_PERIOD);
        }
        self.shared.wants().recover();
        if due.is_empty() {
            self.sets.rest();
            return wait.unwrap_or(REPORT_PERIOD);
        }
        self.sets.succeed();
        Duration::ZERO
    }

    fn fail_sets(&mut self, error: &RequestError) {
        self.drop_connection_after(error);
        self.sets.fail(error, rand::random(), Instant::now());
        match error.blame() {
            Blame::Object => self.shared.report_unwritten(error, &mut self.problem),
            _ => self.shared.fail_writing(error, &mut self.problem),
        }
    }

    /// Writes the slices that are due. Returns the time until more are due.
    async fn turn_of_slices(&mut self, requests: &Requests) -> Duration {
        let now = Instant::now();
        if let Some(wait) = self.slices.wait(now) {
            return wait;
        }
        match self.keep_slices(requests).await {
            Ok(wait) => {
                self.slices.succeed();
                wait.unwrap_or(REPORT_PERIOD)
            }
            Err(error) => {
                self.drop_connection_after(&error);
                self.slices.fail(&error, rand::random(), now);
                self.shared.report_unwritten(&error, &mut self.problem);
                self.slices.wait(now).unwrap_or(REPORT_PERIOD)
            }
        }
    }

    /// Reads the credentials again before the next request, if that may help.
    fn drop_connection_after(&mut self, error: &RequestError) {
        if error.blame() == Blame::Connection {
            self.requests = None;
        }
    }

    fn unavailable(&self, reason: String) -> IdentityError {
        let store = self.shared.store.clone();
        IdentityError::Unavailable { store, reason }
    }

    /// Returns at most `most` of the label sets that the store has under no number or another one, and the time until
    /// more of them must be tried. Those behind the one that failed last come first.
    fn due_sets(&self, most: usize) -> (Vec<WantedIdentity>, Option<Duration>) {
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
        let mut due: Vec<_> = wants
            .sets()
            .filter(|wanted| {
                let is_there = wanted.written.is_some()
                    && wanted
                        .identity
                        .is_some_and(|identity| state.records.confirms(&wanted.labels, identity));
                !is_there
                    && is_due(wanted.written, SHORTEST_GAP)
                    && is_due(wanted.refused, RETRY_PERIOD)
            })
            .collect();
        let is_before = |wanted: &WantedIdentity| Some(&wanted.labels) <= self.last_failed.as_ref();
        let behind = due.partition_point(is_before);
        due.rotate_left(behind);
        due.truncate(most);
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
        // A number that the store lost is written again in any case.
        let mut is_admitted = wanted.identity.is_some();
        let nodes = self.known.state().records.count_nodes();
        let mut pause = creation_pause(nodes, rand::random());
        let mut outdated = 0;
        for _ in 0..STEPS {
            let is_current = match self.step(wanted) {
                Step::Use(identity) => return Ok(Ok(identity)),
                Step::Exhausted => {
                    return Ok(Err(IdentityError::Exhausted {
                        labels: shown(labels),
                        count: NUMBERS,
                    }));
                }
                Step::Unmark(identity, version) => {
                    let marked = requests.mark(identity, &version, None).await?;
                    self.take_answer(requests, identity, marked).await?
                }
                // If another agent's object is gone by now, the next step tries the number again.
                Step::Create(identity) => {
                    if let Some(pause) = pause.take() {
                        sleep(pause).await;
                        continue;
                    }
                    if !is_admitted {
                        if let Err(reason) = self.admit(labels) {
                            let labels = shown(labels);
                            return Ok(Err(IdentityError::Limited { labels, reason }));
                        }
                        is_admitted = true;
                    }
                    let created = requests.create_identity(identity, labels).await?;
                    self.take_answer(requests, identity, created).await?
                }
            };
            outdated += usize::from(!is_current);
            if outdated == OUTDATED_ANSWERS {
                return Err(RequestError::Outdated);
            }
        }
        let reason = format!("lost the race to other agents {STEPS} times");
        Ok(Err(self.unavailable(reason)))
    }

    /// Checks whether the store may have a new label set from this node now. Fails with the reason if not.
    fn admit(&self, labels: &LabelSet) -> Result<(), String> {
        let namespace = namespace_of(labels);
        if let Some(namespace) = namespace {
            self.known.state().records.check_share(namespace)?;
        }
        let mut quota = self.quota.lock().unwrap_or_else(PoisonError::into_inner);
        quota.take(namespace, Instant::now())
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

    /// Records the object of a number as an answer shows it. Without one, the known state is outdated, and the object
    /// is read. Returns whether the answers are up to date.
    async fn take_answer(
        &self,
        requests: &Requests,
        identity: Identity,
        answer: Option<IdentityObject>,
    ) -> Result<bool, RequestError> {
        match answer {
            Some(object) => Ok(self.known.put_identity(object)),
            None => self.known.look_up(requests, identity).await,
        }
    }

    /// Writes this node's slices. Returns the time until more of them must be written.
    async fn keep_slices(&mut self, requests: &Requests) -> Result<Option<Duration>, RequestError> {
        let now = Instant::now();
        let (wanted, forgets_earlier, wait) = self.wanted_entries(now);
        let stored: BTreeMap<u32, Entries> = {
            let state = self.known.state();
            let own = state.records.own_slices();
            let stored = own.map(|(index, entries)| (index, entries.clone()));
            if forgets_earlier {
                self.own
                    .set_faulty(state.records.own_faulty_slices().collect());
            }
            stored.collect()
        };
        let (jobs, gap) = self.own.plan(wanted, &stored, forgets_earlier, now);
        let done = join_all(jobs.iter().map(|job| self.write(requests, job))).await;
        done.into_iter().collect::<Result<Vec<()>, _>>()?;
        self.adopt_slices(requests, now).await?;
        Ok(wait.into_iter().chain(gap).min())
    }

    /// Makes the Node object the owner of slices that were written before it existed, so that Kubernetes deletes them
    /// with it.
    async fn adopt_slices(
        &mut self,
        requests: &Requests,
        now: Instant,
    ) -> Result<(), RequestError> {
        let unowned: Vec<u32> = self.known.state().records.own_unowned_slices().collect();
        if unowned.is_empty() || now < self.adopt_at {
            return Ok(());
        }
        self.adopt_at = now + self.adopt_period;
        for slice in requests.adopt_slices(&self.node, &unowned).await? {
            self.known.put_slice(slice);
        }
        Ok(())
    }

    /// Returns the entries that this node's slices should have, whether to drop those of earlier agents, and the time
    /// until entries are added.
    fn wanted_entries(&self, now: Instant) -> (Entries, bool, Option<Duration>) {
        let wants = self.shared.wants();
        let mut entries = Entries::new();
        let mut referenced = BTreeSet::new();
        let digests = digests(&wants.held());
        let details = wants.details();
        for (ip, announce) in wants.addresses() {
            let Announce {
                endpoint,
                identity,
                node,
                ..
            } = *announce;
            let digest = digests.get(&identity).copied();
            if digest.is_none() && identity.is_of_cluster() {
                // The number was given to other labels: the endpoint gets another one.
                continue;
            }
            let key = EntryKey::Endpoint(endpoint);
            let entry = entries.entry(key).or_insert_with(|| Entry {
                digest,
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
            if written.entries.as_ref() != Some(entries) {
                return Err(RequestError::Pruned);
            }
            self.known.put_slice(written);
        }
        Ok(())
    }
}

/// How long to wait for another agent's object before a number is created, with `nodes` nodes: many may need a label
/// set at the same moment, and only one can create it. `random` is at least 0 and below 1.
fn creation_pause(nodes: usize, random: f64) -> Option<Duration> {
    (nodes > FEW_NODES).then(|| LONGEST_CREATION_PAUSE.mul_f64(random))
}

/// The digests of the labels of the identities that this node holds. A number that two label sets have at this moment
/// is not among them.
fn digests(held: &HeldIdentities) -> BTreeMap<Identity, LabelsDigest> {
    let mut digests = BTreeMap::new();
    let mut ambiguous = BTreeSet::new();
    for (labels, identity) in held {
        let digest = sets::short_digest_of(labels);
        if digests.insert(*identity, digest).is_some() {
            ambiguous.insert(*identity);
        }
    }
    digests.retain(|identity, _| !ambiguous.contains(identity));
    digests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_agents_do_not_create_a_number_at_the_same_moment() {
        assert_eq!(creation_pause(50, 0.9), None);
        let pauses: BTreeSet<_> = (0..100)
            .filter_map(|i| creation_pause(1000, f64::from(i) / 100.0))
            .collect();
        assert_eq!(pauses.len(), 100);
        assert!(pauses.last() < Some(&LONGEST_CREATION_PAUSE));
    }
}
