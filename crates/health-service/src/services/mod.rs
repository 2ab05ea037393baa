//! Moves services of this node from their sources into the kernel.
//!
//! One task feeds the sources' objects into the trackers and, whenever a runner decides, into a
//! [`State`](crate::state::State) that a [`Provider`] writes into the kernel. Nothing happens until services and
//! endpoint slices have been read completely once: until then, the node serves the same as before the restart.

mod provider;
mod syncer;
#[cfg(test)]
mod tests;
mod view;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use health_model::ipam::Family;
use jiff::Timestamp;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::choice::Topology;
use crate::health_check::{HealthAnswer, NodeStanding, ProxyHealth};
use crate::runner::{Driver, Intervals, RunnerError, Trigger};
use crate::source::ServiceSet;
use crate::state::Reserved;
use syncer::Syncer;

pub use provider::{Provider, Work};
pub use view::{Failure, View};

/// Settings of the syncs in [`Services`].
#[derive(Clone, Debug)]
pub struct SyncSettings {
    /// How often to sync. Once per maximum interval, the provider checks everything.
    pub intervals: Intervals,
    /// The families that the provider serves.
    pub families: Vec<Family>,
    /// How long a change may wait before the node counts as unhealthy: twice `--service-sync-max`.
    pub health_timeout: Duration,
    /// Returns the time of day.
    pub clock: fn() -> Timestamp,
}

/// Running services. Dropping this stops them, and leaves the kernel as it is.
#[derive(Debug)]
pub struct Services {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Services {
    /// Starts serving the services of these sources, in order of precedence, on a node whose place in the topology may
    /// change, but not its name. Fails if the intervals contradict each other. Must be called in a tokio runtime.
    pub fn start<P: Provider>(
        settings: SyncSettings,
        node: impl Into<NodeFacts>,
        sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
        provider: P,
    ) -> Result<Self, RunnerError> {
        let node = node.into();
        let (driver, trigger) = Driver::new(settings.intervals)?;
        let health = Arc::new(Health {
            proxy: Mutex::new(ProxyHealth::new(settings.health_timeout)),
            changes: Mutex::default(),
            families: settings.families.clone(),
            start: Instant::now(),
            clock: settings.clock,
        });
        let (sender, view) = watch::channel(Arc::default());
        let sender = Arc::new(sender);
        let watcher = Watcher {
            sources: sources.clone(),
            node: node.clone(),
            trigger: trigger.clone(),
            health: health.clone(),
            view: sender.clone(),
        };
        let syncer = Syncer::new(&settings, node, sources, provider, health.clone(), sender);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let driving = driver.drive(syncer, stopped.map(drop));
            tokio::select! {
                () = driving => {}
                () = watcher.watch() => {}
            }
        });
        Ok(Self {
            handle: Handle {
                view,
                health,
                trigger,
            },
            stop: Some(stop),
            task,
        })
    }

    /// Returns a handle that reports the state of the services.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Stops after the sync in progress, if any.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        // A panic in a sync does not end the task, so it has ended normally.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The facts about the node on which services depend, with their changes.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// The node's place in the topology.
    pub topology: watch::Receiver<Topology>,
    /// The addresses and ports that services must leave to the node and its peers.
    pub reserved: watch::Receiver<Arc<Reserved>>,
}

/// For a node that reserves nothing.
impl From<watch::Receiver<Topology>> for NodeFacts {
    fn from(topology: watch::Receiver<Topology>) -> Self {
        Self {
            topology,
            reserved: watch::channel(Arc::default()).1,
        }
    }
}

/// Reports the state of services, both while they are served and afterwards.
#[derive(Clone, Debug)]
pub struct Handle {
    view: watch::Receiver<Arc<View>>,
    health: Arc<Health>,
    trigger: Trigger,
}

impl Handle {
    /// Returns the services, with their changes.
    pub fn view(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }

    /// Sets the cluster's view of the node.
    pub fn node(&self, standing: NodeStanding<'_>) {
        self.health.with(|health| health.node(standing));
    }

    /// Returns the response of `/healthz`, which tells load balancers whether this node may get new traffic.
    pub fn healthz(&self) -> HealthAnswer {
        let (now, wall) = (self.health.now(), (self.health.clock)());
        self.health.with(|health| health.healthz(now, wall))
    }

    /// Returns the response of `/livez`, which tells supervisors whether changes reach the kernel in time.
    pub fn livez(&self) -> HealthAnswer {
        let (now, wall) = (self.health.now(), (self.health.clock)());
        self.health.with(|health| health.livez(now, wall))
    }

    /// Requests a sync, for example after a change of something else on which the provider depends. Has no effect after
    /// serving has stopped.
    pub fn sync(&self) {
        self.health.queued();
        // Fails only if the driver has stopped, and then there is nothing to do.
        let _ = self.trigger.trigger();
    }

    /// Returns the numbers of all changes and of pending ones.
    pub fn changes(&self) -> ChangeCounts {
        *self.health.changes()
    }
}

/// Numbers of changes of services and of endpoint slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeCounts {
    /// Changes of services since the start.
    pub services: u64,
    /// Changes of services that the provider has not applied yet.
    pub pending_services: u64,
    /// Changes of endpoint slices since the start.
    pub endpoints: u64,
    /// Changes of endpoint slices that the provider has not applied yet.
    pub pending_endpoints: u64,
    /// When the last change was noticed; `None` before the first.
    pub last_queued: Option<Timestamp>,
}

/// Whether changes reach the kernel in time. Shared by the code that reports changes and the code that queries them.
#[derive(Debug)]
struct Health {
    proxy: Mutex<ProxyHealth>,
    changes: Mutex<ChangeCounts>,
    families: Vec<Family>,
    start: Instant,
    clock: fn() -> Timestamp,
}

impl Health {
    fn with<R>(&self, then: impl FnOnce(&mut ProxyHealth) -> R) -> R {
        then(&mut self.proxy.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn changes(&self) -> MutexGuard<'_, ChangeCounts> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the start.
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn queued(&self) {
        let now = self.now();
        self.changes().last_queued = Some((self.clock)());
        self.with(|health| {
            for family in &self.families {
                health.queued(*family, now);
            }
        });
    }

    /// Records that everything queued up to a time since the start is done.
    fn updated(&self, until: Duration) {
        let wall = (self.clock)();
        let mut changes = self.changes();
        (changes.pending_services, changes.pending_endpoints) = (0, 0);
        drop(changes);
        self.with(|health| {
            for family in &self.families {
                health.updated(*family, until, wall);
            }
        });
    }
}

/// Requests a sync whenever something has changed.
struct Watcher {
    sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
    node: NodeFacts,
    trigger: Trigger,
    health: Arc<Health>,
    view: Arc<watch::Sender<Arc<View>>>,
}

impl Watcher {
    /// Watches until the driver ends.
    async fn watch(mut self) {
        let mut is_started = false;
        loop {
            let sources = self.sources.iter_mut();
            let sets: Vec<_> = sources
                .map(|source| source.borrow_and_update().clone())
                .collect();
            is_started |= sets.iter().all(|set| set.synced.is_complete());
            if is_started {
                self.health.queued();
                if self.trigger.trigger().is_err() {
                    return;
                }
            } else {
                let problems = sets.iter().flat_map(|set| set.problems.iter().cloned());
                let problems = problems.collect();
                view::update(&self.view, |view| view.problems = problems);
            }
            self.changed().await;
        }
    }

    /// Waits for a change of a source, of the node's place in the topology, or of its reservations. A closed source
    /// never changes again.
    async fn changed(&mut self) {
        let sources = self
            .sources
            .iter_mut()
            .map(|source| changed(source).boxed());
        let NodeFacts { topology, reserved } = &mut self.node;
        let node = [changed(topology).boxed(), changed(reserved).boxed()];
        select_all(sources.chain(node)).await;
    }
}

async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending().await
    }
}
