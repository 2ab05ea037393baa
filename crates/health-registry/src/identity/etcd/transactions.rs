//! The requests to a store: reads, and atomic changes.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};

use crate::etcd::{Store, StoreError, Value};

/// A store that serves requests. Clones use the same store.
pub(super) trait Transactions: Clone + Send {
    /// Reads a key.
    fn read(
        &mut self,
        key: String,
    ) -> impl Future<Output = Result<Option<StoredValue>, StoreError>> + Send;

    /// Makes changes if all conditions hold.
    fn transact(
        &mut self,
        transaction: Transaction,
    ) -> impl Future<Output = Result<TransactionEnd, StoreError>> + Send;

    /// Creates a lease and returns its ID.
    fn grant(&mut self, ttl: Duration) -> impl Future<Output = Result<i64, StoreError>> + Send;
}

/// The contents of a key.
#[derive(Clone, Debug)]
pub(super) struct StoredValue {
    pub(super) value: Value,
    pub(super) mod_revision: i64,
}

/// Changes and their conditions.
#[derive(Clone, Debug)]
pub(super) struct Transaction {
    /// The purpose of the transaction, for errors.
    pub(super) attempt: &'static str,
    pub(super) when: Vec<Condition>,
    pub(super) changes: Vec<KeyChange>,
    /// The key to read if the changes are not made.
    pub(super) otherwise: Option<String>,
}

/// A condition.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    /// The key does not exist.
    Absent(String),
    /// No key has this prefix.
    NoneBelow(String),
    /// The key has this value.
    Says(String, String),
    /// The key was last changed at this revision.
    Unchanged(String, i64),
}

/// A change of a key.
#[derive(Clone, Debug)]
pub(super) enum KeyChange {
    Put {
        key: String,
        value: String,
        /// The lease that the key is bound to.
        lease: Option<i64>,
    },
    Delete(String),
}

/// The result of a transaction.
#[derive(Clone, Debug)]
pub(super) enum TransactionEnd {
    Made,
    /// A condition did not hold. Holds the contents of the key [`Transaction::otherwise`].
    Refused(Option<StoredValue>),
}

impl TransactionEnd {
    pub(super) fn is_made(&self) -> bool {
        matches!(self, Self::Made)
    }
}

impl Transactions for Store {
    async fn read(&mut self, key: String) -> Result<Option<StoredValue>, StoreError> {
        let get = Txn::new().and_then([TxnOp::get(key, None)]);
        let done = Store::transact(self, "look up an identity", get).await?;
        Ok(found(done.op_responses()))
    }

    async fn transact(&mut self, transaction: Transaction) -> Result<TransactionEnd, StoreError> {
        let Transaction {
            attempt,
            when,
            changes,
            otherwise,
        } = transaction;
        let request = Txn::new()
            .when(when.into_iter().map(Compare::from).collect::<Vec<_>>())
            .and_then(changes.into_iter().map(TxnOp::from).collect::<Vec<_>>())
            .or_else(
                otherwise
                    .map(|key| TxnOp::get(key, None))
                    .into_iter()
                    .collect::<Vec<_>>(),
            );
        let done = Store::transact(self, attempt, request).await?;
        Ok(match done.succeeded() {
            true => TransactionEnd::Made,
            false => TransactionEnd::Refused(found(done.op_responses())),
        })
    }

    async fn grant(&mut self, ttl: Duration) -> Result<i64, StoreError> {
        Store::grant(self, ttl).await
    }
}

/// Returns the contents found by the first operation.
fn found(answers: Vec<TxnOpResponse>) -> Option<StoredValue> {
    let Some(TxnOpResponse::Get(found)) = answers.into_iter().next() else {
        return None;
    };
    let found = found.kvs().first()?;
    Some(StoredValue {
        value: found.value().to_vec().into(),
        mod_revision: found.mod_revision(),
    })
}

impl From<Condition> for Compare {
    fn from(condition: Condition) -> Self {
        match condition {
            Condition::Absent(key) => Self::version(key, CompareOp::Equal, 0),
            Condition::NoneBelow(prefix) => {
                Self::version(prefix, CompareOp::Equal, 0).with_prefix()
            }
            Condition::Says(key, value) => Self::value(key, CompareOp::Equal, value),
            Condition::Unchanged(key, revision) => {
                Self::mod_revision(key, CompareOp::Equal, revision)
            }
        }
    }
}

impl From<KeyChange> for TxnOp {
    fn from(change: KeyChange) -> Self {
        match change {
            KeyChange::Put { key, value, lease } => {
                let bound = lease.map(|lease| PutOptions::new().with_lease(lease));
                Self::put(key, value, bound)
            }
            KeyChange::Delete(key) => Self::delete(key, None),
        }
    }
}
