//! Requests to the store for one node: register, deregister and forget.

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};

use super::view::Keys;
use crate::etcd::{Store, StoreError};

/// Writes a node's record, and its presence key bound to the lease. Writes nothing if both already exist. Returns
/// whether it wrote.
pub(super) async fn register(
    store: &mut Store,
    keys: &Keys,
    node: &str,
    record: &str,
    instance: &str,
    lease: i64,
) -> Result<bool, StoreError> {
    let (record_key, presence_key) = (keys.record(node), keys.presence(node));
    let bound = PutOptions::new().with_lease(lease);
    let transaction = Txn::new()
        .when([
            Compare::value(record_key.clone(), CompareOp::Equal, record),
            Compare::value(presence_key.clone(), CompareOp::Equal, instance),
            Compare::lease(presence_key.clone(), CompareOp::Equal, lease),
        ])
        .or_else([
            TxnOp::put(record_key, record, None),
            TxnOp::put(presence_key, instance, Some(bound)),
        ]);
    let done = store.transact("register this node", transaction).await?;
    Ok(!done.succeeded())
}

/// Deletes a node's record and presence key. Returns whether a record existed.
pub(super) async fn deregister(
    store: &mut Store,
    keys: &Keys,
    node: &str,
) -> Result<bool, StoreError> {
    let transaction = Txn::new().and_then([
        TxnOp::delete(keys.presence(node), None),
        TxnOp::delete(keys.record(node), None),
    ]);
    let done = store.transact("deregister this node", transaction).await?;
    let record = done.op_responses().into_iter().nth(1);
    Ok(matches!(record, Some(TxnOpResponse::Delete(deleted)) if deleted.deleted() > 0))
}

/// Deletes a record, unless it was written since or the node's agent is back. Returns whether the record was deleted.
pub(super) async fn forget(
    store: &mut Store,
    record: &str,
    presence: &str,
    mod_revision: i64,
) -> Result<bool, StoreError> {
    let transaction = Txn::new()
        .when([
            Compare::mod_revision(record, CompareOp::Equal, mod_revision),
            Compare::version(presence, CompareOp::Equal, 0),
        ])
        .and_then([TxnOp::delete(record, None)]);
    let done = store.transact("delete a record", transaction).await?;
    Ok(done.succeeded())
}
