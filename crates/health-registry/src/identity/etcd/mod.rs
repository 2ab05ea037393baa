//! Identities in etcd. One key maps a label set to its number, and another key maps the number to its labels; both are
//! created and deleted together. A node's references and announced addresses are bound to a lease that its agent keeps
//! alive.
//!
//! `records` converts keys to a view, `requests` makes changes through `transactions`, `keeper` makes the store contain
//! this node's wants, and the task in this module connects them.

mod keeper;
mod keys;
#[cfg(test)]
mod model;
mod records;
mod requests;
mod transactions;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use self::keeper::Keeper;
use self::keys::Keys;
use self::records::Records;
use super::allocator::{Shared, Timing};
use crate::backoff::Backoff;
use crate::etcd::{Cursor, Feed, FeedEnd, Source, Store, StoreError};

/// Changes that arrive within this time are reported together.
const GATHER: Duration = Duration::from_millis(100);

/// State that the follower writes and the keeper reads.
#[derive(Debug)]
struct SharedRecords {
    records: Mutex<Records>,
    started: Instant,
}

impl SharedRecords {
    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Follows the identities of `cluster`, and keeps the wants of `node` in the store. Never returns.
pub(super) fn run(
    shared: Arc<Shared>,
    source: Source,
    cluster: &str,
    node: &str,
    timing: Timing,
) -> impl Future<Output = ()> + Send + use<> {
    let keys = Keys::of(cluster);
    let records = Records::new(keys.clone(), node, timing.settle());
    let known = Arc::new(SharedRecords {
        records: Mutex::new(records),
        started: Instant::now(),
    });
    let mut keeper = Keeper::new(shared.clone(), known.clone(), keys.clone(), node, timing);
    let mut follower = Follower {
        shared,
        known,
        cursor: Cursor::default(),
        lost: None,
    };
    async move {
        let mut backoff = Backoff::default();
        // Members are tried in turn; each agent starts with a random one.
        let mut turn = usize::from(rand::random::<u16>());
        loop {
            let Err(error) = follower
                .connected(&source, keys.prefix(), turn, &mut keeper, &mut backoff)
                .await;
            turn = turn.wrapping_add(1);
            follower.lost(&error);
            tokio::time::sleep(backoff.pause(rand::random())).await;
        }
    }
}

/// The task that reads the store.
struct Follower {
    shared: Arc<Shared>,
    known: Arc<SharedRecords>,
    cursor: Cursor,
    /// Why the store was last unusable.
    lost: Option<String>,
}

impl Follower {
    /// Follows the store through one member until the connection fails. Returns the reason.
    async fn connected(
        &mut self,
        source: &Source,
        prefix: &str,
        turn: usize,
        keeper: &mut Keeper,
        backoff: &mut Backoff,
    ) -> Result<Infallible, StoreError> {
        let (mut store, endpoint) = Store::of_turn(source, turn, prefix).await?;
        loop {
            let (feed, begun) = Feed::begin(&mut store, &mut self.cursor).await?;
            begun.take_up(&mut *self.known.records(), self.known.now());
            backoff.reset();
            self.found(&endpoint);
            let ended = tokio::select! {
                ended = self.follow(feed) => ended,
                never = keeper.keep(store.clone()) => match never {},
            };
            ended.or_again()?;
        }
    }

    async fn follow(&mut self, mut feed: Feed) -> FeedEnd {
        let mut changed_at: Option<Instant> = None;
        loop {
            let gathered_at = changed_at.map(|at| at + GATHER);
            let expiry_at = self.known.records().view.next_expiry();
            let expiry_at = expiry_at.map(|at| self.known.started + at);
            let wake_at = gathered_at.into_iter().chain(expiry_at).min();
            tokio::select! {
                changes = feed.next(&mut self.cursor) => {
                    let changes = match changes {
                        Ok(changes) => changes,
                        Err(ended) => return ended,
                    };
                    let now = self.known.now();
                    let mut records = self.known.records();
                    for change in &changes {
                        records.apply(change, now);
                    }
                    drop(records);
                    self.shared.wake.notify_one();
                    changed_at.get_or_insert_with(Instant::now);
                }
                () = sleep_until(wake_at) => {}
            }
            let expired = self.known.records().expire(self.known.now());
            if expired || changed_at.is_some_and(|at| Instant::now() >= at + GATHER) {
                changed_at = None;
                self.publish();
            }
        }
    }

    fn found(&mut self, endpoint: &str) {
        if self.lost.take().is_some() || self.shared.hub.is_stale() {
            info!(endpoint, "connected to the identity store");
        }
        self.publish();
    }

    fn lost(&mut self, error: &StoreError) {
        let reason = error.to_string();
        if self.lost.as_ref() != Some(&reason) {
            let store = &self.shared.store;
            warn!(store, %error, "the identity store is unavailable; keeping its last known state");
        }
        self.shared.fail(self.cursor.heard.time(), reason.clone());
        self.lost = Some(reason);
    }

    fn publish(&self) {
        let records = self.known.records();
        let rejected = records.rejected();
        self.shared.hub.publish(&records.view, rejected, None);
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
