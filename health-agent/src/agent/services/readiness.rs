//! What the probes of this node say of its addresses.

use std::net::IpAddr;
use std::sync::Arc;

use health_probe::supervisor::Supervisor;
use health_service::source::Readiness;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Follows the readiness of pods by their addresses. Dropping it ends that.
pub(super) struct PodReadiness {
    readiness: watch::Receiver<Arc<Readiness>>,
    task: JoinHandle<()>,
}

impl PodReadiness {
    /// Begins. `shared` are addresses of the node beside those that the supervisor knows: all its pods on the host's
    /// network have them. Must be called in a tokio runtime.
    pub(super) fn follow(supervisor: Supervisor, shared: Vec<IpAddr>) -> Self {
        let (sender, readiness) = watch::channel(Arc::default());
        let task = tokio::spawn(async move {
            let mut changes = supervisor.changes();
            loop {
                // What changes from here on is looked at next time.
                changes.mark_unchanged();
                let mut now = supervisor.readiness();
                now.retain(|ip, _| !shared.contains(ip));
                sender.send_if_modified(|known: &mut Arc<Readiness>| {
                    let is_news = **known != now;
                    if is_news {
                        *known = Arc::new(now);
                    }
                    is_news
                });
                if changes.changed().await.is_err() {
                    return;
                }
            }
        });
        Self { readiness, task }
    }

    /// What is known, now and whenever it changes.
    pub(super) fn readiness(&self) -> watch::Receiver<Arc<Readiness>> {
        self.readiness.clone()
    }
}

impl Drop for PodReadiness {
    fn drop(&mut self) {
        self.task.abort();
    }
}
