//! The readiness of this node's pods by address, as found by probes.

use std::net::IpAddr;
use std::sync::Arc;

use health_model::task::AbortOnDrop;
use health_probe::supervisor::Supervisor;
use health_service::source::Readiness;
use tokio::sync::watch;

use super::publish::publish;

/// Follows the readiness of pods by address until it is dropped.
pub(super) struct PodReadiness {
    readiness: watch::Receiver<Arc<Readiness>>,
    _task: AbortOnDrop,
}

impl PodReadiness {
    /// Starts following. `shared` holds addresses of the node that the supervisor does not know. All pods on the host
    /// network share these addresses, so they have no readiness. Must be called in a tokio runtime.
    pub(super) fn follow(supervisor: Supervisor, shared: Vec<IpAddr>) -> Self {
        let (sender, readiness) = watch::channel(Arc::default());
        let task = AbortOnDrop::spawn(async move {
            let mut changes = supervisor.changes();
            loop {
                // Changes after this point trigger the next round.
                changes.mark_unchanged();
                let mut now = supervisor.readiness();
                now.retain(|ip, _| !shared.contains(ip));
                publish(&sender, now);
                if changes.changed().await.is_err() {
                    return;
                }
            }
        });
        Self {
            readiness,
            _task: task,
        }
    }

    /// The current readiness, updated whenever it changes.
    pub(super) fn readiness(&self) -> watch::Receiver<Arc<Readiness>> {
        self.readiness.clone()
    }
}
