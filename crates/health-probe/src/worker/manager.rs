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
    /// Identifies a worker of a manager. Never reused for a later worker.
    pub struct WorkerId;
}

/// The options of a manager.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Limits on the number of probes.
    pub limits: Limits,
    /// The wall clock when the agent started, which is the manager's time zero.
    pub agent_start: Timestamp,
    /// An earlier agent's state, if this agent takes over from it.
    pub snapshot: Option<Snapshot>,
}

/// A run to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The worker that the run belongs to.
    pub worker: WorkerId,
    /// The pod.
    pub pod: Arc<PodSpec>,
    /// The container's name.
    pub container: Arc<str>,
    /// The container's ID.
    pub container_id: Arc<str>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The probe.
    pub probe: Arc<Probe>,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// When the attempt was due; the time passed since then is the prober's delay.
    pub due: Duration,
}

/// The consequence of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finished {
    /// The attempt ended in an error: retry immediately.
    Again(Start),
    /// The run is over.
    Done(Judgement),
    /// The worker was stopped meanwhile: there is no conclusion and no report.
    Dropped,
}

/// The workers of all pods of a node, and their state.
#[derive(Debug)]
pub struct Manager {
    pub(super) agent_start: Timestamp,
    is_restart: bool,
    pub(super) pods: HashMap<Arc<str>, Pod>,
    pub(super) slots: SlotMap<WorkerId, Slot>,
    pub(super) wheel: Wheel<Timer>,
    /// Due probes that the limits hold back.
    pub(super) shares: Shares,
    pub(super) usage: Usage,
    left: Left,
    updates: Vec<ResultUpdate>,
    changed: Vec<Arc<str>>,
}

/// A pod and its known status.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) spec: Arc<PodSpec>,
    pub(super) status: Option<PodStatus>,
    pub(super) workers: BTreeMap<(Arc<str>, ProbeType), WorkerId>,
}

impl Manager {
    /// Creates a manager without pods.
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

    /// Probes a pod according to its spec from now on. If the pod is known, it is updated: workers are added for new
    /// probes and stopped for removed probes, and all other workers keep their state.
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

    /// Sets the known status of a pod. `ready` and `started` of its containers are computed, except that `ready` of a
    /// container that has not started stays as given. Each call makes containers that are not ready probe their
    /// readiness immediately, so call it when something has changed, and now and then. Has no effect on a pod that was
    /// not added.
    pub fn set_status(&mut self, now: Duration, uid: &str, mut status: PodStatus) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let reported = pod.status.is_none().then(|| status.clone());
        let before = pod.status.as_ref().or(reported.as_ref());
        let to_probe = self.compute(pod, &mut status, before);
        self.replace_status(now, uid, status, &to_probe);
    }

    /// Recomputes a pod's status after results have changed.
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

    /// The known status of a pod, with `ready` and `started` computed.
    pub fn status(&self, uid: &str) -> Option<&PodStatus> {
        self.pods.get(uid)?.status.as_ref()
    }

    /// The spec of the pod as last added.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodSpec>> {
        Some(&self.pods.get(uid)?.spec)
    }

    /// Stops all probes of a pod that may come back. Its held results are kept for
    /// [`RESET_AFTER`](restart::RESET_AFTER): a container that must be killed is still killed, and a container that has
    /// started still counts as started.
    pub(crate) fn retire_pod(&mut self, now: Duration, uid: &str) {
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

    /// Removes all pods that are not desired. Of an earlier agent's state for other pods, keeps only held results, as
    /// [`retire_pod`](Self::retire_pod) does.
    pub(crate) fn cleanup_pods(&mut self, now: Duration, is_desired: impl Fn(&str) -> bool) {
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

    /// Returns the results that are new or have changed since the last call, in order.
    pub(crate) fn take_updates(&mut self) -> Vec<ResultUpdate> {
        std::mem::take(&mut self.updates)
    }

    /// Returns the UIDs of the pods whose status has changed since the last call, because of
    /// [`set_status`](Self::set_status) or of results.
    pub(crate) fn take_status_changes(&mut self) -> Vec<Arc<str>> {
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

    /// Returns the kill that a result requires, if any: for a failed liveness or startup probe of a running container.
    /// A failure that was not concluded from a probe kills nothing: the container was not yet running when it was
    /// checked.
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

    /// All containers that must be killed and still exist, including those whose failures were already reported.
    pub fn kills(&self) -> Vec<Kill> {
        let held = self.slots.values().filter(|slot| slot.worker.is_on_hold());
        held.filter_map(|slot| {
            let container_id = slot.worker.container_id()?.clone();
            self.kill(&slot.update(container_id, slot.worker.result()?))
        })
        .collect()
    }

    /// The kill that follows from a container's failed liveness or startup probe, whether or not the container is still
    /// running. An earlier agent may have sent the probe.
    pub(crate) fn condemned(&self, pod_uid: &str, container_id: &str) -> Option<Kill> {
        let pod = self.pods.get(pod_uid)?;
        let mut slots = pod.workers.values().filter_map(|id| self.slots.get(*id));
        slots.find_map(|slot| {
            let result = slot.worker.held(container_id)?;
            restart::decide(&pod.spec, &slot.update(Arc::from(container_id), result))
        })
    }

    /// All workers, grouped by pod, sorted by container and type.
    pub fn list(&self) -> impl Iterator<Item = WorkerView<'_>> {
        self.pods.values().flat_map(|pod| {
            let slots = pod.workers.values().filter_map(|id| self.slots.get(*id));
            slots.map(|slot| self.view(&pod.spec, slot))
        })
    }

    /// Whether this worker exists.
    pub(crate) fn has_worker(&self, worker: WorkerId) -> bool {
        self.slots.contains_key(worker)
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.pods.values().map(|pod| pod.workers.len()).sum()
    }

    /// The state to save for the next agent, as of `now`. The caller adds the back-offs.
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
