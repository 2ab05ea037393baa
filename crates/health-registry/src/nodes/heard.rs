//! The time when a source was last heard.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

/// When a source last sent its contents, or confirmed the known contents. Clones share the time, so it also advances in
/// states that were already handed out; these still compare equal.
#[derive(Clone, Debug)]
pub struct LastHeard(Arc<Mutex<Timestamp>>);

impl LastHeard {
    /// Creates a [`LastHeard`] with this time.
    pub fn at(time: Timestamp) -> Self {
        Self(Arc::new(Mutex::new(time)))
    }

    /// Creates a [`LastHeard`] with the current time.
    pub fn now() -> Self {
        Self::at(Timestamp::now())
    }

    /// Records that the source was heard now.
    pub(crate) fn note(&self) {
        *self.lock() = Timestamp::now();
    }

    /// Returns the time.
    pub fn time(&self) -> Timestamp {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Timestamp> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for LastHeard {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for LastHeard {}
