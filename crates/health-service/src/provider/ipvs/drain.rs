//! Real servers on their way out, while no sync comes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio::time::sleep;
use tracing::warn;

use super::worker::Worker;

/// Deletes real servers that have lost their last connection, as long as there are some that get no new ones; then waits
/// to be woken.
pub(super) async fn drain(worker: Arc<Mutex<Worker>>, wake: Arc<Notify>, interval: Duration) {
    loop {
        if !worker.lock().await.is_draining() {
            wake.notified().await;
            continue;
        }
        sleep(interval).await;
        if let Err(error) = worker.lock().await.reap().await {
            warn!(%error, "cannot remove real servers that are not used any more");
        }
    }
}
