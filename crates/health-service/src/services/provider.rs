//! The interface to write services into the kernel.

use std::fmt;

use crate::spec::PortKey;
use crate::state::{Changes, State};

/// Writes a state into the kernel.
pub trait Provider: Send + 'static {
    /// Why it failed.
    type Error: fmt::Display + Send;

    /// Writes the changes, or the whole state, into the kernel. After an error that concerns everything, and after a
    /// panic, it is asked for the whole state, with the same changes and those that came since; after an error about
    /// ports, for these.
    fn sync(&mut self, work: Work<'_>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// The ports that an error concerns, each with what went wrong: they stayed unchanged, and all others are as they
    /// should be. Empty if the error concerns everything.
    fn refused(error: &Self::Error) -> impl Iterator<Item = (PortKey, String)> {
        let _ = error;
        std::iter::empty()
    }

    /// Whether the state is in force after a sync, except for refused ports.
    fn is_in_force(result: &Result<(), Self::Error>) -> bool {
        let error = result.as_ref().err();
        error.is_none_or(|error| Self::refused(error).next().is_some())
    }
}

/// What a provider must do.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The complete desired state of the kernel.
    pub state: &'a State,
    /// What has changed since the provider last succeeded.
    pub changes: &'a Changes,
    /// Whether to check everything in the kernel, and not only what has changed: at the start, after a failure, and now
    /// and then.
    pub is_full: bool,
}
