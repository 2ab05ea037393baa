//! Bounds on the number of slow requests, so that the remaining capacity serves all others.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::Refusal;

/// How many requests of a kind are served at a time.
pub(super) struct Places {
    free: Arc<Semaphore>,
    most: usize,
    /// The kind, as a refusal names it.
    requests: &'static str,
}

impl Places {
    /// Allows `most` requests at a time; a refusal names them `requests`.
    pub(super) fn new(most: usize, requests: &'static str) -> Self {
        Self {
            free: Arc::new(Semaphore::new(most)),
            most,
            requests,
        }
    }

    /// Takes a place until the returned permit is dropped.
    pub(super) fn take(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let Self { most, requests, .. } = self;
        self.free.clone().try_acquire_owned().map_err(|_| {
            Refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{most} {requests} are already running; try again later"),
            )
        })
    }
}
