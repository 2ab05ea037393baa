//! The manager: the workers of all pods of a node.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use slotmap::{SlotMap, new_key_type};

use super::left::Left;
use super::limits::Usage;
use super::restart::{self, Kill};
use super::schedule::{Slot, State, Timer};
use super::shares::Shares;
use super::status_update::{Known, compute};
use super::{
    Judgement, Limits, PodStatus, ProbeResult, ResultUpdate, Snapshot, Wheel, Worker, WorkerView,
};
use crate::spec::{PodSpec, Probe, ProbeType};

new_key_type! {
    /// A worker of a manager. No later worker has the same.
    pub struct WorkerId;
}

/// What a manager begins with.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// How many probes are sent.
    pub limits: Limits,
    /// The wall clock when the agent began, which is its time zero.
    pub agent_start: Timestamp,
    /// What an earlier agent left, if this one takes over from it.
    pub snapshot: Option<Snapshot>,
}

/// A run that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Whose run it is.
    pub worker: WorkerId,
    /// The pod.
    pub pod: Arc<PodSpec>,
    /// The container's name.
    pub container: Arc<str>,
    /// The container.
    pub container_id: Arc<str>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The probe.
    pub probe: Arc<Probe>,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// When it was due; the prober is late by what has passed since.
    pub due: Duration,
}

/// What is made of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finished {
    /// It erred: it is to be repeated at once.
    Again(Start),
    /// The run is over.
    Done(Judgement),
    /// The worker was stopped meanwhile: nothing is concluded or told.
    Dropped,
}

/// The workers of all pods of a node, and what they know.
#[derive(Debug)]
pub struct Manager {
    pub(super) agent_start: Timestamp,
    is_restart: bool,
    pub(super) pods: HashMap<Arc<str>, Pod>,
    pub(super) slots: SlotMap<WorkerId, Slot>,
    pub(super) wheel: Wheel<Timer>,
    /// Those that are due, and wait for the limits.
    pub(super) shares: Shares,
    pub(super) usage: Usage,
    left: Left,
    updates: Vec<ResultUpdate>,
    changed: Vec<Arc<str>>,
}

/// A pod and what is known of it.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) spec: Arc<PodSpec>,
    pub(super) status: Option<PodStatus>,
    pub(super) workers: BTreeMap<(Arc<str>, ProbeType), WorkerId>,
}

impl Manager {
    /// A manager without pods.
    pub fn new(options: ManagerOptions) -> Self {
        let is_restart = options.snapshot.is_some();
        let saved = options.snapshot.into_iter().flat_map(|saved| saved.workers);
        Self {
            agent_start: options.agent_start,
            is_restart,
            pods: HashMap::new(),
            slots: SlotMap::with_key(),
            wheel: Wheel::default(),
            shares: Shares::new(options.limits.pod_per_second),
            usage: Usage::new(options.limits),
            left: Left::by_earlier_agent(saved),
            updates: Vec::new(),
            changed: Vec::new(),
        }
    }

    /// Probes a pod as its spec says from now on. One that is known already is brought in line: workers are added for
    /// new probes and stopped for those that are gone, and all others go on with what they know.
    pub fn add_pod(&mut self, now: Duration, spec: Arc<PodSpec>) {
        let uid = spec.uid.clone();
        let known = self.pods.entry(uid.clone()).or_insert_with(|| Pod {
            spec: spec.clone(),
            status: None,
            workers: BTreeMap::new(),
        });
        known.spec = spec.clone();
        let old = std::mem::take(&mut known.workers);
        let mut workers = BTreeMap::new();
        let mut is_new = false;
        for container in &spec.containers {
            for kind in ProbeType::ALL {
                let Some(probe) = container.probe(kind) else {
                    continue;
                };
                let key = (container.name.clone(), kind);
                let id = match old.get(&key) {
                    Some(&id) => {
                        self.set_probe(now, id, probe);
                        id
                    }
                    None => {
                        is_new = true;
                        let (name, _) = key.clone();
                        let saved = self.left.take(now, &uid, &name, kind);
                        let worker = Worker::new(kind, container.role, probe.clone(), saved);
                        self.insert(now, &spec, name, worker, self.is_restart)
                    }
                };
                workers.insert(key, id);
            }
        }
        let gone = old
            .into_iter()
            .filter(|(key, _)| !workers.contains_key(key));
        let gone: Vec<_> = gone.map(|(_, id)| id).collect();
        let is_changed = is_new || !gone.is_empty();
        if let Some(pod) = self.pods.get_mut(&uid) {
            pod.workers = workers;
        }
        for id in gone {
            self.stop(id);
        }
        if is_changed {
            self.update_status(now, &uid);
        }
    }

    /// Tells what is known of a pod. `ready` and `started` of its containers are computed; `ready` of a container that
    /// has not started stays as given. Each call has the readiness of containers that are not ready probed at once: call
    /// it when something has changed, and now and then. Without effect for a pod that was not added.
    pub fn set_status(&mut self, now: Duration, uid: &str, mut status: PodStatus) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let told = pod.status.is_none().then(|| status.clone());
        let before = pod.status.as_ref().or(told.as_ref());
        let to_probe = self.compute(pod, &mut status, before);
        self.replace_status(now, uid, status, &to_probe);
    }

    /// Computes a pod's status anew, after results have changed.
    pub(super) fn update_status(&mut self, now: Duration, uid: &str) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let Some(before) = &pod.status else {
            return;
        };
        let mut status = before.clone();
        let to_probe = self.compute(pod, &mut status, Some(before));
        self.replace_status(now, uid, status, &to_probe);
    }

    fn compute(
        &self,
        pod: &Pod,
        status: &mut PodStatus,
        before: Option<&PodStatus>,
    ) -> Vec<Arc<str>> {
        let known = |name: &Arc<str>, kind, id: &str| {
            let worker = pod.workers.get(&(name.clone(), kind));
            match worker.and_then(|id| self.slots.get(*id)) {
                None => Known::Unprobed,
                Some(slot) => slot
                    .worker
                    .result_of(id)
                    .map_or(Known::Pending, Known::Result),
            }
        };
        compute(&pod.spec, status, before, self.agent_start, known)
    }

    fn replace_status(
        &mut self,
        now: Duration,
        uid: &str,
        status: PodStatus,
        to_probe: &[Arc<str>],
    ) {
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        if pod.status.as_ref() != Some(&status) {
            if !self.changed.contains(&pod.spec.uid) {
                self.changed.push(pod.spec.uid.clone());
            }
            pod.status = Some(status);
        }
        let to_probe: Vec<_> = to_probe
            .iter()
            .filter_map(|name| pod.workers.get(&(name.clone(), ProbeType::Readiness)))
            .copied()
            .collect();
        for id in to_probe {
            self.trigger(now, id);
        }
    }

    /// What is known of a pod, with `ready` and `started` computed.
    pub fn status(&self, uid: &str) -> Option<&PodStatus> {
        self.pods.get(uid)?.status.as_ref()
    }

    /// The pod as it was added last.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodSpec>> {
        Some(&self.pods.get(uid)?.spec)
    }

    /// Stops all probes of a pod that may come back: what holds is kept for [`RESET_AFTER`](restart::RESET_AFTER), so
    /// that a container that is to be killed is, and one that has started has.
    pub fn retire_pod(&mut self, now: Duration, uid: &str) {
        let ids = self.pods.get(uid).map(|pod| pod.workers.values());
        let slots = ids
            .into_iter()
            .flatten()
            .filter_map(|id| self.slots.get(*id));
        let held: Vec<_> = slots
            .filter_map(|slot| slot.worker.save(&slot.pod_uid, &slot.container))
            .collect();
        self.remove_pod(uid);
        self.left.keep(now, held);
    }

    /// Stops all probes of a pod and forgets it.
    pub fn remove_pod(&mut self, uid: &str) {
        self.left.remove_pod(uid);
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        for id in pod.workers.into_values() {
            self.stop(id);
        }
    }

    /// Removes all pods but those that are desired. Of what an earlier agent knew of others, what holds is kept as by
    /// [`retire_pod`](Self::retire_pod).
    pub fn cleanup_pods(&mut self, now: Duration, is_desired: impl Fn(&str) -> bool) {
        self.left.cleanup(now, &is_desired);
        let gone: Vec<_> = self
            .pods
            .keys()
            .filter(|uid| !is_desired(uid))
            .cloned()
            .collect();
        for uid in gone {
            self.remove_pod(&uid);
        }
    }

    /// The results that are new or have changed since the last call, in their order.
    pub fn take_updates(&mut self) -> Vec<ResultUpdate> {
        std::mem::take(&mut self.updates)
    }

    /// The UIDs of the pods whose status has changed since the last call, by [`set_status`](Self::set_status) or by
    /// results.
    pub fn take_status_changes(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn publish(
        &mut self,
        now: Duration,
        id: WorkerId,
        news: Vec<(Arc<str>, ProbeResult)>,
    ) {
        let Some(slot) = self.slots.get(id).filter(|_| !news.is_empty()) else {
            return;
        };
        let (uid, kind) = (slot.pod_uid.clone(), slot.worker.kind());
        let news = news.into_iter();
        self.updates
            .extend(news.map(|(container_id, result)| slot.update(container_id, result)));
        if kind != ProbeType::Liveness {
            self.update_status(now, &uid);
        }
    }

    /// Whether a result has its container killed: a failure of liveness or startup, of a container that runs. A failure
    /// that no probe concluded kills nothing: the container did not run yet when it was looked at.
    pub fn kill(&self, update: &ResultUpdate) -> Option<Kill> {
        let pod = self.pods.get(&update.pod_uid)?;
        let (container, id) = pod.status.as_ref()?.container(&update.container)?;
        if *id != update.container_id || !container.state.is_running() {
            return None;
        }
        let worker = pod.workers.get(&(update.container.clone(), update.kind))?;
        self.slots.get(*worker)?.worker.held(id)?;
        restart::decide(&pod.spec, update)
    }

    /// All containers that are to be killed: those of failures that were told of already too, until they are gone.
    pub fn kills(&self) -> Vec<Kill> {
        let held = self.slots.values().filter(|slot| slot.worker.is_on_hold());
        held.filter_map(|slot| {
            let container_id = slot.worker.container_id()?.clone();
            self.kill(&slot.update(container_id, slot.worker.result()?))
        })
        .collect()
    }

    /// What follows from a failed liveness or startup probe of a container, whether it runs any more or not. An earlier
    /// agent may have probed it.
    pub fn condemned(&self, pod_uid: &str, container_id: &str) -> Option<Kill> {
        let pod = self.pods.get(pod_uid)?;
        let mut slots = pod.workers.values().filter_map(|id| self.slots.get(*id));
        slots.find_map(|slot| {
            let result = slot.worker.held(container_id)?;
            restart::decide(&pod.spec, &slot.update(Arc::from(container_id), result))
        })
    }

    /// All workers, those of one pod together, by container and type.
    pub fn list(&self) -> impl Iterator<Item = WorkerView<'_>> {
        self.pods.values().flat_map(|pod| {
            let slots = pod.workers.values().filter_map(|id| self.slots.get(*id));
            slots.map(|slot| self.view(&pod.spec, slot))
        })
    }

    /// Whether there is this worker.
    pub fn has_worker(&self, worker: WorkerId) -> bool {
        self.slots.contains_key(worker)
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.pods.values().map(|pod| pod.workers.len()).sum()
    }

    /// What the next agent is to know, as of `now`. Its back-offs are left to the caller.
    pub fn snapshot(&self, now: Duration) -> Snapshot {
        let slots = self.slots.values().filter(|slot| !slot.is_stopped);
        let workers = slots.filter_map(|slot| slot.worker.save(&slot.pod_uid, &slot.container));
        Snapshot {
            workers: workers.chain(self.left.save(now)).collect(),
            backoffs: Vec::new(),
        }
    }

    fn view<'a>(&self, pod: &'a Arc<PodSpec>, slot: &'a Slot) -> WorkerView<'a> {
        let worker = &slot.worker;
        let (last, run) = worker.run();
        WorkerView {
            pod,
            container: &slot.container,
            container_id: worker.container_id(),
            kind: worker.kind(),
            probe: worker.probe(),
            result: worker.result(),
            last,
            run,
            threshold: worker.threshold(last.unwrap_or(ProbeResult::Success)),
            on_hold: worker.is_on_hold(),
            waiting: slot.waiting,
            in_flight: matches!(slot.state, State::InFlight),
            next: match slot.state {
                State::Timed(_) | State::Queued => Some(slot.due),
                State::InFlight => None,
            },
            delay: match slot.state {
                State::Queued => Some(self.shares.delay(slot.share, self.usage.free())),
                State::Timed(_) | State::InFlight => None,
            },
            period: worker.period(),
            fresh: slot.fresh,
            begun: slot.begun,
            last_run: slot.last_run.as_ref(),
        }
    }
}
