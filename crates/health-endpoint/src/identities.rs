//! The source of endpoints' identities.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{HeldIdentities, IdentityAllocator, OnOutage};
use tokio::sync::watch;

/// The identity is not available now; the request will be repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the identity for these labels is not known yet: {0}")]
pub struct IdentityUnavailable(pub String);

/// One acquisition of an identity, to be released exactly once. The number alone does not identify an acquisition: the
/// store may have lost the number and given it to other labels, while packets still meet the earlier labels.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it is held until it is released"]
pub struct Hold {
    /// The acquired labels.
    pub labels: LabelSet,
    /// The identity that the labels had at that time.
    pub identity: Identity,
}

/// Allocates identities for labels.
pub trait IdentitySource: Send + Sync {
    /// Acquires the identity of these labels and holds it until it is [released](Self::release). This may take as long
    /// as the store takes.
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Hold, IdentityUnavailable>> + Send + 'a>>;

    /// Releases one acquisition.
    fn release(&self, hold: Hold) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Follows the held identities, by labels. An identity changes if the store lost it and gave its number to other
    /// labels; the holder then acquires the new one.
    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>>;
}

/// The identities of an allocator.
pub struct AllocatedIdentities(Arc<IdentityAllocator>);

impl AllocatedIdentities {
    /// Creates a source of the identities of this allocator.
    pub fn by(allocator: Arc<IdentityAllocator>) -> Self {
        Self(allocator)
    }
}

impl IdentitySource for AllocatedIdentities {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Hold, IdentityUnavailable>> + Send + 'a>> {
        Box::pin(async move {
            let acquired = self.0.acquire(labels, OnOutage::Fail).await;
            let identity = acquired.map_err(|error| IdentityUnavailable(error.to_string()))?;
            Ok(Hold {
                labels: labels.clone(),
                identity,
            })
        })
    }

    fn release(&self, hold: Hold) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.0.release(&hold.labels);
        Box::pin(std::future::ready(()))
    }

    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        self.0.held()
    }
}
