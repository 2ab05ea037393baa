//! Limits the number of slow requests, so that capacity remains for all others.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::Refusal;

/// Limits the number of concurrent requests of a kind.
pub(super) struct Slots {
    free: Arc<Semaphore>,
    most: usize,
    /// Name of the kind in a refusal.
    requests: &'static str,
}

impl Slots {
    /// Allows `most` requests at a time, and refuses further ones with an error that names them `requests`.
    pub(super) fn new(most: usize, requests: &'static str) -> Self {
        Self {
            free: Arc::new(Semaphore::new(most)),
            most,
            requests,
        }
    }

    /// Takes a slot, which is free again when the returned permit is dropped.
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
