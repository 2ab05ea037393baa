//! Removes drained real servers between syncs.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio::time::sleep;
use tracing::warn;

use super::worker::Worker;

/// Deletes draining real servers once they have no connections left. While no server is draining, waits to be woken.
pub(super) async fn drain(worker: Arc<Mutex<Worker>>, wake: Arc<Notify>, interval: Duration) {
    loop {
        if !worker.lock().await.is_draining() {
            wake.notified().await;
            continue;
        }
        sleep(interval).await;
        if let Err(error) = worker.lock().await.reap().await {
            warn!(%error, "cannot remove drained real servers");
        }
    }
}
