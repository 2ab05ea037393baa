//! Decides whose turn it is. Due probes wait here, and the pods and namespaces of a node share the node's run slots and
//! rate.
//!
//! A run may hold its slot for as long as its timeout, which the pod chooses. So no pod and no namespace may hold slots
//! that other pods need: a run starts only while the slots held by its pod plus the slots held by its namespace are
//! fewer than the free slots. A single namespace gets half of the slots, and a single pod a third. The more of them are
//! slow, the less each gets, and a few slots stay free for newcomers. Namespaces take turns, as do the pods within each
//! namespace.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use health_model::pace::Budget;
use slotmap::{SlotMap, new_key_type};

use super::{TimerId, WorkerId};

new_key_type! {
    /// Identifies a pod that shares. Never reused for a later pod.
    pub(super) struct PodKey;
    struct NamespaceKey;
}

/// How much unused rate a pod may use later in one burst: all probes of a pod may be due when it starts.
const POD_ADVANCE: Duration = Duration::from_secs(1);

/// Why a due probe has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// The pod has used up its rate for now.
    PodRate,
    /// The pod and its namespace hold their share of the slots.
    Share,
    /// It is the turn of other pods.
    Turn,
}

impl Delay {
    /// The text to display.
    pub const fn text(self) -> &'static str {
        match self {
            Self::PodRate => "due, but its pod's rate limit is reached",
            Self::Share => "due, but its pod and namespace use their full share of slots",
            Self::Turn => "due, but others go first",
        }
    }
}

/// The pods and namespaces, the slots that they hold, and their due probes.
#[derive(Debug)]
pub(super) struct Shares {
    /// Maximum number of attempts per second for one pod.
    pod_per_second: u32,
    pods: SlotMap<PodKey, Pod>,
    namespaces: SlotMap<NamespaceKey, Namespace>,
    by_uid: HashMap<Arc<str>, PodKey>,
    by_name: HashMap<String, NamespaceKey>,
    /// Namespaces whose ring has pods, in the order of their turns.
    ring: VecDeque<NamespaceKey>,
    queued: usize,
    /// Whether no pod in the ring may start a run until something changes.
    is_stuck: bool,
}

#[derive(Debug)]
struct Namespace {
    name: String,
    pods: usize,
    /// The number of runs under way.
    held: usize,
    /// Pods with due probes, in the order of their turns, except parked pods.
    ring: VecDeque<PodKey>,
}

#[derive(Debug)]
struct Pod {
    uid: Arc<str>,
    namespace: NamespaceKey,
    workers: usize,
    /// The number of runs under way.
    held: usize,
    budget: Budget,
    /// Due probes, in order of arrival.
    queue: VecDeque<WorkerId>,
    /// The timer that fires when the pod's rate allows the next attempt.
    parked: Option<TimerId>,
}

impl Shares {
    /// Creates shares without pods.
    pub(super) fn new(pod_per_second: u32) -> Self {
        Self {
            pod_per_second,
            pods: SlotMap::with_key(),
            namespaces: SlotMap::with_key(),
            by_uid: HashMap::new(),
            by_name: HashMap::new(),
            ring: VecDeque::new(),
            queued: 0,
            is_stuck: false,
        }
    }

    /// Adds a worker to a pod's share.
    pub(super) fn join(&mut self, uid: &Arc<str>, namespace: &str) -> PodKey {
        let key = match self.by_uid.get(uid) {
            Some(known) => *known,
            None => self.add(uid, namespace),
        };
        self.pods[key].workers += 1;
        key
    }

    fn add(&mut self, uid: &Arc<str>, name: &str) -> PodKey {
        let namespace = match self.by_name.get(name) {
            Some(known) => *known,
            None => {
                let key = self.namespaces.insert(Namespace {
                    name: name.to_owned(),
                    pods: 0,
                    held: 0,
                    ring: VecDeque::new(),
                });
                self.by_name.insert(name.to_owned(), key);
                key
            }
        };
        self.namespaces[namespace].pods += 1;
        let key = self.pods.insert(Pod {
            uid: uid.clone(),
            namespace,
            workers: 0,
            held: 0,
            budget: Budget::with_advance(self.pod_per_second, POD_ADVANCE),
            queue: VecDeque::new(),
            parked: None,
        });
        self.by_uid.insert(uid.clone(), key);
        key
    }

    /// Removes a worker that is neither queued nor in a run. If its pod is removed with it, returns the pod's timer.
    pub(super) fn leave(&mut self, key: PodKey) -> Option<TimerId> {
        let pod = &mut self.pods[key];
        pod.workers -= 1;
        if pod.workers > 0 {
            return None;
        }
        let pod = self.pods.remove(key)?;
        self.by_uid.remove(&pod.uid);
        let namespace = &mut self.namespaces[pod.namespace];
        namespace.pods -= 1;
        if namespace.pods == 0
            && let Some(gone) = self.namespaces.remove(pod.namespace)
        {
            self.by_name.remove(&gone.name);
        }
        pod.parked
    }

    /// Queues a due worker.
    pub(super) fn enqueue(&mut self, key: PodKey, worker: WorkerId) {
        self.queued += 1;
        let pod = &mut self.pods[key];
        pod.queue.push_back(worker);
        if pod.queue.len() == 1 && pod.parked.is_none() {
            self.list(key);
        }
    }

    /// Removes a due worker from the queue.
    pub(super) fn withdraw(&mut self, key: PodKey, worker: WorkerId) {
        let pod = &mut self.pods[key];
        let before = pod.queue.len();
        pod.queue.retain(|queued| *queued != worker);
        self.queued -= before - pod.queue.len();
        if pod.queue.is_empty() {
            let namespace = pod.namespace;
            let ring = &mut self.namespaces[namespace].ring;
            ring.retain(|listed| *listed != key);
            if ring.is_empty() {
                self.ring.retain(|listed| *listed != namespace);
            }
        }
    }

    /// Handles a pod's timer that has fired.
    pub(super) fn unpark(&mut self, key: PodKey) {
        // The timer of a removed pod is cancelled.
        let Some(pod) = self.pods.get_mut(key) else {
            return;
        };
        pod.parked = None;
        if !pod.queue.is_empty() {
            self.list(key);
        }
    }

    /// Adds a pod to the ring.
    fn list(&mut self, key: PodKey) {
        let namespace = self.pods[key].namespace;
        let ring = &mut self.namespaces[namespace].ring;
        if ring.is_empty() {
            self.ring.push_back(namespace);
        }
        ring.push_back(key);
        self.is_stuck = false;
    }

    /// Removes and returns the worker whose turn it is, with `free` slots left. A pod whose rate is used up waits for
    /// the timer that `park` sets.
    pub(super) fn next(
        &mut self,
        now: Duration,
        free: usize,
        mut park: impl FnMut(PodKey, Duration) -> TimerId,
    ) -> Option<WorkerId> {
        if self.is_stuck {
            return None;
        }
        for _ in 0..self.ring.len() {
            let key = self.ring.pop_front()?;
            let found = self.next_of(key, now, free, &mut park);
            if !self.namespaces[key].ring.is_empty() {
                self.ring.push_back(key);
            }
            if found.is_some() {
                return found;
            }
        }
        self.is_stuck = true;
        None
    }

    fn next_of(
        &mut self,
        key: NamespaceKey,
        now: Duration,
        free: usize,
        park: &mut impl FnMut(PodKey, Duration) -> TimerId,
    ) -> Option<WorkerId> {
        let namespace = &mut self.namespaces[key];
        if namespace.held >= free {
            return None;
        }
        for _ in 0..namespace.ring.len() {
            let key = namespace.ring.pop_front()?;
            let pod = &mut self.pods[key];
            if pod.held + namespace.held >= free {
                namespace.ring.push_back(key);
                continue;
            }
            if !pod.budget.allows(now) {
                pod.parked = Some(park(key, pod.budget.ready()));
                continue;
            }
            let worker = pod.queue.pop_front();
            if !pod.queue.is_empty() {
                namespace.ring.push_back(key);
            }
            self.queued -= usize::from(worker.is_some());
            return worker;
        }
        None
    }

    /// Records the start of a pod's run.
    pub(super) fn begin(&mut self, key: PodKey, now: Duration) {
        let pod = &mut self.pods[key];
        pod.held += 1;
        pod.budget.take(now);
        self.namespaces[pod.namespace].held += 1;
    }

    /// Records a further attempt of a run. The attempt does not wait, but later runs do.
    pub(super) fn repeat(&mut self, key: PodKey, now: Duration) {
        self.pods[key].budget.take(now);
    }

    /// Records the end of a pod's run.
    pub(super) fn end(&mut self, key: PodKey) {
        let pod = &mut self.pods[key];
        pod.held -= 1;
        self.namespaces[pod.namespace].held -= 1;
        self.is_stuck = false;
    }

    /// Whether a due probe may be able to start.
    pub(super) fn is_ready(&self) -> bool {
        !self.is_stuck && !self.ring.is_empty()
    }

    /// The number of due probes that wait.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Why a pod's due probes wait, with `free` slots left.
    pub(super) fn delay(&self, key: PodKey, free: usize) -> Delay {
        let pod = &self.pods[key];
        if pod.parked.is_some() {
            Delay::PodRate
        } else if pod.held + self.namespaces[pod.namespace].held >= free {
            Delay::Share
        } else {
            Delay::Turn
        }
    }

    /// Whether nothing is left of any pod.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty()
            && self.namespaces.is_empty()
            && self.by_uid.is_empty()
            && self.by_name.is_empty()
            && self.ring.is_empty()
    }
}
