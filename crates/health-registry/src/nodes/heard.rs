//! When a source was heard for the last time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

/// When a source said for the last time what it has, or that it has what is known. Clones share it, so that it moves on
/// in states that were handed out before, which are as equal as ever.
#[derive(Clone, Debug)]
pub struct LastHeard(Arc<Mutex<Timestamp>>);

impl LastHeard {
    /// At this time.
    pub fn at(time: Timestamp) -> Self {
        Self(Arc::new(Mutex::new(time)))
    }

    /// Just now.
    pub fn now() -> Self {
        Self::at(Timestamp::now())
    }

    /// It is heard now.
    pub(crate) fn note(&self) {
        *self.lock() = Timestamp::now();
    }

    /// The time.
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
