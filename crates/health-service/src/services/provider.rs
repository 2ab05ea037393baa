//! Who brings services into the kernel.

use std::fmt;

use crate::spec::PortKey;
use crate::state::{Changes, State};

/// Brings a state into the kernel.
pub trait Provider: Send + 'static {
    /// Why it could not.
    type Error: fmt::Display + Send;

    /// Brings into the kernel what has changed, or the whole state. After an error about all, and when it has panicked, it is
    /// asked for the whole state, with the same changes and those that came since; after one about ports, for these.
    fn sync(&mut self, work: Work<'_>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// The ports that an error is about, each with what went wrong: they are as they were, and all others as they should be.
    /// None for an error that is about all.
    fn refused(error: &Self::Error) -> impl Iterator<Item = (PortKey, String)> {
        let _ = error;
        std::iter::empty()
    }

    /// Whether the state is in force after a sync, but for ports that were refused.
    fn is_in_force(result: &Result<(), Self::Error>) -> bool {
        let error = result.as_ref().err();
        error.is_none_or(|error| Self::refused(error).next().is_some())
    }
}

/// What a provider is to do.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// All that is to be in the kernel.
    pub state: &'a State,
    /// What is another than when the provider last succeeded.
    pub changes: &'a Changes,
    /// Whether to look at all that is in the kernel, and not only at what has changed: at the start, after a failure, and
    /// now and then.
    pub is_full: bool,
}
