//! Where the identities of endpoints come from.

use std::future::Future;
use std::pin::Pin;

use crate::identity::Identity;
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

/// The identities of an agent without an allocator: labels that name a reserved identity have that one,
/// all others `reserved:init`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReservedOnly;

impl IdentitySource for ReservedOnly {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Identity, IdentityUnavailable>> + Send + 'a>> {
        let reserved = Identity::all_reserved()
            .find(|identity| identity.reserved_labels().as_ref() == Some(labels));
        Box::pin(std::future::ready(Ok(reserved.unwrap_or(Identity::INIT))))
    }

    fn release(&self, _: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}
