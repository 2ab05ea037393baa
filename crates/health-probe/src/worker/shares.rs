//! Whose turn it is. Probes that are due wait here, and the pods and namespaces of a node share its places and its rate.
//!
//! A run may hold its place for as long as its timeout, which is the pod's choice. So no pod and no namespace may hold
//! what the others need: a run begins only while what its pod and its namespace hold, added up, is less than what is
//! free. One namespace alone gets half of the places and one pod alone a third; with more of them that are slow, each gets
//! less, and a few places stay free for whoever comes next. Namespaces take turns, and so do the pods of each.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use health_model::pace::Budget;
use slotmap::{SlotMap, new_key_type};

use super::{TimerId, WorkerId};

new_key_type! {
    /// A pod that shares. No later pod has the same.
    pub(super) struct PodKey;
    struct NamespaceKey;
}

/// So much of its rate a pod may use at once, after it used less: all probes of a pod may be due when it begins.
const POD_ADVANCE: Duration = Duration::from_secs(1);

/// Why a probe that is due has not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// Its pod has begun as many as it may for now.
    PodRate,
    /// Its pod and its namespace hold their share of the places.
    Share,
    /// Others go first.
    Turn,
}

impl Delay {
    /// What a listing says.
    pub const fn text(self) -> &'static str {
        match self {
            Self::PodRate => "due, and its pod's rate is used up",
            Self::Share => "due, and its pod and namespace hold their share of places",
            Self::Turn => "due, and others go first",
        }
    }
}

/// The pods and namespaces, what they hold, and which of their probes are due.
#[derive(Debug)]
pub(super) struct Shares {
    /// Most attempts of a pod, a second.
    pod_per_second: u32,
    pods: SlotMap<PodKey, Pod>,
    namespaces: SlotMap<NamespaceKey, Namespace>,
    by_uid: HashMap<Arc<str>, PodKey>,
    by_name: HashMap<String, NamespaceKey>,
    /// Those with pods in their ring, in turn.
    ring: VecDeque<NamespaceKey>,
    queued: usize,
    /// Nobody in the ring may begin until something changes.
    is_stuck: bool,
}

#[derive(Debug)]
struct Namespace {
    name: String,
    pods: usize,
    /// Runs under way.
    held: usize,
    /// Pods with probes that are due, in turn, but for parked ones.
    ring: VecDeque<PodKey>,
}

#[derive(Debug)]
struct Pod {
    uid: Arc<str>,
    namespace: NamespaceKey,
    workers: usize,
    /// Runs under way.
    held: usize,
    budget: Budget,
    /// Probes that are due, in order of arrival.
    queue: VecDeque<WorkerId>,
    /// Fires when its rate allows the next one.
    parked: Option<TimerId>,
}

impl Shares {
    /// Nobody shares anything.
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

    /// A worker of a pod begins to share.
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

    /// A worker that is neither queued nor at a run leaves. Returns the timer of a pod that goes with it.
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

    /// A worker is due.
    pub(super) fn enqueue(&mut self, key: PodKey, worker: WorkerId) {
        self.queued += 1;
        let pod = &mut self.pods[key];
        pod.queue.push_back(worker);
        if pod.queue.len() == 1 && pod.parked.is_none() {
            self.list(key);
        }
    }

    /// A worker that is due does not wait any more.
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

    /// A pod's timer has fired.
    pub(super) fn unpark(&mut self, key: PodKey) {
        // One that has gone had it cancelled.
        let Some(pod) = self.pods.get_mut(key) else {
            return;
        };
        pod.parked = None;
        if !pod.queue.is_empty() {
            self.list(key);
        }
    }

    /// Puts a pod in the ring.
    fn list(&mut self, key: PodKey) {
        let namespace = self.pods[key].namespace;
        let ring = &mut self.namespaces[namespace].ring;
        if ring.is_empty() {
            self.ring.push_back(namespace);
        }
        ring.push_back(key);
        self.is_stuck = false;
    }

    /// Takes out the worker whose turn it is, where `free` places are left. A pod whose rate is used up waits for the timer
    /// that `park` sets.
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

    /// A run of a pod begins.
    pub(super) fn begin(&mut self, key: PodKey, now: Duration) {
        let pod = &mut self.pods[key];
        pod.held += 1;
        pod.budget.take(now);
        self.namespaces[pod.namespace].held += 1;
    }

    /// A further attempt of a run: it does not wait, but those that follow do.
    pub(super) fn repeat(&mut self, key: PodKey, now: Duration) {
        self.pods[key].budget.take(now);
    }

    /// A run of a pod has ended.
    pub(super) fn end(&mut self, key: PodKey) {
        let pod = &mut self.pods[key];
        pod.held -= 1;
        self.namespaces[pod.namespace].held -= 1;
        self.is_stuck = false;
    }

    /// Whether one of those that are due may be able to begin.
    pub(super) fn is_ready(&self) -> bool {
        !self.is_stuck && !self.ring.is_empty()
    }

    /// How many are due and wait.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Why a pod's probes that are due wait, where `free` places are left.
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
