//! Keeps this node registered: with a permanent record, and with a presence key that is bound to a lease and lasts
//! while the agent is connected.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use health_model::activity::{self, Activity, Reporter};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{info, warn};

use super::requests;
use super::view::Keys;
use crate::backoff::Backoff;
use crate::etcd::{Store, StoreError};
use crate::nodes::Node;
use crate::nodes::record::NodeRecord;

/// How long an agent's presence key outlives its connection.
const LEASE_TTL: Duration = Duration::from_secs(30);
/// Minimum time between two registrations caused by another agent: two agents with the same name must not keep the
/// store busy.
const SHORTEST_GAP: Duration = Duration::from_secs(1);

/// This node's registration.
#[derive(Debug)]
pub(super) struct Registration {
    /// Distinguishes this agent from other agents with the same name.
    instance: String,
    keys: Keys,
    own: watch::Receiver<Option<Node>>,
    lease: Option<i64>,
    written: Option<Instant>,
    /// Why this node is not registered.
    problem: watch::Sender<Option<String>>,
    disturbed: Arc<Notify>,
    reporter: Reporter,
}

impl Registration {
    pub(super) fn new(keys: Keys, own: watch::Receiver<Option<Node>>) -> Self {
        Self {
            keys,
            instance: format!("{:016x}", rand::random::<u64>()),
            own,
            lease: None,
            written: None,
            problem: watch::Sender::new(None),
            disturbed: Arc::default(),
            reporter: activity::channel().0,
        }
    }

    /// What is known about the registration.
    pub(super) fn activity(&self) -> Activity {
        self.reporter.activity()
    }

    /// Returns the watching side, see [`Signs`].
    pub(super) fn signs(&self) -> Signs {
        Signs {
            instance: self.instance.clone(),
            own: self.own.clone(),
            disturbed: self.disturbed.clone(),
            problem: self.problem.subscribe(),
        }
    }

    /// Registers the node as soon as it is known, and keeps it registered for as long as this is polled.
    pub(super) async fn keep(&mut self, mut store: Store) -> Infallible {
        let mut backoff = Backoff::default();
        loop {
            match self.keep_until_disturbed(&mut store, &mut backoff).await {
                Ok(()) => {
                    if let Some(written) = self.written {
                        tokio::time::sleep_until(written + SHORTEST_GAP).await;
                    }
                }
                Err(error) => {
                    let problem = error.to_string();
                    self.reporter.failed(&problem);
                    if self.problem.borrow().as_ref() != Some(&problem) {
                        warn!(%error, "cannot register this node");
                        self.problem.send_replace(Some(problem));
                    }
                    tokio::time::sleep(backoff.pause(rand::random())).await;
                }
            }
        }
    }

    /// Keeps the node registered. Returns when the lease is lost or someone else changed the keys.
    async fn keep_until_disturbed(
        &mut self,
        store: &mut Store,
        backoff: &mut Backoff,
    ) -> Result<(), StoreError> {
        let is_known = self.own.wait_for(Option::is_some).await.is_ok();
        if !is_known {
            // No sender that could publish the node is left.
            return std::future::pending().await;
        }
        let mut hold = match self.lease {
            Some(lease) => store.keep(lease).await.ok(),
            None => None,
        };
        let still_there = match &mut hold {
            Some(hold) => hold.extend().await.unwrap_or(false),
            None => false,
        };
        let lease = match (self.lease, still_there) {
            (Some(lease), true) => lease,
            _ => store.grant(LEASE_TTL).await?,
        };
        self.lease = Some(lease);
        self.write(store, lease).await?;
        backoff.reset();
        let mut hold = match hold.filter(|_| still_there) {
            Some(hold) => hold,
            None => store.keep(lease).await?,
        };

        let mut ticks = tokio::time::interval(LEASE_TTL / 3);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    if !hold.extend().await? {
                        warn!(?lease, "lease lost; registering again");
                        return Ok(());
                    }
                    self.reporter.end(None, Some(LEASE_TTL / 3));
                }
                changed = self.own.changed() => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                    self.write(store, lease).await?;
                }
                () = self.disturbed.notified() => return Ok(()),
            }
        }
    }

    async fn write(&mut self, store: &mut Store, lease: i64) -> Result<(), StoreError> {
        let Some(own) = self.own.borrow_and_update().clone() else {
            return Ok(());
        };
        let record = record_of(&own);
        let wrote =
            requests::register(store, &self.keys, &own.name, &record, &self.instance, lease)
                .await?;
        if wrote {
            self.written = Some(Instant::now());
            info!(node = own.full_name(), "registered in etcd");
        }
        self.reporter.end(None, Some(LEASE_TTL / 3));
        self.problem
            .send_if_modified(|problem| problem.take().is_some());
        Ok(())
    }
}

/// The watching side of a [`Registration`]: receives changes of the node's own keys, and reports the state of the
/// registration.
#[derive(Clone, Debug)]
pub(super) struct Signs {
    instance: String,
    own: watch::Receiver<Option<Node>>,
    disturbed: Arc<Notify>,
    problem: watch::Receiver<Option<String>>,
}

impl Signs {
    /// Handles a node's record that was written or deleted.
    pub(super) fn record_changed(&self, node: &str, value: Option<&[u8]>) {
        let own = self.own.borrow();
        let Some(own) = own.as_ref().filter(|own| own.name == node) else {
            return;
        };
        if value != Some(record_of(own).as_bytes()) {
            self.disturbed.notify_one();
        }
    }

    /// Handles a node's presence key that was written or deleted.
    pub(super) fn presence_changed(&self, node: &str, value: Option<&[u8]>) {
        let own = self.own.borrow();
        if own.as_ref().is_none_or(|own| own.name != node)
            || value == Some(self.instance.as_bytes())
        {
            return;
        }
        if value.is_some() {
            warn!(node, "another agent is registering under this node's name");
        }
        self.disturbed.notify_one();
    }

    /// Follows the reason why this node is not registered.
    pub(super) fn problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.clone()
    }
}

fn record_of(node: &Node) -> String {
    // A record is plain data, so serializing it to JSON cannot fail.
    serde_json::to_string(&NodeRecord::from(node)).unwrap_or_default()
}
