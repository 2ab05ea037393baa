//! The source of endpoints' identities.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_registry::identity::{HeldIdentities, IdentityAllocator, OnOutage};
use tokio::sync::watch;

/// The identity is not available now; the request is repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the identity of these labels is not known yet: {0}")]
pub struct IdentityUnavailable(pub String);

/// An acquisition, which must be released once. The number alone does not identify it: the store may have lost the
/// number and given it to other labels, while packets still meet the former ones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it is held until it is released"]
pub struct Hold {
    /// The acquired labels.
    pub labels: LabelSet,
    /// Their identity at that time.
    pub identity: Identity,
}

/// Allocates identities for labels.
pub trait IdentitySource: Send + Sync {
    /// Acquires the identity of these labels, which is held until it is [released](Self::release). May take as long as
    /// the store does.
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Hold, IdentityUnavailable>> + Send + 'a>>;

    /// Releases one acquisition.
    fn release(&self, hold: Hold) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Follows the held identities, by labels. One changes if the store lost it and gave its number to others; its
    /// holder then acquires the new one.
    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>>;
}

/// Identities of an allocator, by labels.
pub struct AllocatedIdentities(Arc<IdentityAllocator>);

impl AllocatedIdentities {
    /// The identities of this allocator.
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
