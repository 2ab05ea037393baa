//! Publishes values through watch channels only when they change.

use std::sync::Arc;

use tokio::sync::watch;

/// Publishes a value and notifies the receivers if it has changed.
pub(in crate::agent::services) fn publish<T: PartialEq>(sender: &watch::Sender<Arc<T>>, found: T) {
    sender.send_if_modified(|known| {
        let differs = **known != found;
        if differs {
            *known = Arc::new(found);
        }
        differs
    });
}
