//! Documents under a prefix in etcd, one per key, written by people and programs; the agent only reads them.
//!
//! `view` holds the contents of the keys; the task in this module follows the store.

mod view;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use self::view::View;
use super::{Change, Cursor, EtcdConfigError, Feed, FeedEnd, Source, Store, StoreError};
use crate::backoff::Backoff;
use crate::nodes::Staleness;
use health_model::activity::{self, Activity, Reporter};
use health_settings::RegistrySpec;

/// The first change is reported immediately, and changes within this time after it are reported together.
const GATHER: Duration = Duration::from_millis(100);

/// Prefix of the keys of a cluster's services in etcd. It is followed by `services/NAMESPACE/NAME` or
/// `endpointslices/NAMESPACE/NAME`.
pub fn services_prefix(cluster: &str) -> String {
    format!("/health-agent/services/v1/{cluster}/")
}

/// The documents under a prefix.
#[derive(Debug, PartialEq)]
pub struct DocumentTable<T> {
    /// The documents as converted by `read`, by key without the prefix.
    pub documents: OrdMap<String, Arc<T>>,
    /// Since when the documents may be outdated, and why. They show the state at that time.
    pub stale: Option<Staleness>,
    /// Whether the documents have been listed: if so, a document that is not in the table does not exist.
    pub is_complete: bool,
}

impl<T> Clone for DocumentTable<T> {
    fn clone(&self) -> Self {
        Self {
            documents: self.documents.clone(),
            stale: self.stale.clone(),
            is_complete: self.is_complete,
        }
    }
}

/// A key's value, or why it was not read.
pub type Text<'a> = Result<&'a [u8], String>;

/// Why documents cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum DocumentsError {
    /// The settings name something other than etcd.
    #[error("cannot read documents from {0}: it is not etcd")]
    NoEtcd(RegistrySpec),
    /// The settings cannot be used.
    #[error(transparent)]
    Config(#[from] EtcdConfigError),
}

/// Follows documents. Dropping it closes the connection.
#[derive(Debug)]
pub struct DocumentWatch<T> {
    table: watch::Receiver<Arc<DocumentTable<T>>>,
    activity: Activity,
    task: JoinHandle<()>,
}

impl<T: PartialEq + Send + Sync + 'static> DocumentWatch<T> {
    /// Starts to follow the documents under a prefix, which must end with a slash. `read` converts the value of a key
    /// to the form that is kept. It is passed the key without the prefix, the value, and the previous result for that
    /// key.
    ///
    /// Fails only if the settings cannot be used; a store that does not respond is retried. Must be called in a tokio
    /// runtime.
    pub fn open(
        spec: &RegistrySpec,
        prefix: &str,
        read: impl FnMut(&str, Text<'_>, Option<&T>) -> T + Send + 'static,
    ) -> Result<Self, DocumentsError> {
        let source = Source::of(spec).ok_or_else(|| DocumentsError::NoEtcd(spec.clone()))?;
        source.access()?;
        let cursor = Cursor::default();
        let table = DocumentTable {
            documents: OrdMap::new(),
            stale: Some(Staleness {
                since: cursor.heard.time(),
                reason: "not connected yet".to_owned(),
            }),
            is_complete: false,
        };
        let (sender, receiver) = watch::channel(Arc::new(table.clone()));
        let (reporter, activity) = activity::channel();
        let follower = Follower {
            reporter,
            source,
            shown: spec.to_string(),
            view: View::new(prefix, read),
            cursor,
            outage: table.stale,
            sender,
            started: Instant::now(),
        };
        Ok(Self {
            table: receiver,
            activity,
            task: tokio::spawn(follower.run()),
        })
    }

    /// Follows the documents: first the current ones, then every change.
    pub fn table(&self) -> watch::Receiver<Arc<DocumentTable<T>>> {
        self.table.clone()
    }

    /// What is known about the watch itself.
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }
}

impl<T> Drop for DocumentWatch<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The task that follows the store.
struct Follower<T, R> {
    reporter: Reporter,
    source: Source,
    /// The store as written in the settings.
    shown: String,
    view: View<T, R>,
    /// The position up to which the view has read the store.
    cursor: Cursor,
    /// Since when the store is unavailable, and why.
    outage: Option<Staleness>,
    sender: watch::Sender<Arc<DocumentTable<T>>>,
    started: Instant,
}

impl<T, R> Follower<T, R>
where
    T: PartialEq + Send + Sync,
    R: FnMut(&str, Text<'_>, Option<&T>) -> T + Send,
{
    async fn run(mut self) {
        let mut backoff = Backoff::default();
        // Members are tried in turn; each agent starts with a random one.
        let mut turn = usize::from(rand::random::<u16>());
        loop {
            let Err(error) = self.connected(turn, &mut backoff).await;
            turn = turn.wrapping_add(1);
            self.lost(&error);
            tokio::time::sleep(backoff.pause(rand::random())).await;
        }
    }

    /// Follows the store through one member until the connection fails. Returns the reason.
    async fn connected(
        &mut self,
        turn: usize,
        backoff: &mut Backoff,
    ) -> Result<Infallible, StoreError> {
        let prefix = self.view.prefix();
        let (mut store, endpoint) = Store::of_turn(&self.source, turn, prefix).await?;
        loop {
            let (feed, begun) = Feed::begin(&mut store, &mut self.cursor).await?;
            begun.take_up(&mut self.view, self.started.elapsed());
            backoff.reset();
            self.found(&endpoint);
            self.follow(feed).await.or_again()?;
        }
    }

    async fn follow(&mut self, mut feed: Feed) -> FeedEnd {
        let mut publish_at: Option<Instant> = None;
        let mut next_turn = Instant::now();
        loop {
            let expiry_at = self.view.next_expiry().map(|at| self.started + at);
            let wake_at = [publish_at, expiry_at].into_iter().flatten().min();
            tokio::select! {
                changes = feed.next(&mut self.cursor) => {
                    let changes = match changes {
                        Ok(changes) => changes,
                        // The changes gathered so far are reported together with those that follow the failure.
                        Err(ended) => return ended,
                    };
                    let now = self.started.elapsed();
                    for change in changes {
                        match change {
                            Change::Put(pair) => self.view.put(&pair, now),
                            Change::Delete(key) => self.view.delete(&key),
                        }
                    }
                    publish_at.get_or_insert_with(|| next_turn.max(Instant::now()));
                }
                () = at(wake_at) => {
                    let has_expired = self.view.expire(self.started.elapsed());
                    if has_expired || publish_at.is_some_and(|at| Instant::now() >= at) {
                        publish_at = None;
                        self.publish();
                        next_turn = Instant::now() + GATHER;
                    }
                }
            }
        }
    }

    fn found(&mut self, endpoint: &str) {
        self.reporter.succeeded();
        let was_away = self.outage.take().is_some();
        self.publish();
        if was_away {
            let documents = self.view.documents().len();
            info!(endpoint, documents, "connected to etcd");
        }
    }

    fn lost(&mut self, error: &StoreError) {
        self.reporter.failed(error);
        let stale = Staleness {
            since: self.cursor.heard.time(),
            reason: error.to_string(),
        };
        let known = self.outage.as_ref();
        if known.is_none_or(|known| known.reason != stale.reason) {
            warn!(store = self.shown, %error, "etcd is unavailable; keeping its last documents");
        }
        self.outage = Some(stale);
        self.publish();
    }

    /// Publishes the documents if they changed.
    fn publish(&self) {
        let emptied = || {
            let reason = self.view.distrust()?;
            Some(Staleness {
                since: self.cursor.heard.time(),
                reason: reason.to_owned(),
            })
        };
        let known = self.sender.borrow().clone();
        let mut stale = self.outage.clone().or_else(emptied);
        // Keep the time at which this reason first applied.
        if let (Some(stale), Some(known)) = (&mut stale, &known.stale)
            && stale.reason == known.reason
        {
            stale.since = known.since;
        }
        let table = DocumentTable {
            documents: self.view.documents().clone(),
            stale,
            is_complete: self.view.is_complete(),
        };
        if *known != table {
            self.sender.send_replace(Arc::new(table));
        }
    }
}

/// Waits until `time`, or forever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
