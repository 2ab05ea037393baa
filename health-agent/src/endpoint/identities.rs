//! Where the identities of endpoints come from.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::identity::{Identity, IdentityAllocator, OnOutage};
use crate::labels::LabelSet;

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
}

/// Identities of an allocator, by labels.
pub struct Allocated {
    allocator: Arc<IdentityAllocator>,
    /// What is held, and how often.
    held: Mutex<HashMap<Identity, (LabelSet, usize)>>,
}

impl Allocated {
    /// Those of this one.
    pub fn by(allocator: Arc<IdentityAllocator>) -> Self {
        Self {
            allocator,
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Identity, (LabelSet, usize)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdentitySource for Allocated {
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
            let mut held = self.held();
            held.entry(identity)
                .or_insert_with(|| (labels.clone(), 0))
                .1 += 1;
            Ok(identity)
        })
    }

    fn release(&self, identity: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let mut held = self.held();
        if let Entry::Occupied(mut one) = held.entry(identity) {
            let (labels, count) = one.get_mut();
            self.allocator.release(labels);
            *count -= 1;
            if *count == 0 {
                one.remove();
            }
        }
        Box::pin(std::future::ready(()))
    }
}
