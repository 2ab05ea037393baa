//! What is asked of the store for identities. Each change is one transaction that holds only while
//! everything is as it was seen, so that no race gives two numbers to a label set or two label sets to
//! a number.

use std::collections::BTreeSet;

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse};
use health_model::identity::Identity;
use health_model::labels::LabelSet;

use super::super::IdentityError;
use super::super::allocator::shown;
use super::keys::{Keys, NUMBERS, digest_of, labels_text, read_labels, read_number};
use super::records::{LabelsKey, UnusedIdentity};
use crate::etcd::{Store, StoreError, Value};

/// Most attempts to take one label set. Each fails only when another node was faster.
const ATTEMPTS: u32 = 100;

/// Why a label set got no number.
#[derive(Debug)]
pub(super) enum TakeError {
    /// The store failed.
    Store(StoreError),
    /// The store refused.
    Refused(IdentityError),
}

impl From<StoreError> for TakeError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// For whom keys are written.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) keys: Keys,
    /// This node's name.
    pub(super) node: String,
    /// What its keys are bound to.
    pub(super) lease: i64,
}

impl Holder {
    /// The value of its references.
    pub(super) fn session(&self) -> String {
        self.lease.to_string()
    }

    /// Takes a reference to the number of a label set, which gets one where it has none: `preferred`
    /// if that is free, else what `free` finds beside those known to be taken.
    pub(super) async fn take(
        &self,
        store: &mut Store,
        labels: &LabelSet,
        mut preferred: Option<Identity>,
        free: impl Fn(&BTreeSet<Identity>) -> Option<Identity>,
    ) -> Result<Identity, TakeError> {
        let digest = digest_of(labels);
        let mut taken = BTreeSet::new();
        for _ in 0..ATTEMPTS {
            let found = get(store, self.keys.labels(&digest)).await?;
            let got = match found {
                Some(found) => self.take_known(store, labels, &digest, &found).await?,
                None => {
                    let candidate = preferred.take().or_else(|| free(&taken));
                    let candidate = candidate.ok_or_else(|| {
                        TakeError::Refused(IdentityError::Exhausted {
                            labels: shown(labels),
                            count: NUMBERS,
                        })
                    })?;
                    let got = self.create(store, labels, &digest, candidate).await?;
                    if got.is_none() {
                        taken.insert(candidate);
                    }
                    got
                }
            };
            if let Some(identity) = got {
                return Ok(identity);
            }
        }
        let reason = format!("others were faster {ATTEMPTS} times");
        Err(StoreError::new("take an identity", reason).into())
    }

    /// Takes a reference to the number that stands at a label set's key; `None` where that changed.
    async fn take_known(
        &self,
        store: &mut Store,
        labels: &LabelSet,
        digest: &str,
        found: &KeyValue,
    ) -> Result<Option<Identity>, TakeError> {
        let labels_key = self.keys.labels(digest);
        let identity = read_number(&Value::from(found.value().to_vec()))
            .map_err(|reason| corrupt(labels_key.clone(), reason))?;
        let as_found =
            Compare::mod_revision(labels_key.clone(), CompareOp::Equal, found.mod_revision());
        let number_key = self.keys.number(identity);
        let Some(stands) = get(store, number_key.clone()).await? else {
            // Half of it was lost.
            let repair = Txn::new()
                .when([
                    as_found.clone(),
                    absent(&number_key),
                    absent(&self.keys.freed(identity)),
                ])
                .and_then([
                    TxnOp::put(number_key, labels_text(labels), None),
                    self.refer(identity),
                ])
                .or_else([TxnOp::get(self.keys.freed(identity), None)]);
            let done = store.transact("mend an identity", repair).await?;
            if done.succeeded() {
                return Ok(Some(identity));
            }
            let is_freed = matches!(
                done.op_responses().first(),
                Some(TxnOpResponse::Get(freed)) if !freed.kvs().is_empty()
            );
            if is_freed {
                let forget = Txn::new()
                    .when([as_found])
                    .and_then([TxnOp::delete(labels_key, None)]);
                store.transact("mend an identity", forget).await?;
            }
            return Ok(None);
        };
        let known = read_labels(&Value::from(stands.value().to_vec()))
            .map_err(|reason| corrupt(number_key.clone(), reason))?;
        if known != *labels {
            let reason = format!(
                "it says {identity}, which is the number of {}",
                shown(&known)
            );
            return Err(corrupt(labels_key, reason));
        }
        let revision = stands.mod_revision();
        let refer = Txn::new()
            .when([
                as_found,
                Compare::mod_revision(number_key, CompareOp::Equal, revision),
            ])
            .and_then([self.refer(identity)]);
        let done = store.transact("take an identity", refer).await?;
        Ok(done.succeeded().then_some(identity))
    }

    /// Gives a label set this number; `None` where another one has it, or the set got one meanwhile.
    async fn create(
        &self,
        store: &mut Store,
        labels: &LabelSet,
        digest: &str,
        identity: Identity,
    ) -> Result<Option<Identity>, TakeError> {
        let (labels_key, number_key) = (self.keys.labels(digest), self.keys.number(identity));
        let create = Txn::new()
            .when([
                absent(&labels_key),
                absent(&number_key),
                absent(&self.keys.freed(identity)),
            ])
            .and_then([
                TxnOp::put(labels_key.clone(), identity.to_string(), None),
                TxnOp::put(number_key.clone(), labels_text(labels), None),
                self.refer(identity),
            ])
            .or_else([TxnOp::get(number_key.clone(), None)]);
        let done = store.transact("allocate an identity", create).await?;
        if done.succeeded() {
            return Ok(Some(identity));
        }
        let stands = match done.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(found)) => found.kvs().first().cloned(),
            _ => None,
        };
        let own = stands.filter(|stands| {
            read_labels(&Value::from(stands.value().to_vec())).is_ok_and(|known| known == *labels)
        });
        let Some(own) = own else { return Ok(None) };
        // It has this number already; only the way from the labels to it was lost.
        let repair = Txn::new()
            .when([
                absent(&labels_key),
                Compare::mod_revision(number_key, CompareOp::Equal, own.mod_revision()),
            ])
            .and_then([
                TxnOp::put(labels_key, identity.to_string(), None),
                self.refer(identity),
            ]);
        let done = store.transact("mend an identity", repair).await?;
        Ok(done.succeeded().then_some(identity))
    }

    fn refer(&self, identity: Identity) -> TxnOp {
        let key = self.keys.reference(identity, &self.node);
        let bound = PutOptions::new().with_lease(self.lease);
        TxnOp::put(key, self.session(), Some(bound))
    }

    /// Writes a key bound to the lease.
    pub(super) async fn put(
        &self,
        store: &mut Store,
        key: String,
        value: String,
    ) -> Result<(), StoreError> {
        let bound = PutOptions::new().with_lease(self.lease);
        let put = Txn::new().and_then([TxnOp::put(key, value, Some(bound))]);
        store.transact("announce an address", put).await?;
        Ok(())
    }

    /// Deletes one of this node's own keys.
    pub(super) async fn delete(&self, store: &mut Store, key: String) -> Result<(), StoreError> {
        let delete = Txn::new().and_then([TxnOp::delete(key, None)]);
        store.transact("take a key back", delete).await?;
        Ok(())
    }

    /// Collects an identity unless somebody has taken it up; its number is not given out again while
    /// the lease `freed` lasts. Returns whether it did.
    pub(super) async fn collect(
        &self,
        store: &mut Store,
        unused: &UnusedIdentity,
        freed: i64,
    ) -> Result<bool, StoreError> {
        let identity = unused.identity;
        let (labels_key, number_key) =
            (self.keys.labels(&unused.digest), self.keys.number(identity));
        let says = |number: Identity| {
            Compare::value(labels_key.clone(), CompareOp::Equal, number.to_string())
        };
        let as_known = match unused.labels_key {
            LabelsKey::Own => says(identity),
            LabelsKey::Other(other) => says(other),
            LabelsKey::Absent => absent(&labels_key),
        };
        let bound = PutOptions::new().with_lease(freed);
        let mut changes = vec![
            TxnOp::delete(number_key.clone(), None),
            TxnOp::put(self.keys.freed(identity), "", Some(bound)),
        ];
        if unused.labels_key == LabelsKey::Own {
            changes.push(TxnOp::delete(labels_key.clone(), None));
        }
        let collect = Txn::new()
            .when([
                Compare::mod_revision(number_key, CompareOp::Equal, unused.mod_revision),
                as_known,
                Compare::version(self.keys.references(identity), CompareOp::Equal, 0).with_prefix(),
            ])
            .and_then(changes);
        let done = store.transact("collect an identity", collect).await?;
        Ok(done.succeeded())
    }
}

async fn get(store: &mut Store, key: String) -> Result<Option<KeyValue>, StoreError> {
    let get = Txn::new().and_then([TxnOp::get(key, None)]);
    let done = store.transact("look up an identity", get).await?;
    Ok(match done.op_responses().into_iter().next() {
        Some(TxnOpResponse::Get(found)) => found.kvs().first().cloned(),
        _ => None,
    })
}

fn absent(key: &str) -> Compare {
    Compare::version(key, CompareOp::Equal, 0)
}

fn corrupt(key: String, reason: String) -> TakeError {
    TakeError::Refused(IdentityError::Corrupt { key, reason })
}
