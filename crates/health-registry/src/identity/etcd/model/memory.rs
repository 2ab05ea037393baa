//! A store in memory that fails on demand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::Instant;

use super::super::transactions::{
    Condition, KeyChange, StoredValue, Transaction, TransactionEnd, Transactions,
};
use super::Change;
use crate::etcd::{Pair, StoreError};

/// Which request fails, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    /// The number of requests that succeed before the failure.
    pub(super) after: usize,
    /// Whether the request is executed, so that only its response is lost.
    pub(super) is_made: bool,
}

/// The keys, the leases, and all changes since the store was empty.
pub(super) struct Memory {
    /// How often all data was lost.
    pub(super) epoch: u64,
    pub(super) log: Vec<Change>,
    revision: i64,
    pairs: BTreeMap<String, (Pair, Option<i64>)>,
    /// The expiry time of each lease.
    leases: BTreeMap<i64, Duration>,
    last_lease: i64,
    lease: Duration,
    started: Instant,
}

impl Memory {
    /// Creates an empty store that grants leases of this duration.
    pub(super) fn new(lease: Duration, started: Instant) -> Self {
        Self {
            epoch: 0,
            log: Vec::new(),
            revision: 0,
            pairs: BTreeMap::new(),
            leases: BTreeMap::new(),
            last_lease: 0,
            lease,
            started,
        }
    }

    pub(super) fn list(&self) -> Vec<Pair> {
        self.pairs.values().map(|(pair, _)| pair.clone()).collect()
    }

    fn grant(&mut self, ttl: Duration) -> i64 {
        self.last_lease += 1;
        self.leases
            .insert(self.last_lease, self.started.elapsed() + ttl);
        self.last_lease
    }

    pub(super) fn grant_agent(&mut self) -> i64 {
        self.grant(self.lease)
    }

    /// Extends an agent's lease; `None` if it no longer exists.
    pub(super) fn extend(&mut self, lease: i64) -> Option<i64> {
        let until = self.started.elapsed() + self.lease;
        *self.leases.get_mut(&lease)? = until;
        Some(lease)
    }

    pub(super) fn has_lease(&self, lease: i64) -> bool {
        self.leases.contains_key(&lease)
    }

    pub(super) fn revoke(&mut self, lease: i64) {
        if self.leases.remove(&lease).is_none() {
            return;
        }
        let bound = self.pairs.iter().filter(|(_, (_, of))| *of == Some(lease));
        let bound: Vec<String> = bound.map(|(key, _)| key.clone()).collect();
        self.revision += 1;
        bound.into_iter().for_each(|key| self.delete(key));
    }

    /// Revokes expired leases.
    pub(super) fn expire(&mut self) {
        let now = self.started.elapsed();
        let over = self.leases.iter().filter(|(_, until)| **until <= now);
        let over: Vec<i64> = over.map(|(lease, _)| *lease).collect();
        over.into_iter().for_each(|lease| self.revoke(lease));
    }

    /// Loses all data.
    pub(super) fn wipe(&mut self) {
        self.epoch += 1;
        self.log.clear();
        self.pairs.clear();
        self.leases.clear();
    }

    fn delete(&mut self, key: String) {
        if self.pairs.remove(&key).is_some() {
            self.log.push(Change::Delete(key));
        }
    }

    fn read(&self, key: &str) -> Option<StoredValue> {
        let (pair, _) = self.pairs.get(key)?;
        Some(StoredValue {
            value: pair.value.clone(),
            mod_revision: pair.mod_revision,
        })
    }

    fn holds(&self, condition: &Condition) -> bool {
        match condition {
            Condition::Absent(key) => !self.pairs.contains_key(key),
            Condition::NoneBelow(prefix) => !self.pairs.keys().any(|key| key.starts_with(prefix)),
            Condition::Says(key, value) => self
                .read(key)
                .is_some_and(|stored| stored.value == value.clone().into_bytes().into()),
            Condition::Unchanged(key, revision) => self
                .read(key)
                .is_some_and(|stored| stored.mod_revision == *revision),
        }
    }

    fn transact(&mut self, transaction: Transaction) -> Result<TransactionEnd, StoreError> {
        if !transaction.when.iter().all(|one| self.holds(one)) {
            let found = transaction.otherwise.and_then(|key| self.read(&key));
            return Ok(TransactionEnd::Refused(found));
        }
        let lost = |change: &KeyChange| matches!(change, KeyChange::Put { lease: Some(lease), .. } if !self.has_lease(*lease));
        if transaction.changes.iter().any(lost) {
            return Err(StoreError::new(transaction.attempt, "no such lease"));
        }
        self.revision += 1;
        for change in transaction.changes {
            match change {
                KeyChange::Delete(key) => self.delete(key),
                KeyChange::Put { key, value, lease } => {
                    let known = self.pairs.get(&key);
                    let created = known.map(|(pair, _)| pair.create_revision);
                    let pair = Pair {
                        key: key.clone(),
                        value: value.into_bytes().into(),
                        create_revision: created.unwrap_or(self.revision),
                        mod_revision: self.revision,
                    };
                    self.log.push(Change::Put(pair.clone()));
                    self.pairs.insert(key, (pair, lease));
                }
            }
        }
        Ok(TransactionEnd::Made)
    }
}

/// A connection to the store. Requests of different connections arrive in any order.
#[derive(Clone)]
pub(super) struct MemoryStore {
    memory: Arc<Mutex<Memory>>,
    turn: Arc<Mutex<Turn>>,
}

struct Turn {
    failure: Option<Failure>,
    random: StdRng,
}

impl MemoryStore {
    pub(super) fn new(memory: Arc<Mutex<Memory>>, failure: Option<Failure>, seed: u64) -> Self {
        let random = StdRng::seed_from_u64(seed);
        Self {
            memory,
            turn: Arc::new(Mutex::new(Turn { failure, random })),
        }
    }

    async fn ask<T>(
        &self,
        attempt: &'static str,
        ask: impl FnOnce(&mut Memory) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let (pauses, failure) = {
            let mut turn = self.turn.lock().expect("nobody panicked");
            let now = match &mut turn.failure {
                Some(failure) if failure.after == 0 => turn.failure.take(),
                Some(failure) => {
                    failure.after -= 1;
                    None
                }
                None => None,
            };
            (turn.random.random_range(0..3), now)
        };
        for _ in 0..pauses {
            tokio::task::yield_now().await;
        }
        let failed = Err(StoreError::new(attempt, "it fails"));
        match failure {
            None => ask(&mut self.memory.lock().expect("nobody panicked")),
            Some(Failure { is_made: false, .. }) => failed,
            Some(Failure { is_made: true, .. }) => {
                ask(&mut self.memory.lock().expect("nobody panicked"))?;
                failed
            }
        }
    }
}

impl Transactions for MemoryStore {
    async fn read(&mut self, key: String) -> Result<Option<StoredValue>, StoreError> {
        self.ask("read", |memory| Ok(memory.read(&key))).await
    }

    async fn transact(&mut self, transaction: Transaction) -> Result<TransactionEnd, StoreError> {
        let attempt = transaction.attempt;
        self.ask(attempt, |memory| memory.transact(transaction))
            .await
    }

    async fn grant(&mut self, ttl: Duration) -> Result<i64, StoreError> {
        self.ask("create a lease", |memory| Ok(memory.grant(ttl)))
            .await
    }
}
