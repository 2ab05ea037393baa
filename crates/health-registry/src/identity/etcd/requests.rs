//! The requests to the store for identities. Each change is one transaction, which succeeds only if everything is still
//! as it was read, so that no race gives a label set two numbers or a number two label sets.

use std::collections::BTreeSet;

use health_model::identity::Identity;
use health_model::labels::LabelSet;

use super::super::IdentityError;
use super::super::allocator::shown;
use super::super::sets::{NUMBERS, labels_text};
use super::keys::{Keys, digest_of, read_labels, read_number};
use super::records::{LabelsKey, UnusedIdentity};
use super::transactions::{
    Condition, KeyChange, StoredValue, Transaction, TransactionEnd, Transactions,
};
use crate::etcd::StoreError;

/// Maximum number of attempts to take one label set. An attempt fails only if another node was faster.
const ATTEMPTS: u32 = 100;
/// The purpose of changes that reconnect the two halves of an identity.
const MEND: &str = "repair an identity";

/// Why a label set got no number.
#[derive(Debug)]
pub(super) enum TakeError {
    /// The store failed.
    Store(StoreError),
    /// No identity can be given.
    Refused(IdentityError),
}

impl From<StoreError> for TakeError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// The node on whose behalf keys are written.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) keys: Keys,
    /// This node's name.
    pub(super) node: String,
    /// The lease that the node's keys are bound to.
    pub(super) lease: i64,
}

impl Holder {
    /// The value of the node's references.
    pub(super) fn session(&self) -> String {
        self.lease.to_string()
    }

    /// Takes a reference to the number of a label set. A set without a number gets one: `preferred` if that is free,
    /// else a number chosen by `free`, which is passed the numbers known to be taken.
    pub(super) async fn take(
        &self,
        store: &mut impl Transactions,
        labels: &LabelSet,
        mut preferred: Option<Identity>,
        free: impl Fn(&BTreeSet<Identity>) -> Option<Identity>,
    ) -> Result<Identity, TakeError> {
        let digest = digest_of(labels);
        let mut taken = BTreeSet::new();
        for _ in 0..ATTEMPTS {
            let found = store.read(self.keys.labels(&digest)).await?;
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
        let reason = format!("lost the race to other agents {ATTEMPTS} times");
        Err(StoreError::new("acquire an identity", reason).into())
    }

    /// Takes a reference to the number in a label set's key; `None` if the key changed.
    async fn take_known(
        &self,
        store: &mut impl Transactions,
        labels: &LabelSet,
        digest: &str,
        found: &StoredValue,
    ) -> Result<Option<Identity>, TakeError> {
        let labels_key = self.keys.labels(digest);
        let identity =
            read_number(&found.value).map_err(|reason| corrupt(labels_key.clone(), reason))?;
        let as_found = Condition::Unchanged(labels_key.clone(), found.mod_revision);
        let number_key = self.keys.number(identity);
        let Some(stands) = store.read(number_key.clone()).await? else {
            // Half of the identity was lost.
            let freed_key = self.keys.freed(identity);
            let repair = Transaction {
                attempt: MEND,
                when: vec![
                    as_found.clone(),
                    Condition::Absent(number_key.clone()),
                    Condition::Absent(freed_key.clone()),
                ],
                changes: vec![put(number_key, labels_text(labels)), self.refer(identity)],
                otherwise: Some(freed_key),
            };
            return match store.transact(repair).await? {
                TransactionEnd::Made => Ok(Some(identity)),
                TransactionEnd::Refused(None) => Ok(None),
                TransactionEnd::Refused(Some(_)) => {
                    let forget = Transaction {
                        attempt: MEND,
                        when: vec![as_found],
                        changes: vec![KeyChange::Delete(labels_key)],
                        otherwise: None,
                    };
                    store.transact(forget).await?;
                    Ok(None)
                }
            };
        };
        let known =
            read_labels(&stands.value).map_err(|reason| corrupt(number_key.clone(), reason))?;
        if known != *labels {
            let reason = format!(
                "its value is {identity}, which belongs to {}",
                shown(&known)
            );
            return Err(corrupt(labels_key, reason));
        }
        let refer = Transaction {
            attempt: "acquire an identity",
            when: vec![
                as_found,
                Condition::Unchanged(number_key, stands.mod_revision),
            ],
            changes: vec![self.refer(identity)],
            otherwise: None,
        };
        Ok(store.transact(refer).await?.is_made().then_some(identity))
    }

    /// Gives this number to a label set; `None` if another set has the number, or this set got a number meanwhile.
    async fn create(
        &self,
        store: &mut impl Transactions,
        labels: &LabelSet,
        digest: &str,
        identity: Identity,
    ) -> Result<Option<Identity>, TakeError> {
        let (labels_key, number_key) = (self.keys.labels(digest), self.keys.number(identity));
        let create = Transaction {
            attempt: "allocate an identity",
            when: vec![
                Condition::Absent(labels_key.clone()),
                Condition::Absent(number_key.clone()),
                Condition::Absent(self.keys.freed(identity)),
            ],
            changes: vec![
                put(labels_key.clone(), identity.to_string()),
                put(number_key.clone(), labels_text(labels)),
                self.refer(identity),
            ],
            otherwise: Some(number_key.clone()),
        };
        let stands = match store.transact(create).await? {
            TransactionEnd::Made => return Ok(Some(identity)),
            TransactionEnd::Refused(stands) => stands,
        };
        let own =
            stands.filter(|stands| read_labels(&stands.value).is_ok_and(|known| known == *labels));
        let Some(own) = own else { return Ok(None) };
        // The label set already has this number; only the key from the labels to the number was lost.
        let repair = Transaction {
            attempt: MEND,
            when: vec![
                Condition::Absent(labels_key.clone()),
                Condition::Unchanged(number_key, own.mod_revision),
            ],
            changes: vec![put(labels_key, identity.to_string()), self.refer(identity)],
            otherwise: None,
        };
        Ok(store.transact(repair).await?.is_made().then_some(identity))
    }

    fn refer(&self, identity: Identity) -> KeyChange {
        self.bound(self.keys.reference(identity, &self.node), self.session())
    }

    fn bound(&self, key: String, value: String) -> KeyChange {
        KeyChange::Put {
            key,
            value,
            lease: Some(self.lease),
        }
    }

    /// Writes a key bound to the lease.
    pub(super) async fn put(
        &self,
        store: &mut impl Transactions,
        key: String,
        value: String,
    ) -> Result<(), StoreError> {
        let put = self.bound(key, value);
        change(store, "announce an address", put).await
    }

    /// Deletes one of this node's own keys.
    pub(super) async fn delete(
        &self,
        store: &mut impl Transactions,
        key: String,
    ) -> Result<(), StoreError> {
        change(store, "delete a key", KeyChange::Delete(key)).await
    }

    /// Collects an identity unless a node uses it again. Its number is reserved while the lease `freed` lasts. Returns
    /// whether the identity was collected.
    pub(super) async fn collect(
        &self,
        store: &mut impl Transactions,
        unused: &UnusedIdentity,
        freed: i64,
    ) -> Result<bool, StoreError> {
        let identity = unused.identity;
        let (labels_key, number_key) =
            (self.keys.labels(&unused.digest), self.keys.number(identity));
        let says = |number: Identity| Condition::Says(labels_key.clone(), number.to_string());
        let as_known = match unused.labels_key {
            LabelsKey::Own => says(identity),
            LabelsKey::Other(other) => says(other),
            LabelsKey::Absent => Condition::Absent(labels_key.clone()),
        };
        let mut changes = vec![
            KeyChange::Delete(number_key.clone()),
            KeyChange::Put {
                key: self.keys.freed(identity),
                value: String::new(),
                lease: Some(freed),
            },
        ];
        if unused.labels_key == LabelsKey::Own {
            changes.push(KeyChange::Delete(labels_key.clone()));
        }
        let collect = Transaction {
            attempt: "collect an identity",
            when: vec![
                Condition::Unchanged(number_key, unused.mod_revision),
                as_known,
                Condition::NoneBelow(self.keys.references(identity)),
            ],
            changes,
            otherwise: None,
        };
        Ok(store.transact(collect).await?.is_made())
    }
}

fn put(key: String, value: String) -> KeyChange {
    let lease = None;
    KeyChange::Put { key, value, lease }
}

/// Makes a change unconditionally.
async fn change(
    store: &mut impl Transactions,
    attempt: &'static str,
    change: KeyChange,
) -> Result<(), StoreError> {
    let transaction = Transaction {
        attempt,
        when: Vec::new(),
        changes: vec![change],
        otherwise: None,
    };
    store.transact(transaction).await.map(drop)
}

fn corrupt(key: String, reason: String) -> TakeError {
    TakeError::Refused(IdentityError::Corrupt { key, reason })
}
