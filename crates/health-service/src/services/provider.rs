//! The interface for writing services into the kernel.

use std::fmt;

use crate::spec::PortKey;
use crate::state::{Changes, State};

/// Writes a state into the kernel.
pub trait Provider: Send + 'static {
    /// The error of a failed sync.
    type Error: fmt::Display + Send;

    /// Writes the changes, or the whole state, into the kernel. After a panic or an error that concerns everything, the
    /// next call is for the whole state, with the same changes and all later ones; after an error about ports, it
    /// includes these ports.
    fn sync(&mut self, work: Work<'_>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Returns the ports that an error concerns, each with its problem. These ports stayed unchanged, and all others
    /// are in the desired state. Empty if the error concerns everything.
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

/// The work for a provider.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The complete desired state of the kernel.
    pub state: &'a State,
    /// The changes since the provider last succeeded.
    pub changes: &'a Changes,
    /// Whether to check everything in the kernel, not only the changes: at the start, after a failure, and at
    /// intervals.
    pub is_full: bool,
}
