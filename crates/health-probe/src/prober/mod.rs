//! The prober: executes the runs that a [`Manager`] asks for, and reports their outcomes to it.
//!
//! One task waits until the manager's next run is due and starts all due runs; each run is a separate task. A lock
//! protects the manager. It is never held across an await, so pods are added and listed directly.

mod attempt;
mod news;
mod stats;
mod trial;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use health_net::netns::NetNs;
use jiff::Timestamp;
use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use self::attempt::{Attempt, Commands};
use self::news::NewsSender;
use crate::runtime::Runtime;
use crate::spec::PodSpec;
use crate::worker::restart::Kill;
use crate::worker::{
    Finished, Manager, ManagerOptions, PodStatus, Report, Snapshot, Start, WorkerView,
};

pub use self::news::{News, NewsReceiver};
pub use self::stats::{DURATION_BOUNDS, Histogram, ProbeName, ProbeStats, Stats};
pub use self::trial::{Trial, Tried};

/// What the prober needs to know about containers, beyond their manifests.
pub trait Containers: Send + Sync {
    /// The network namespace of a pod.
    fn netns(&self, pod: &PodSpec) -> Option<Arc<NetNs>>;

    /// How to run commands in a container.
    fn execution(&self, pod: &PodSpec, container_id: &str) -> Option<Execution>;
}

/// How to run commands in a container.
#[derive(Clone, Debug)]
pub enum Execution {
    /// By this host itself, in the environment of one of the container's processes.
    Direct {
        /// The process.
        pid: u32,
        /// When it started, in ticks since boot, if known.
        started: Option<u64>,
    },
    /// By the container runtime.
    Runtime {
        /// The runtime.
        runtime: Runtime,
        /// The runtime's ID for the container.
        container_id: String,
        /// A process of the container, if known.
        pid: Option<u32>,
    },
}

/// The options of a prober.
pub struct ProberOptions {
    /// The options of the manager.
    pub manager: ManagerOptions,
    /// Where the containers run.
    pub containers: Arc<dyn Containers>,
    /// The folder of the certificates and keys that annotations name.
    pub certificates: PathBuf,
}

/// Probes containers. Clones share state; probing stops when the last one is dropped.
#[derive(Clone)]
pub struct Prober(Arc<Shared>);

struct Shared {
    manager: Mutex<Manager>,
    /// The manager's time zero.
    began: Instant,
    /// Notified when work is due before the time in `awake_at`.
    wake: Arc<Notify>,
    /// When the task that starts runs checks next, in ns since `began`; `u64::MAX` for never.
    awake_at: AtomicU64,
    containers: Arc<dyn Containers>,
    certificates: PathBuf,
    commands: Commands,
    stats: Mutex<Stats>,
    news: NewsSender,
}

impl Prober {
    /// Starts probing on a separate thread: slow API requests cannot delay a probe, and no step of a probe moves
    /// between threads. Probes from the network namespace of the calling thread. The holder of the receiver acts on the
    /// news. Fails if the thread cannot start.
    pub(crate) fn start_on_thread(options: ProberOptions) -> io::Result<(Self, NewsReceiver)> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (prober, reported, ends) = {
            let _entered = runtime.enter();
            Self::start_task(options)
        };
        thread::Builder::new()
            .name("prober".to_owned())
            // If the task panicked, the panic was already reported.
            .spawn(move || drop(runtime.block_on(ends)))?;
        Ok((prober, reported))
    }

    /// Starts probing in the current tokio runtime. The holder of the receiver acts on the news.
    pub fn start(options: ProberOptions) -> (Self, NewsReceiver) {
        let (prober, reported, _) = Self::start_task(options);
        (prober, reported)
    }

    fn start_task(options: ProberOptions) -> (Self, NewsReceiver, JoinHandle<()>) {
        let ProberOptions {
            manager,
            containers,
            certificates,
        } = options;
        let (news, reported) = news::channel();
        let prober = Self(Arc::new(Shared {
            manager: Mutex::new(Manager::new(manager)),
            began: Instant::now(),
            wake: Arc::default(),
            awake_at: AtomicU64::new(0),
            containers,
            certificates,
            commands: Commands::default(),
            stats: Mutex::default(),
            news,
        }));
        let (shared, wake) = (Arc::downgrade(&prober.0), prober.0.wake.clone());
        let task = tokio::spawn(async move {
            while let Some(shared) = shared.upgrade() {
                let next = Self(shared).start_due();
                let wait = async {
                    match next {
                        Some(next) => sleep_until(next).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = wait => {}
                    () = wake.notified() => {}
                }
            }
        });
        (prober, reported, task)
    }

    /// Starts all due runs. Returns when the next runs are due.
    fn start_due(&self) -> Option<Instant> {
        let (starts, next) = {
            let mut manager = self.manager();
            let now = self.now();
            let wall = Timestamp::now();
            let starts: Vec<Start> = std::iter::from_fn(|| manager.poll(now, wall)).collect();
            let next = manager.next_wake();
            // Set under the lock, so that anyone who changes the manager afterwards sees the new time.
            self.0.awake_at.store(nanoseconds(next), Ordering::Relaxed);
            (starts, next)
        };
        self.publish_state();
        for start in starts {
            tokio::spawn(self.clone().run(start));
        }
        next.map(|next| self.0.began + next)
    }

    /// Executes a run: an attempt, and further attempts while the last one ended in an error.
    async fn run(self, start: Start) {
        let mut next = Some(start);
        while let Some(start) = next.take() {
            // Whatever happens to the attempt, the manager gets its report.
            let mut unanswered = Unanswered(&self, Some(start));
            let Some(start) = &unanswered.1 else { break };
            let begun = self.now();
            let attempt = Attempt {
                start,
                containers: &*self.0.containers,
                certificates: &self.0.certificates,
                commands: &self.0.commands,
            };
            let report = attempt.make().await;
            let took = self.now().saturating_sub(begun);
            let late = begun.saturating_sub(start.due);
            let Some(start) = unanswered.1.take() else {
                break;
            };
            let finished = self.manager().finish(self.now(), start.worker, report);
            match finished {
                Finished::Again(again) => next = Some(again),
                Finished::Done(judgement) => {
                    self.stats().note(&start, judgement.counted, took, late);
                    if let Some(event) = judgement.event {
                        let reported = News::Event {
                            pod: start.pod.clone(),
                            container: start.container.clone(),
                            kind: start.kind,
                            event,
                        };
                        self.0.news.send(reported);
                    }
                }
                Finished::Dropped => {}
            }
        }
        self.publish_state();
        self.wake_in_time();
    }

    /// Wakes the task that starts runs if it would otherwise check too late.
    fn wake_in_time(&self) {
        let next = nanoseconds(self.manager().next_wake());
        if next < self.0.awake_at.load(Ordering::Relaxed) {
            self.0.wake.notify_one();
        }
    }

    /// Sends out all changes.
    fn publish_state(&self) {
        let mut manager = self.manager();
        for update in manager.take_updates() {
            let kill = manager.kill(&update);
            self.0.news.send(News::Result(update, kill));
        }
        for uid in manager.take_status_changes() {
            if let Some(status) = manager.status(&uid) {
                self.0.news.send(News::Status(uid, status.clone()));
            }
        }
    }

    /// Applies a change, then sends out and schedules its consequences.
    fn change<T>(&self, change: impl FnOnce(&mut Manager, Duration) -> T) -> T {
        let changed = change(&mut self.manager(), self.now());
        self.publish_state();
        self.wake_in_time();
        changed
    }

    /// Probes a pod according to its spec from now on.
    pub fn add_pod(&self, spec: Arc<PodSpec>) {
        self.change(|manager, now| manager.add_pod(now, spec));
        self.forget_commands();
    }

    /// Sets the known status of a pod, see [`Manager::set_status`].
    pub fn set_status(&self, uid: &str, status: PodStatus) {
        self.change(|manager, now| manager.set_status(now, uid, status));
    }

    /// Stops all probes of a pod, see [`Manager::retire_pod`].
    pub fn remove_pod(&self, uid: &str) {
        self.change(|manager, now| manager.retire_pod(now, uid));
        self.stats().retain_pods(|known| known != uid);
        self.forget_commands();
    }

    /// Removes all pods that are not desired.
    pub(crate) fn cleanup_pods(&self, is_desired: impl Fn(&str) -> bool) {
        self.change(|manager, now| manager.cleanup_pods(now, &is_desired));
        self.stats().retain_pods(is_desired);
        self.forget_commands();
    }

    /// The known status of a pod, with `ready` and `started` computed.
    pub fn status(&self, uid: &str) -> Option<PodStatus> {
        self.manager().status(uid).cloned()
    }

    /// All containers that must be killed, see [`Manager::kills`].
    pub fn kills(&self) -> Vec<Kill> {
        self.manager().kills()
    }

    /// The kill that follows from a container's failed probe, whether or not the container is still running, see
    /// [`Manager::condemned`].
    pub(crate) fn condemned(&self, pod_uid: &str, container_id: &str) -> Option<Kill> {
        self.manager().condemned(pod_uid, container_id)
    }

    /// Calls `look` for each worker; `look` must be quick. The worker's times count from the second argument.
    pub(crate) fn each_worker(&self, mut look: impl FnMut(WorkerView<'_>, Instant)) {
        let manager = self.manager();
        manager.list().for_each(|worker| look(worker, self.0.began));
    }

    /// The state to save for the next agent.
    pub fn snapshot(&self) -> Snapshot {
        let now = self.now();
        self.manager().snapshot(now)
    }

    /// Returns the results and durations of probes.
    pub fn statistics(&self) -> Stats {
        self.stats().clone()
    }

    /// Calls `look` with the statistics; `look` must be quick.
    pub(crate) fn look_at_statistics<T>(&self, look: impl FnOnce(&Stats) -> T) -> T {
        look(&self.stats())
    }

    /// Forgets the commands of workers that are gone.
    fn forget_commands(&self) {
        let manager = self.manager();
        self.0.commands.retain(|worker| manager.has_worker(worker));
    }

    fn now(&self) -> Duration {
        self.0.began.elapsed()
    }

    fn manager(&self) -> MutexGuard<'_, Manager> {
        lock(&self.0.manager)
    }

    fn stats(&self) -> MutexGuard<'_, Stats> {
        lock(&self.0.stats)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Lets the waiting task end.
        self.wake.notify_one();
    }
}

/// An attempt whose report the manager is waiting for. If dropped, for example in a panic, the attempt counts as not
/// sent.
struct Unanswered<'a>(&'a Prober, Option<Start>);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(start) = self.1.take() {
            let prober = self.0;
            prober
                .manager()
                .finish(prober.now(), start.worker, Report::NotSent);
        }
    }
}

fn nanoseconds(next: Option<Duration>) -> u64 {
    next.map_or(u64::MAX, |next| {
        u64::try_from(next.as_nanos()).unwrap_or(u64::MAX)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
