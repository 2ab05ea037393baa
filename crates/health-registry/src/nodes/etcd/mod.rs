//! The node registry in etcd. Each agent writes a permanent record of its node, and a presence key that is bound to a
//! lease. A node leaves the set when its record is deleted, not when its agent stops or loses its connection to the
//! store. Probes decide whether a node is alive.
//!
//! `view` converts keys to nodes, `registration` maintains this node's own keys through `requests`, and the task in
//! this module connects them.

mod registration;
mod requests;
mod view;

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{self, Controller, Reporter};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use self::registration::{Registration, Signs};
use self::view::{Key, Keys, View};
use super::{Node, NodeSet, PUBLISHING, Registry, SourceState, Staleness, UnusableEntry, WATCH};
use crate::backoff::Backoff;
use crate::etcd::{
    Change, Cursor, EtcdConfigError, Feed, FeedEnd, Source, Store, StoreError, Value,
};
use health_settings::RegistrySpec;

/// Changes that arrive within this time are combined into one new set.
const GATHER: Duration = Duration::from_millis(100);
/// Time between two checks for abandoned records.
const ABANDONED_PERIOD: Duration = Duration::from_secs(60);
/// How long a node's agent must be absent before the node's record is deleted.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);
/// Maximum random addition to that time, so that agents do not all delete the record at once.
const ABANDONED_SPREAD: Duration = Duration::from_secs(600);
/// Maximum number of abandoned records that one check deletes.
const ABANDONED_AT_ONCE: usize = 10;

/// Location of an etcd cluster.
#[derive(Clone, Debug)]
pub struct EtcdSpec {
    source: Source,
    shown: String,
}

impl EtcdSpec {
    /// A cluster with members at these URLs.
    pub fn members(urls: &[String]) -> Self {
        Self {
            source: Source::Urls(urls.to_vec()),
            shown: RegistrySpec::Etcd(urls.to_vec()).to_string(),
        }
    }

    /// A cluster that a configuration file describes.
    pub fn config(path: &Path) -> Self {
        Self {
            source: Source::File(path.to_owned()),
            shown: RegistrySpec::EtcdConfig(path.to_owned()).to_string(),
        }
    }
}

/// The node registry in etcd. Dropping it closes the connection; the node stays registered.
#[derive(Debug)]
pub struct EtcdRegistry {
    nodes: watch::Receiver<Arc<NodeSet>>,
    own: watch::Sender<Option<Node>>,
    controllers: [Controller; 2],
    task: JoinHandle<()>,
}

impl EtcdRegistry {
    /// Starts to follow the nodes of a cluster. `own` is in the set from the start, and is registered once it is
    /// published. Fails only if the settings cannot be used; a store that does not respond is retried. Must be called
    /// in a tokio runtime.
    pub fn open(spec: EtcdSpec, cluster: &str, own: Option<Node>) -> Result<Self, EtcdConfigError> {
        spec.source.access()?;
        let view = View::new(cluster, own);
        let cursor = Cursor::default();
        let state = SourceState {
            registry: spec.shown.clone(),
            cluster: cluster.to_owned(),
            heard: cursor.heard.clone(),
            stale: Some(Staleness {
                since: cursor.heard.time(),
                reason: "not connected yet".to_owned(),
            }),
            rejected: Vec::new(),
        };
        let initial = NodeSet {
            nodes: view.nodes().0,
            sources: vec![state.clone()],
        };
        let (sender, receiver) = watch::channel(Arc::new(initial));
        let (own, published) = watch::channel(None);
        let registration = Registration::new(Keys::of(cluster), own.subscribe());
        let (reporter, activity) = activity::channel();
        let controllers = [
            Controller::new(WATCH, activity),
            Controller::new(PUBLISHING, registration.activity()),
        ];
        let follower = Follower {
            reporter,
            source: spec.source,
            keys: Keys::of(cluster),
            view,
            cursor,
            state,
            published,
            sender,
            started: Instant::now(),
            abandoned_after: ABANDONED_AFTER + ABANDONED_SPREAD.mul_f64(rand::random()),
        };
        Ok(Self {
            nodes: receiver,
            controllers,
            task: tokio::spawn(follower.run(registration)),
            own,
        })
    }
}

impl Drop for EtcdRegistry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Registry for EtcdRegistry {
    fn watch(&self) -> watch::Receiver<Arc<NodeSet>> {
        self.nodes.clone()
    }

    fn publish(&self, own: Node) {
        self.own.send_if_modified(|published| {
            let changed = published.as_ref() != Some(&own);
            *published = Some(own);
            changed
        });
    }

    fn controllers(&self) -> Vec<Controller> {
        self.controllers.to_vec()
    }
}

/// Deletes a node's record, trying each member once. Returns whether a record existed.
pub(super) async fn deregister(spec: &EtcdSpec, cluster: &str, node: &str) -> Result<bool, String> {
    let access = spec.source.access().map_err(|error| error.to_string())?;
    let mut failures = Vec::new();
    for endpoint in &access.endpoints {
        let deleted = async {
            let keys = Keys::of(cluster);
            let mut store = Store::connect(&access, endpoint, keys.prefix()).await?;
            requests::deregister(&mut store, &keys, node).await
        };
        match deleted.await {
            Ok(deleted) => return Ok(deleted),
            Err(error) => failures.push(format!("{endpoint}: {error}")),
        }
    }
    Err(failures.join("; "))
}

/// The task that follows the store.
struct Follower {
    reporter: Reporter,
    source: Source,
    keys: Keys,
    view: View,
    /// The position up to which the view has read the store.
    cursor: Cursor,
    state: SourceState,
    published: watch::Receiver<Option<Node>>,
    sender: watch::Sender<Arc<NodeSet>>,
    started: Instant,
    abandoned_after: Duration,
}

impl Follower {
    async fn run(mut self, mut registration: Registration) {
        let mut backoff = Backoff::default();
        // Members are tried in turn; each agent starts with a random one.
        let mut turn = usize::from(rand::random::<u16>());
        loop {
            let Err(error) = self.connected(turn, &mut registration, &mut backoff).await;
            turn = turn.wrapping_add(1);
            self.lost(error);
            let pause = tokio::time::sleep(backoff.pause(rand::random()));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    Ok(()) = self.published.changed() => self.take_own(),
                }
            }
        }
    }

    /// Follows the store through one member until the connection fails. Returns the reason.
    async fn connected(
        &mut self,
        turn: usize,
        registration: &mut Registration,
        backoff: &mut Backoff,
    ) -> Result<Infallible, StoreError> {
        let prefix = self.keys.prefix();
        let (mut store, endpoint) = Store::of_turn(&self.source, turn, prefix).await?;
        loop {
            let (feed, begun) = Feed::begin(&mut store, &mut self.cursor).await?;
            let now = self.now();
            begun.take_up(&mut self.view, now);
            backoff.reset();
            self.found(&endpoint);
            let signs = registration.signs();
            let keep = registration.keep(store.clone());
            let ended = tokio::select! {
                ended = self.follow(feed, &mut store, &signs) => ended,
                never = keep => match never {},
            };
            ended.or_again()?;
        }
    }

    async fn follow(&mut self, mut feed: Feed, store: &mut Store, signs: &Signs) -> FeedEnd {
        let mut abandoned_at = Instant::now() + ABANDONED_PERIOD;
        let mut changed_at: Option<Instant> = None;
        let mut problem = signs.problem();
        loop {
            let gathered_at = changed_at.map(|at| at + GATHER);
            let expiry_at = self.view.next_expiry().map(|at| self.started + at);
            let wake_at = [gathered_at, expiry_at];
            let wake_at = wake_at
                .into_iter()
                .flatten()
                .fold(abandoned_at, Instant::min);
            tokio::select! {
                changes = feed.next(&mut self.cursor) => {
                    match changes {
                        Ok(changes) => self.apply(changes, signs),
                        Err(ended) => return ended,
                    }
                    changed_at.get_or_insert_with(Instant::now);
                }
                Ok(()) = self.published.changed() => self.take_own(),
                Ok(()) = problem.changed() => {
                    self.state.rejected = self.own_problem(&problem.borrow_and_update());
                    changed_at.get_or_insert(Instant::now());
                }
                () = tokio::time::sleep_until(wake_at) => {}
            }
            let now = Instant::now();
            let expired = self.view.expire(self.now());
            if expired || changed_at.is_some_and(|at| now >= at + GATHER) {
                changed_at = None;
                self.publish();
            }
            if now >= abandoned_at {
                abandoned_at = now + ABANDONED_PERIOD;
                self.forget_abandoned(store).await;
            }
        }
    }

    fn apply(&mut self, changes: Vec<Change>, signs: &Signs) {
        let now = self.now();
        for change in changes {
            let (key, value) = match &change {
                Change::Put(pair) => match &pair.value {
                    Value::Bytes(bytes) => (&pair.key, Some(bytes.as_slice())),
                    Value::TooLarge(_) => (&pair.key, Some([].as_slice())),
                },
                Change::Delete(key) => (key, None),
            };
            match self.keys.read(key) {
                Some(Key::Record(node)) => signs.record_changed(node, value),
                Some(Key::Presence(node)) => signs.presence_changed(node, value),
                None => {}
            }
            match change {
                Change::Put(pair) => self.view.put(pair, now),
                Change::Delete(key) => self.view.delete(&key, now),
            }
        }
    }

    /// Deletes the records of nodes that are gone for good. Only an agent that is registered here may delete them: an
    /// agent that only reads another cluster's store changes nothing there.
    async fn forget_abandoned(&mut self, store: &mut Store) {
        if self.published.borrow().is_none() {
            return;
        }
        let abandoned = self.view.abandoned(self.abandoned_after, self.now());
        for (node, mod_revision) in abandoned.into_iter().take(ABANDONED_AT_ONCE) {
            let (record, presence) = (self.keys.record(&node), self.keys.presence(&node));
            match requests::forget(store, &record, &presence, mod_revision).await {
                Ok(true) => info!(
                    key = record,
                    "deleted the record of a node whose agent is gone"
                ),
                Ok(false) => {}
                Err(error) => warn!(key = record, %error, "cannot delete an abandoned record"),
            }
        }
    }

    /// Takes over the latest settings of this node.
    fn take_own(&mut self) {
        let own = self.published.borrow_and_update().clone();
        if own.is_some() {
            self.view.set_own(own);
            self.publish();
        }
    }

    fn own_problem(&self, problem: &Option<String>) -> Vec<UnusableEntry> {
        let own = self.published.borrow();
        let key = own.as_ref().map(|own| self.keys.record(&own.name));
        let (Some(key), Some(reason)) = (key, problem) else {
            return Vec::new();
        };
        vec![UnusableEntry {
            key,
            reason: reason.clone(),
        }]
    }

    fn found(&mut self, endpoint: &str) {
        self.reporter.succeeded();
        let before = self.state.stale.take();
        self.publish();
        if before.is_some() {
            let nodes = self.sender.borrow().nodes.len();
            info!(endpoint, nodes, "connected to etcd");
        }
    }

    fn lost(&mut self, error: StoreError) {
        self.reporter.failed(&error);
        let stale = Staleness {
            since: self.cursor.heard.time(),
            reason: error.to_string(),
        };
        let known = self.state.stale.as_ref();
        if known.is_none_or(|known| known.reason != stale.reason) {
            warn!(registry = self.state.registry, %error, "etcd is unavailable; keeping the last good set");
        }
        self.state.stale = Some(stale);
        self.publish();
    }

    /// Publishes the set if it changed.
    fn publish(&mut self) {
        let (nodes, mut rejected) = self.view.nodes();
        rejected.splice(0..0, self.state.rejected.iter().cloned());
        let set = NodeSet {
            nodes,
            sources: vec![SourceState {
                rejected,
                ..self.state.clone()
            }],
        };
        let known = self.sender.borrow().clone();
        if *known == set {
            return;
        }
        for entry in &set.sources[0].rejected {
            if !known.sources[0].rejected.contains(entry) {
                warn!(
                    key = entry.key,
                    reason = entry.reason,
                    "a record is left out"
                );
            }
        }
        self.sender.send_replace(Arc::new(set));
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}
