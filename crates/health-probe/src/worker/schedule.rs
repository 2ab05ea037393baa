//! Schedules when workers check their containers and probe them.

use std::sync::Arc;
use std::time::Duration;

use health_model::pace::{fraction, phase};
use jiff::Timestamp;

use super::manager::{Finished, Manager, Start, WorkerId};
use super::shares::PodKey;
use super::{
    Conclusion, Decision, JITTER_MAX, LastRun, ProbeResult, Report, ResultUpdate, Situation,
    TimerId, Waiting, Worker,
};
use crate::spec::{PodSpec, Probe};

/// Shortest time from one tick to the next.
const PERIOD_MIN: Duration = Duration::from_millis(1);

/// A worker and its schedule.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) pod_uid: Arc<str>,
    pub(super) container: Arc<str>,
    pub(super) worker: Worker,
    pub(super) state: State,
    /// The current tick, or the tick that the worker waits for. Ticks are one period apart.
    tick: Duration,
    /// When the worker is due: at the tick, or later if it was busy then.
    pub(super) due: Duration,
    /// Whether the worker has checked its container yet; its ticks count from that check.
    has_begun: bool,
    /// Whether to remove the worker when its run ends.
    pub(super) is_stopped: bool,
    pub(super) waiting: Option<Waiting>,
    pub(super) last_run: Option<LastRun>,
    /// The pod's share of slots and rate.
    pub(super) share: PodKey,
    /// When a run last learned something, or when the worker was last not supposed to probe.
    pub(super) fresh: Duration,
    /// When the first run after `fresh` started.
    pub(super) begun: Option<Duration>,
}

/// The purpose of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    /// The worker is due.
    Worker(WorkerId),
    /// The pod's rate allows the next attempt.
    Pod(PodKey),
}

/// The current state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The worker waits for its time.
    Timed(TimerId),
    /// The worker is due, and the limits hold it back.
    Queued,
    /// A run is under way.
    InFlight,
}

impl Slot {
    /// Records that a run learned something, or that the worker should not probe now.
    fn refresh(&mut self, now: Duration) {
        self.fresh = now;
        self.begun = None;
    }

    /// Returns an update with a result of the worker for a container.
    pub(super) fn update(&self, container_id: Arc<str>, result: ProbeResult) -> ResultUpdate {
        ResultUpdate {
            pod_uid: self.pod_uid.clone(),
            container: self.container.clone(),
            kind: self.worker.kind(),
            container_id,
            result,
        }
    }
}

impl Manager {
    /// When to call [`poll`](Self::poll) next, unless a run ends or something changes before that.
    pub fn next_wake(&self) -> Option<Duration> {
        let is_ready = self.shares.is_ready();
        let queued = is_ready.then(|| self.usage.ready()).flatten();
        self.wheel.next().into_iter().chain(queued).min()
    }

    /// Returns a run to execute now. Call this until it returns `None`.
    pub fn poll(&mut self, now: Duration, wall: Timestamp) -> Option<Start> {
        loop {
            while let Some(timer) = self.wheel.pop(now) {
                match timer {
                    Timer::Worker(id) if self.look(now, wall, id) => {
                        self.shares.enqueue(self.slots[id].share, id);
                    }
                    Timer::Worker(_) => {}
                    Timer::Pod(pod) => self.shares.unpark(pod),
                }
            }
            if !self.usage.allows(now) {
                return None;
            }
            let Self { shares, wheel, .. } = self;
            let park = |pod, at| wheel.insert(at, Timer::Pod(pod));
            let id = shares.next(now, self.usage.free(), park)?;
            // The situation may have changed while the worker waited.
            if self.look(now, wall, id) {
                return self.start(now, id);
            }
        }
    }

    /// Lets a worker decide. If it wants to probe, it counts as queued from now on, and this returns true. Otherwise it
    /// waits for its next tick or is removed.
    fn look(&mut self, now: Duration, wall: Timestamp, id: WorkerId) -> bool {
        let slot = &mut self.slots[id];
        let Some(pod) = self.pods.get(&slot.pod_uid) else {
            self.stop(id);
            return false;
        };
        let situation = Situation {
            status: pod.status.as_ref(),
            container: &slot.container,
            restart_policy: pod.spec.restart_policy,
            now,
            wall,
            agent_start: self.agent_start,
        };
        let mut news = Vec::new();
        let decision = slot.worker.decide(&situation, &mut news);
        slot.waiting = match decision {
            Decision::Wait(waiting) => Some(waiting),
            Decision::Run | Decision::Exit(_) => None,
        };
        if decision == Decision::Run {
            slot.state = State::Queued;
        } else {
            slot.refresh(now);
            self.schedule(now, id);
        }
        self.publish(now, id, news);
        if let Decision::Exit(_) = decision {
            self.stop(id);
        }
        decision == Decision::Run
    }

    fn start(&mut self, now: Duration, id: WorkerId) -> Option<Start> {
        let even = self.usage.begin(now);
        let slot = &mut self.slots[id];
        self.shares.begin(slot.share, now);
        slot.state = State::InFlight;
        slot.begun.get_or_insert(now);
        if !slot.has_begun {
            // The ticks count from here, or from a little later, to spread out workers that started together.
            slot.has_begun = true;
            let period = slot.worker.period().max(PERIOD_MIN).as_nanos();
            let apart = even.saturating_sub(now).as_nanos() % period;
            slot.tick = now + Duration::from_nanos(u64::try_from(apart).unwrap_or(0));
        }
        self.attempt(id, 1)
    }

    fn attempt(&self, id: WorkerId, attempt: u32) -> Option<Start> {
        let slot = self.slots.get(id)?;
        Some(Start {
            worker: id,
            pod: self.pods.get(&slot.pod_uid)?.spec.clone(),
            container: slot.container.clone(),
            container_id: slot.worker.container_id()?.clone(),
            kind: slot.worker.kind(),
            probe: slot.worker.probe().clone(),
            attempt,
            due: slot.due,
        })
    }

    /// Takes the report of an attempt. Each [`Start`] must be followed by exactly one call, whatever happens.
    pub fn finish(&mut self, now: Duration, id: WorkerId, report: Report) -> Finished {
        let Some(slot) = self.slots.get_mut(id) else {
            return Finished::Dropped;
        };
        if slot.state != State::InFlight {
            return Finished::Dropped;
        }
        if slot.is_stopped {
            self.usage.end();
            self.shares.end(slot.share);
            self.remove(id);
            return Finished::Dropped;
        }
        let mut news = Vec::new();
        let judgement = match slot.worker.conclude(&report, &mut news) {
            Conclusion::Done(judgement) => judgement,
            Conclusion::Again { attempt } => {
                slot.due = now;
                self.usage.repeat(now);
                self.shares.repeat(slot.share, now);
                // The pod of a worker that is not stopped exists.
                return self
                    .attempt(id, attempt)
                    .map_or(Finished::Dropped, Finished::Again);
            }
        };
        slot.last_run = Some(LastRun {
            at: now,
            counted: judgement.counted,
            message: match report {
                Report::Outcome(outcome) => outcome.message,
                Report::NotSent => String::new(),
            },
        });
        if judgement.result.is_some() {
            slot.refresh(now);
        }
        self.usage.end();
        self.shares.end(slot.share);
        self.schedule(now, id);
        self.publish(now, id, news);
        Finished::Done(judgement)
    }

    /// The number of runs under way.
    pub fn in_flight(&self) -> usize {
        self.usage.in_flight()
    }

    /// The number of due runs that the limits hold back.
    pub fn queued(&self) -> usize {
        self.shares.queued()
    }

    /// Adds a worker, which checks its container immediately, or soon if the agent was restarted.
    pub(super) fn insert(
        &mut self,
        now: Duration,
        pod: &PodSpec,
        container: Arc<str>,
        worker: Worker,
        is_restart: bool,
    ) -> WorkerId {
        let pod_uid = pod.uid.clone();
        let span = worker.period().min(JITTER_MAX);
        let key = (&pod_uid, &container, worker.kind());
        let jitter = match is_restart && worker.period() > now {
            true => fraction(span, phase(key)),
            false => Duration::ZERO,
        };
        let due = now + jitter;
        let share = self.shares.join(&pod_uid, &pod.namespace);
        let Self { slots, wheel, .. } = self;
        slots.insert_with_key(|id| Slot {
            pod_uid,
            container,
            worker,
            state: State::Timed(wheel.insert(due, Timer::Worker(id))),
            tick: due,
            due,
            has_begun: false,
            is_stopped: false,
            waiting: None,
            last_run: None,
            share,
            fresh: now,
            begun: None,
        })
    }

    /// Replaces the probe of a worker.
    pub(super) fn set_probe(&mut self, now: Duration, id: WorkerId, probe: &Arc<Probe>) {
        if let Some(slot) = self.slots.get_mut(id)
            && slot.worker.probe() != probe
        {
            slot.worker.set_probe(probe.clone());
            self.trigger(now, id);
        }
    }

    /// Makes a worker check its container now, and then once per period. A worker that is about to check or is in a run
    /// does not check twice.
    pub(super) fn trigger(&mut self, now: Duration, id: WorkerId) {
        if let Some(slot) = self.slots.get_mut(id)
            && let State::Timed(timer) = slot.state
            && slot.has_begun
        {
            self.wheel.cancel(timer);
            slot.tick = now;
            slot.due = now;
            slot.state = State::Timed(self.wheel.insert(now, Timer::Worker(id)));
        }
    }

    /// Sets a worker's next time: its next tick, or now if the tick has passed. Missed ticks merge into one.
    fn schedule(&mut self, now: Duration, id: WorkerId) {
        let slot = &mut self.slots[id];
        let period = match slot.waiting {
            // Not urgent: nothing waits for this probe.
            Some(Waiting::Started) => slot.worker.probe().period,
            _ => slot.worker.period(),
        };
        let period = period.max(PERIOD_MIN);
        slot.has_begun = true;
        let next = slot.tick + period;
        if next > now {
            slot.tick = next;
            slot.due = next;
        } else {
            let late = now.saturating_sub(slot.tick).as_nanos() % period.as_nanos();
            let late = Duration::from_nanos(u64::try_from(late).unwrap_or(0));
            slot.tick = now - late;
            slot.due = now;
        }
        if let State::Timed(timer) = slot.state {
            self.wheel.cancel(timer);
        }
        slot.state = State::Timed(self.wheel.insert(slot.due, Timer::Worker(id)));
    }

    /// Stops a worker: immediately, or when its run ends.
    pub(super) fn stop(&mut self, id: WorkerId) {
        let Some(slot) = self.slots.get_mut(id) else {
            return;
        };
        slot.is_stopped = true;
        if let Some(pod) = self.pods.get_mut(&slot.pod_uid) {
            pod.workers.retain(|_, known| *known != id);
        }
        match slot.state {
            State::InFlight => {}
            State::Timed(timer) => {
                self.wheel.cancel(timer);
                self.remove(id);
            }
            State::Queued => {
                self.shares.withdraw(slot.share, id);
                self.remove(id);
            }
        }
    }

    /// Forgets a worker that is neither queued nor in a run.
    fn remove(&mut self, id: WorkerId) {
        let share = self.slots.remove(id).map(|slot| slot.share);
        let parked = share.and_then(|share| self.shares.leave(share));
        if let Some(timer) = parked {
            self.wheel.cancel(timer);
        }
    }
}
