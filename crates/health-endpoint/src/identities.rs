//! Where the identities of endpoints come from.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{HeldIdentities, IdentityAllocator, OnOutage};
use tokio::sync::watch;

/// The identity cannot be told for now; it is asked for again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the identity of the labels cannot be told yet: {0}")]
pub struct IdentityUnavailable(pub String);

/// Gives identities for labels.
pub trait IdentitySource: Send + Sync {
    /// The identity of these labels, held until it is [released](Self::release) as often. May take as long
    /// as the store does.
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Identity, IdentityUnavailable>> + Send + 'a>>;

    /// Gives one acquisition back.
    fn release(&self, identity: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// The identities that are held, by labels. One changes when the store lost it and gave its number to others; who
    /// holds it acquires the new one then.
    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>>;
}

/// Identities of an allocator, by labels.
pub struct AllocatedIdentities {
    allocator: Arc<IdentityAllocator>,
    /// What is acquired, and how often.
    acquired: Mutex<HashMap<Identity, (LabelSet, usize)>>,
}

impl AllocatedIdentities {
    /// Those of this one.
    pub fn by(allocator: Arc<IdentityAllocator>) -> Self {
        Self {
            allocator,
            acquired: Mutex::default(),
        }
    }

    fn acquired(&self) -> MutexGuard<'_, HashMap<Identity, (LabelSet, usize)>> {
        self.acquired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdentitySource for AllocatedIdentities {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Identity, IdentityUnavailable>> + Send + 'a>> {
        Box::pin(async move {
            let identity = self
                .allocator
                .acquire(labels, OnOutage::Fail)
                .await
                .map_err(|error| IdentityUnavailable(error.to_string()))?;
            let mut acquired = self.acquired();
            acquired
                .entry(identity)
                .or_insert_with(|| (labels.clone(), 0))
                .1 += 1;
            Ok(identity)
        })
    }

    fn release(&self, identity: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let mut acquired = self.acquired();
        if let Entry::Occupied(mut one) = acquired.entry(identity) {
            let (labels, count) = one.get_mut();
            self.allocator.release(labels);
            *count -= 1;
            if *count == 0 {
                one.remove();
            }
        }
        Box::pin(std::future::ready(()))
    }

    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.allocator.held()
    }
}
